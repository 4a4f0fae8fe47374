"""Refusals where torch would take the local shard for the tensor without asking `__torch_function__`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hp_dtensor.exceptions import ShardingRuleError
from hp_platform_torch.tensor.dtensor import TorchDTensor
from hp_platform_torch.tensor.local_operations import is_intercepting

Tensor = torch.Tensor

TRANSFORMS_A_SHARD = (
    "would transform this rank's shard alone. Use torch.autograd.grad, or transform local tensors inside "
    "hp_dtensor.local_map."
)
_WORKS_ON_A_SHARD = (
    "would work on this rank's shard alone. Call it on local tensors inside hp_dtensor.local_map, or the function "
    "that it was made of."
)
EXPORTS_A_SHARD = "would give this rank's shard; say so with x.to_local()"


def refusing(function: Callable[..., Any], name: str, effect: str) -> Callable[..., Any]:
    """Return `function` that refuses a DTensor as its first argument; the error says `name` and `effect`."""

    @functools.wraps(function)
    def refused(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, TorchDTensor):
            raise ShardingRuleError(f"{name} of {x.spec!r} {effect}")
        return function(x, *args, **kwargs)

    return refused


def refusing_arguments(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return `method` that refuses DTensors anywhere among its arguments."""

    @functools.wraps(method)
    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_intercepting():
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, TorchDTensor):
                    raise ShardingRuleError(f"{name} with {x.spec!r} {_WORKS_ON_A_SHARD}")
        return method(self, *args, **kwargs)

    return refused


def refusing_source(set_: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Tensor.set_` of plain tensors that refuses a DTensor as the source of the storage."""

    @functools.wraps(set_)
    def refused(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, TorchDTensor) and is_intercepting():
                raise ShardingRuleError(f"set_ of a plain tensor to {x.spec!r} {EXPORTS_A_SHARD}")
        return set_(self, *args, **kwargs)

    return refused


def refusing_to_trace(trace: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return `trace` that refuses DTensors among its inputs and among the parameters of modules given to it."""

    @functools.wraps(trace)
    def refused(*args: Any, **kwargs: Any) -> Any:
        given = tree_leaves((args, kwargs))
        held = [x for module in given if isinstance(module, torch.nn.Module) for x in module.parameters()]
        for x in (*given, *held):
            if isinstance(x, TorchDTensor):
                raise ShardingRuleError(
                    f"{name} with {x.spec!r} would record this rank's part of the work alone. Trace with plain "
                    "tensors, or use torch.compile, which leaves operations on DTensors as they are."
                )
        return trace(*args, **kwargs)

    return refused
