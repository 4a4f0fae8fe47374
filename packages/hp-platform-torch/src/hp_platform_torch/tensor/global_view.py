"""Shape, dtype and sizes of a DTensor: those of the whole tensor, by torch's names for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hp_platform_torch.tensor.local_operations import is_intercepting, run_locally

Tensor = torch.Tensor
_plain: Any = torch.Tensor
_local_shape = _plain.shape.__get__
_local_dtype = _plain.dtype.__get__


class GlobalView:
    """Attributes of a DTensor that need its spec alone, so that no rank waits for another.

    Torch's own code (optimizers, `grad_fn`, printing) asks for them too, while it works on the local data: inside
    `LocalOperations` they are those of the shard, or an optimizer would give its state the shape of the whole.
    """

    _spec: Any

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._spec.shape) if is_intercepting() else _local_shape(self)

    @property
    def dtype(self) -> torch.dtype:
        return self._spec.dtype if is_intercepting() else _local_dtype(self)

    @property
    def ndim(self) -> int:
        return len(self._spec.shape)

    def dim(self) -> int:
        return len(self._spec.shape)

    ndimension = dim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        strides = run_locally(_plain.stride, (), (self,))
        if is_intercepting():
            strides = self._spec.strides(strides)
        return strides if dim is None else strides[dim]

    def numel(self) -> int:
        return self.shape.numel()

    nelement = numel

    @property
    def nbytes(self) -> int:
        return self.numel() * _plain.element_size(self)

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return run_locally(_plain.type, (), (self,))
        return _plain.type(self, dtype, non_blocking=non_blocking, **kwargs)

    def __len__(self) -> int:
        shape = self.shape
        if not shape:
            raise TypeError("len() of a 0-d tensor")
        return shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(_plain.unbind(self, 0))
