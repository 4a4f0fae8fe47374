"""Refusals where torch would take the local shard for the tensor without asking `__torch_function__`.

Refusals of torch's own ways to train one model on many ranks, around models that are sharded already.

Replacements of functions that make a plain tensor of a DTensor's value, or fill the whole tensor at once.
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
from hp_dtensor.tensor.conversions import distribute_tensor
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


WHY, REFUSED = "treats shards as replicas, or shards them again", "parameters that are DTensors are refused"
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


def taking_numbers(new_full: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `new_full` that takes a DTensor without dimensions for its number, as `float(x)`: every rank calls it."""

    @functools.wraps(new_full)
    def filled(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return new_full(self, *map(_number, args), **{name: _number(value) for name, value in kwargs.items()})

    return filled


def _number(x: Any) -> Any:
    return x.item() if isinstance(x, TorchDTensor) and not x._spec.shape and is_intercepting() else x


def copying_as_new(new_tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `new_tensor` that makes a DTensor of a DTensor, placed alike."""

    @functools.wraps(new_tensor)
    def copied(self: Tensor, data: Any, **options: Any) -> Tensor:
        if isinstance(data, TorchDTensor) and is_intercepting():
            return _copy(data, **{"dtype": self.dtype, "device": self.device, **options})
        return new_tensor(self, data, **options)

    return copied


def _copy(
    data: TorchDTensor, dtype: Any = None, device: Any = None, requires_grad: bool = False, pin_memory: bool = False
) -> Tensor:
    wanted = {name: value for name, value in (("dtype", dtype), ("device", device)) if value is not None}
    copy = data.detach().clone()
    copy = copy.to(**wanted) if wanted else copy
    return (copy.pin_memory() if pin_memory else copy).requires_grad_(requires_grad)


def keeping_the_shard(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an initialiser of DTensors: every rank fills the whole, from generators in step, and keeps its shard."""

    @functools.wraps(function)
    def filled(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, TorchDTensor) or not is_intercepting():
            return function(tensor, *args, **kwargs)
        spec = tensor._spec
        whole = torch.empty(spec.shape, dtype=spec.dtype, device=tensor.device)
        function(whole, *args, **kwargs)
        with torch.no_grad():
            tensor.copy_(distribute_tensor(whole, spec.mesh, spec.placements, src_data_rank=None))
        return tensor

    return filled
