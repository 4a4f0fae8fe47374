"""Replacements of functions that make a plain tensor of a DTensor's value, or fill the whole tensor at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hp_dtensor.tensor.conversions import distribute_tensor
from hp_platform_torch.tensor.dtensor import TorchDTensor
from hp_platform_torch.tensor.operations import is_intercepting

Tensor = torch.Tensor


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
