"""Dtypes, NumPy arrays that share the host memory of tensors, and host copies of what autograd saves.

On CPU everything that must be written in place is written through NumPy. NumPy has no bfloat16, and the type that
MindSpore registers for it crashes when copied; so on the host a bfloat16 is its bit pattern, a uint16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from typing import Any
from weakref import WeakValueDictionary

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.common.np_dtype import bfloat16

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.autograd import HostCopies, Wait
from hp_dtensor.platform.interface import DTYPE_NAMES
from hp_dtensor.tensor.dtensor import DTensor
from hp_platform_mindspore.tensor.autograd import GradMode

Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {name: ms.bool_ if name == "bool" else getattr(ms, name) for name in DTYPE_NAMES}
NAMES: dict[Any, str] = {dtype: name for name, dtype in DTYPES.items()}
HOST_DTYPES: dict[Any, np.dtype[Any]] = {
    dtype: np.dtype("uint16" if name == "bfloat16" else name) for name, dtype in DTYPES.items()
}
FLOATING = frozenset(DTYPES[name] for name in ("float64", "float32", "float16", "bfloat16"))


@functools.cache
def _device_is_host() -> bool:
    # MindSpore fixes the device of a process at the first operation, and takes 35 us to report it.
    return str(ms.get_context("device_target")) == "CPU"


def is_readable(x: Tensor) -> bool:
    """Return whether NumPy can compute with a tensor in place: the device is the CPU, and NumPy has the dtype."""
    return x.dtype in HOST_DTYPES and _device_is_host()


class _Memory:
    """Exposes a tensor's memory to NumPy, and keeps the tensor alive as long as the array."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, x: Tensor) -> None:
        self.tensor = x
        self.__array_interface__ = {
            "data": (x.data_ptr(), False),
            "shape": x._shape,
            # Not `strides`, which ignores views. `Tensor.stride` explicitly: that of a DTensor is global.
            "strides": tuple(step * HOST_DTYPES[x.dtype].itemsize for step in Tensor.stride(x)),
            "typestr": HOST_DTYPES[x.dtype].str,
            "version": 3,
        }


def host_view(x: Tensor) -> Array:
    """Return the memory of a CPU tensor, a DTensor's shard or a view as a writable array of its shape.

    `asnumpy` returns a read-only copy for a view, and MindSpore's own writes to a view are lost.
    """
    # An empty tensor has no address.
    if math.prod(x._shape) == 0:
        return np.empty(x._shape, HOST_DTYPES[x.dtype])
    return np.asarray(_Memory(x))


def share(array: Array, dtype: Any = None) -> Tensor:
    """Return a CPU tensor that shares the array's memory, if that is writable and contiguous; else of a copy.

    Args:
        dtype: bfloat16 for an array of its bit patterns; None: the array's own.
    """
    # MindSpore shares memory with arrays in C order only.
    ready = np.require(array, requirements=("C", "W"))
    return Tensor.from_numpy(ready.view(bfloat16) if dtype == ms.bfloat16 else ready)


def numbers(x: Tensor) -> Array:
    """Return the values of a CPU tensor: its memory, or for bfloat16 a float32 copy."""
    return decode(host_view(x)) if x.dtype == ms.bfloat16 else host_view(x)


def store(target: Tensor, values: Array) -> None:
    """Overwrite a CPU tensor with values of its shape, converted to its dtype."""
    if target.dtype == ms.bfloat16:
        values = encode(values)
    np.copyto(host_view(target), values, casting="unsafe")


def converted(values: Array, dtype: Any) -> Tensor:
    """Return a CPU tensor of this dtype with the values of an array, in its memory where it has the dtype."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == ms.bfloat16:
            return share(encode(values), dtype)
        return share(values.astype(HOST_DTYPES[dtype], copy=False))


def copy(target: Tensor, source: Tensor) -> None:
    """Overwrite a CPU tensor with another of as many elements, converted to its dtype."""
    if target.dtype == source.dtype:
        np.copyto(host_view(target), host_view(source).reshape(target._shape))
    else:
        store(target, numbers(source).reshape(target._shape))


def decode(bits: Array) -> Array:
    """Convert bfloat16 bit patterns to float32."""
    return np.left_shift(bits.astype(np.uint32), np.uint32(16), dtype=np.uint32).view(np.float32)


def encode(values: Array) -> Array:
    """Convert values to bfloat16 bit patterns, rounded to nearest, ties to even."""
    wide = np.asarray(values, np.float32).view(np.uint32)
    # Add half a unit in the last place minus one bit, plus one if the last bit is odd: rounds ties to even in integer
    # arithmetic.
    odd = np.bitwise_and(np.right_shift(wide, np.uint32(16), dtype=np.uint32), np.uint32(1), dtype=np.uint32)
    rounded = np.right_shift(wide + np.uint32(0x7FFF) + odd, np.uint32(16), dtype=np.uint32)
    quiet_nan = np.right_shift(wide, np.uint32(16), dtype=np.uint32) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


_staying: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def stay_on_device(buffer: Tensor) -> None:
    """Exclude a buffer from activation offload, because its owner frees and refills the memory itself."""
    _staying[buffer.data_ptr()] = buffer


def may_leave_device(buffer: Tensor) -> None:
    """Undo `stay_on_device` for memory about to be freed, whose address may be reused."""
    _staying.pop(buffer.data_ptr(), None)


class MindSporeHostCopies(HostCopies):
    """Host copies of what MindSpore's autograd saves, by its saved-tensor hooks; see `HostCopies`.

    Each tensor is copied by itself, because MindSpore cannot make a tensor over existing device memory. On Ascend the
    host waits for each copy.

    Args:
        is_on_host: the device is the host.

    Raises:
        CapabilityError: MindSpore has no `saved_tensors_hooks` (before 2.10).
    """

    copies_full_storage = False

    def __init__(self, is_on_host: bool) -> None:
        if not hasattr(ms, "saved_tensors_hooks"):
            raise CapabilityError(
                f"MindSpore {ms.__version__} cannot offload activations: it has no mindspore.saved_tensors_hooks, "
                "which 2.10 has; recompute blocks instead"
            )
        self._is_on_host = is_on_host

    def memory_of(self, x: Tensor) -> tuple[Hashable, int] | None:
        if type(x) is not Tensor and not isinstance(x, (ms.Parameter, DTensor)):
            return None
        if self._is_on_host and x.dtype not in HOST_DTYPES:  # e.g. complex numbers, which NumPy views do not cover
            return None
        # By storage, so that views of one storage are recognized as such.
        storage = x.untyped_storage()
        nbytes = storage.nbytes()
        # An empty tensor has no address.
        if not nbytes or storage.data_ptr() in _staying:
            return None
        return storage.data_ptr(), nbytes

    def form(self, x: Tensor) -> Hashable:
        return x.dtype, x.storage_offset(), x._shape, tuple(Tensor.stride(x))

    def memory(self, x: Tensor) -> Tensor:
        return x

    def to_host(self, memory: Tensor) -> tuple[Tensor, Wait]:
        return self._copy(memory, "CPU"), _nothing

    def to_device(self, host: Tensor) -> tuple[Tensor, Wait]:
        return self._copy(host, "Ascend"), _nothing

    def tensor(self, memory: Tensor, form: Hashable) -> Tensor:
        return memory

    def _copy(self, x: Tensor, device: str) -> Tensor:
        with GradMode(False):
            if self._is_on_host:
                # The device is the host: a plain copy replaces the transfer, so offload can be tested on CPU.
                return share(host_view(x).copy(), x.dtype)
            return x.contiguous().to(device, copy=True)


def _nothing() -> None:
    """Wait for nothing: a copy has ended when `to_host` or `to_device` returns."""
