"""Arrays with a place in the tape; dtypes are hp-dtensor's own names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hp_dtensor.platform.interface import DTYPE_NAMES
from hp_dtensor.tensor.dtensor import DTensor
from hp_platform_numpy.tape import Node

Array = np.ndarray
FLOATING = ("float64", "float32", "float16", "bfloat16")


class Tensor:
    """`data`, an array; bfloat16 is stored as float32 whose low bits are zero.

    Attributes:
        node: the operation that made it, of which it is output number `index`; None for a leaf.
        grad: the accumulated gradient of a leaf, as a plain tensor.
    """

    def __init__(self, data: Any, dtype: str | None = None, requires_grad: bool = False) -> None:
        array = np.asarray(data)
        self.dtype = dtype or array.dtype.name
        if self.dtype not in DTYPE_NAMES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; expected one of {', '.join(DTYPE_NAMES)}")
        self.data = as_dtype(array, self.dtype)
        self.requires_grad = requires_grad
        self.grad: Tensor | None = None
        self.node: Node | None = None
        self.index = 0
        self.is_parameter = False
        self.hooks: list[Callable[[np.ndarray], None]] = []

    def register_hook(self, hook: Callable[[Tensor], None]) -> None:
        """Call `hook(gradient)` when a walk has computed the gradient of this tensor, in the order of registration."""

        def run(gradient: np.ndarray) -> None:
            hook(Tensor(gradient, self.dtype))

        if self.node is None:
            self.hooks.append(run)
        else:
            self.node.hooks.append((self.index, run))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: Any) -> Any:
        from hp_platform_numpy.plugin import hp_platform

        return hp_platform().ops.getitem(self, index)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.data!r}, {self.dtype})"


class NumpyDTensor(DTensor, Tensor):
    """Local shard with a spec; its `shape` is that of the full tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self._spec.shape


def alias(x: Tensor, kind: type[Tensor] = Tensor) -> Tensor:
    """Make another tensor of the same memory, outside the tape."""
    made = kind.__new__(kind)
    Tensor.__init__(made, x.data, x.dtype)
    made.data = x.data
    return made


def as_dtype(array: Array, dtype: str) -> Array:
    """Convert an array, or return it as it is where it has the dtype already."""
    if dtype != "bfloat16":
        return array.astype(dtype, copy=False)
    bits = array.astype(np.float32).view(np.uint32)
    # Round to nearest, ties to even, as hardware does.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.asarray(rounded, np.uint32).view(np.float32)
