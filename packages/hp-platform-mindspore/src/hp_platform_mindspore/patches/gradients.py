"""Replacements for MindSpore's own ways to gradients, which say what they cannot do with DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspore.common.recompute import _RecomputeCell

from hp_dtensor.exceptions import CapabilityError, GradientPathError
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.gradients import check_reached
from hp_platform_mindspore.tensor.autograd import running_for


def checking_weights(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Have `mindspore.value_and_grad` refuse parameters whose gradients go past it; its backward is for inputs."""

    @functools.wraps(plain)
    def grad(self: Any, obj: Any, grad: Any, weights: Any, *args: Any) -> Any:
        try:
            check_reached("mindspore.value_and_grad", weights if isinstance(weights, (tuple, list)) else [weights])
        except GradientPathError:
            self.clear_res()  # what the forward has recorded
            raise
        with running_for(inputs=True):
            return plain(self, obj, grad, weights, *args)

    return grad


def explaining_custom_bprop(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Have a Cell with its own `bprop` refuse DTensors, and say what else it cannot be used with."""

    @functools.wraps(plain)
    def call_custom_bprop(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(obj, _RecomputeCell) and any(isinstance(x, DTensor) for x in (*args, *kwargs.values())):
            raise CapabilityError(
                f"{type(obj).__name__} has a bprop of its own, which would see this rank's shards of DTensors, without "
                "their placements. Run it on local tensors (local_map), or write it without a bprop"
            )
        try:
            return plain(self, obj, *args, **kwargs)
        except RuntimeError as error:
            if "top_cell" not in str(error):
                raise
            raise CapabilityError(
                f"{type(obj).__name__} has a bprop of its own, as every Cell after recompute() has: MindSpore runs it "
                "in mindspore.value_and_grad only. With platform.backward recompute by hp_dtensor.parallel.recompute"
                ".checkpoint(block, x, platform=platform), and give gradients of your own by "
                "platform.custom_function"
            ) from error

    return call_custom_bprop
