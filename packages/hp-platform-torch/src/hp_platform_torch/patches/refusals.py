"""Refusals where torch would take the local shard for the tensor without asking `__torch_function__`.

Refusals of torch's own ways to train one model on many ranks, around models that are sharded already.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.platform.patch import Patch
from hp_platform_torch.tensor.dtensor import TorchDTensor
from hp_platform_torch.tensor.operations import is_intercepting

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
