"""Refusals of torch's own ways to train one model on many ranks, around models that are sharded already."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.platform.patch import Patch
from hp_platform_torch.tensor.dtensor import TorchDTensor

_WHAT_TO_PREPARE = (
    "With accelerate, prepare the optimizer and the data loader and not the model: optimizer, loader = "
    "accelerator.prepare(optimizer, loader). With Lightning Fabric, use ModelParallelStrategy with a parallelize_fn "
    "that calls hp_fsdp.fully_shard, and set up the plain model."
)


def refusing_sharded(init: Callable[..., None], name: str) -> Callable[..., None]:
    """Return a wrapper's `__init__` that refuses modules with DTensor parameters; the error says `name`."""

    @functools.wraps(init)
    def refused(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        _refuse_dtensors(name, module.named_parameters())
        init(self, module, *args, **kwargs)

    return refused


def refusing_sharded_parameters(init: Callable[..., None]) -> Callable[..., None]:
    """Return the `__init__` of what torch's `fully_shard` makes of each parameter so that it refuses DTensors."""

    @functools.wraps(init)
    def refused(self: Any, param: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_dtensors("torch.distributed.fsdp.fully_shard", [("parameter", param)])
        init(self, param, *args, **kwargs)

    return refused


WHY, REFUSED = "takes shards for replicas, or cuts them once more", "parameters that are DTensors are refused"
PATCHES_OF_FSDP = (
    Patch(
        "torch.distributed.fsdp.FullyShardedDataParallel.__init__",
        WHY,
        REFUSED,
        lambda init: refusing_sharded(init, "FullyShardedDataParallel"),
    ),
    # Each `from torch.distributed.fsdp import fully_shard` has the function itself; this it calls for each parameter.
    Patch(
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.__init__", WHY, REFUSED, refusing_sharded_parameters
    ),
)


def refuse_if_loaded() -> None:
    """Let torch's `FullyShardedDataParallel` and `fully_shard` refuse, where a program has loaded them already.

    To load them takes as long as torch itself.
    """
    if "torch.distributed.fsdp" in sys.modules:
        _refuse_in_fsdp()


@functools.cache
def _refuse_in_fsdp() -> None:
    for patch in PATCHES_OF_FSDP:
        patch.install()


def _refuse_dtensors(name: str, parameters: Iterable[tuple[str, Any]]) -> None:
    for path, parameter in parameters:
        if isinstance(parameter, TorchDTensor):
            raise ShardingRuleError(
                f"{name} of a model whose {path} is {parameter.spec!r}: it would take shards for replicas, or cut them "
                "once more. A model of hp_fsdp.fully_shard reduces its gradients itself: use it as it is; one of "
                f"parallelize_module is given to hp_fsdp.fully_shard. {_WHAT_TO_PREPARE}"
            )
