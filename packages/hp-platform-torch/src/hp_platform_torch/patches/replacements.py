"""Replacements of functions that would use the local shard as the tensor: refusals, and conversions of values.

Refusals name a way out. Models that are sharded already are refused by torch's own wrappers for data parallelism.
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
from hp_platform_torch.tensor.torch_operation import is_intercepting

Tensor = torch.Tensor

TRANSFORMS_A_SHARD = (
    "would transform this rank's shard alone. Use torch.autograd.grad, or transform local tensors inside "
    "hp_dtensor.local_map."
)
_WORKS_ON_A_SHARD = (
    "would work on this rank's shard alone. Call it on local tensors inside hp_dtensor.local_map, or the function "
    "that it was made of."
)
EXPORTS_A_SHARD = "would use this rank's shard; if that is intended, pass x.to_local()"


def refusing(function: Callable[..., Any], name: str, effect: str) -> Callable[..., Any]:
    """Return a `function` that raises for a DTensor as its first argument; the message has `name` and `effect`."""

    @functools.wraps(function)
    def refused(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, TorchDTensor):
            raise ShardingRuleError(f"{name} of {x.spec!r} {effect}")
        return function(x, *args, **kwargs)

    return refused


def refusing_arguments(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a `method` that raises for DTensors anywhere in its arguments."""

    @functools.wraps(method)
    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_intercepting():
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, TorchDTensor):
                    raise ShardingRuleError(f"{name} with {x.spec!r} {_WORKS_ON_A_SHARD}")
        return method(self, *args, **kwargs)

    return refused


def refusing_source(set_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `Tensor.set_` that raises for a DTensor as the source of the storage."""

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
    """Return a wrapper's `__init__` that raises for modules with DTensor parameters; the message has `name`."""

    @functools.wraps(init)
    def refused(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        _refuse_dtensors(name, module.named_parameters())
        init(self, module, *args, **kwargs)

    return refused


def refusing_sharded_parameters(init: Callable[..., None]) -> Callable[..., None]:
    """Return an `__init__` of torch's `FSDPParam`, created by `fully_shard` per parameter, that raises for DTensors."""

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
    # Programs import `fully_shard` by name, so replacing the function would miss them; it creates this per parameter.
    Patch(
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.__init__", WHY, REFUSED, refusing_sharded_parameters
    ),
)


def refuse_if_loaded() -> None:
    """Install the refusals in torch's `FullyShardedDataParallel` and `fully_shard`, if the program has loaded them.

    Loading them takes as long as torch itself.
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
                f"{name} of a model whose {path} is {parameter.spec!r}: it would treat shards as replicas, or shard "
                "them again. A model of hp_fsdp.fully_shard reduces its gradients itself: use it as it is; one of "
                f"parallelize_module is given to hp_fsdp.fully_shard. {_WHAT_TO_PREPARE}"
            )


def taking_numbers(new_full: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a `new_full` that converts 0-d DTensors to numbers like `float(x)`, so every rank must call it."""

    @functools.wraps(new_full)
    def filled(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return new_full(self, *map(_number, args), **{name: _number(value) for name, value in kwargs.items()})

    return filled


def _number(x: Any) -> Any:
    return x.item() if isinstance(x, TorchDTensor) and not x._spec.shape and is_intercepting() else x


def copying_as_new(new_tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a `new_tensor` that copies a DTensor to a DTensor with the same placements."""

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
    # Detached: `new_tensor` returns a leaf.
    copy = data.detach().clone()
    copy = copy.to(**wanted) if wanted else copy
    return (copy.pin_memory() if pin_memory else copy).requires_grad_(requires_grad)


def keeping_the_shard(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an initializer in which each rank fills the full tensor, with synchronized generators, for its shard."""

    @functools.wraps(function)
    def filled(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, TorchDTensor) or not is_intercepting():
            return function(tensor, *args, **kwargs)
        spec = tensor._spec
        # The full tensor exists for a moment on every rank; orthogonal and sparse values cannot be drawn shard by
        # shard.
        full = torch.empty(spec.shape, dtype=spec.dtype, device=tensor.device)
        function(full, *args, **kwargs)
        with torch.no_grad():
            tensor.copy_(distribute_tensor(full, spec.mesh, spec.placements, src_data_rank=None))
        return tensor

    return filled
