"""Tensors and dtypes of a framework: making, copying and inspecting plain tensors, and wrapping them as DTensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy

from hp_dtensor.exceptions import CapabilityError

DType: TypeAlias = Any
TensorSpec: TypeAlias = Any
"""`hp_dtensor.TensorSpec`, which is built on platforms and therefore not named here."""

DTYPE_NAMES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)


class TensorInterface(ABC):
    """The part of `Platform` that handles tensors and dtypes, both opaque to hp_dtensor.

    Attributes:
        name: `torch`, `mindspore`, ...; what `HP_PLATFORM` and `platform=` name.
        Tensor: the framework's tensor class.
        Parameter: its parameter class; `Parameter(tensor, requires_grad=...)`.
        DTensor: its subclass of `hp_dtensor.DTensor` and `Tensor` that is the local shard.
        ops: functions over tensors, torch's names and argument orders, the same on every platform
            (`OP_NAMES` in `hp_dtensor.platform.ops` lists what must be there).
        picks_integers_first: whether an index's integers are taken before its tensors: `x[0, :, positions]` is
            `x[0][:, positions]`, where in NumPy the picked dimension would come first.
        host_device: what `device=` takes for a tensor on the host; None: the framework's default.
        masks_of_bytes: whether uint8 in an index means truth values; elsewhere it is refused.
    """

    name: str
    if TYPE_CHECKING:  # in this class the name is a type of annotations too
        Tensor: TypeAlias = Any
    else:
        Tensor: type
    Parameter: Any
    DTensor: type
    ops: SimpleNamespace
    host_device: Any = None
    picks_integers_first: bool = False
    masks_of_bytes: bool = False

    @abstractmethod
    def dtype(self, name: str) -> DType:
        """Return the framework's dtype of a name in `DTYPE_NAMES`."""

    @abstractmethod
    def dtype_name(self, dtype: DType) -> str:
        """Return the name in `DTYPE_NAMES` of a framework dtype."""

    def dtype_meant(self, value: Any) -> Any:
        """Return the dtype that an operation's argument names in another form; anything else as it is."""
        return value

    @abstractmethod
    def itemsize(self, dtype: DType) -> int:
        """Return the bytes per element."""

    @abstractmethod
    def is_floating(self, dtype: DType) -> bool:
        """Return whether `dtype` is a real floating-point one."""

    def is_complex(self, dtype: DType) -> bool:
        """Return whether `dtype` is a complex one, which no platform needs to have; it is not floating then."""
        return False

    def dtype_of_number(self, value: complex) -> DType:
        """Return the dtype of a tensor filled with a number where none is given: bool, int64, complex64 or float32."""
        kind = numpy.asarray(value).dtype.kind
        return self.dtype({"b": "bool", "i": "int64", "u": "int64", "c": "complex64"}.get(kind, "float32"))

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: DType, device: Any = None) -> Tensor:
        """Return an uninitialised tensor that owns its contiguous storage. `device` None: this rank's default."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: DType, device: Any = None) -> Tensor:
        """Return a tensor of zeros that owns its contiguous storage."""

    @abstractmethod
    def from_numpy(self, array: numpy.ndarray, device: Any = None) -> Tensor:
        """Return a tensor with the array's values; on CPU it may share the array's memory."""

    @abstractmethod
    def to_numpy(self, x: Tensor) -> numpy.ndarray:
        """Return the values on the host, detached. A bfloat16 tensor comes as uint16 bit patterns."""

    @abstractmethod
    def from_bits(self, array: numpy.ndarray, dtype: DType, device: Any = None) -> Tensor:
        """Return a tensor of `dtype` with the array's bits (bfloat16 from uint16): the inverse of `to_numpy`."""

    @abstractmethod
    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Overwrite `target` (also a view) with `source` of its shape, casting; untracked by autograd."""

    @abstractmethod
    def contiguous(self, x: Tensor) -> Tensor:
        """Return `x` if it is contiguous and fit to be communicated, else such a copy; tracked by autograd."""

    @abstractmethod
    def detach(self, x: Tensor) -> Tensor:
        """Return the same data outside the autograd graph, requiring no gradient."""

    @abstractmethod
    def device_of(self, x: Tensor) -> Any:
        """Return the framework's name or object for the device that `x` lies on."""

    @abstractmethod
    def is_meta(self, x: Tensor) -> bool:
        """Return whether `x` has a shape but no data."""

    def check_dense(self, x: Tensor) -> None:
        """Refuse a plain tensor whose data is not an array of its shape (sparse, quantized), or of a dtype not taken.

        Raises:
            CapabilityError: `x` is such a tensor.
        """
        self.check_dtype(x.dtype)

    def check_dtype(self, dtype: DType) -> None:
        """Refuse a dtype that tensors of the framework may have and DTensors not.

        Raises:
            CapabilityError: naming it, and those that there are.
        """

    def default_device(self, device: Any) -> AbstractContextManager[None]:
        """Make tensors of this thread on `device` inside the block, where no other is named.

        `"meta"` gives tensors that have a shape but no data.

        Raises:
            CapabilityError: the framework has no such device.
        """
        raise CapabilityError(f"platform {self.name!r} cannot make tensors on {device!r} instead of its own device")

    def strides(self, x: Tensor) -> tuple[int, ...]:
        """Return the strides (in elements) of a plain tensor; by default those of a contiguous one."""
        return tuple(math.prod(x.shape[dim + 1 :]) for dim in range(len(x.shape)))

    def memory_order(self, x: Tensor) -> tuple[int, ...] | None:
        """Return the dimensions of a plain tensor, outermost in memory first, as random operations go through them.

        None, the default, where they go through every tensor as through a contiguous one.
        """
        return None

    @abstractmethod
    def wrap(self, local: Tensor, spec: TensorSpec) -> Tensor:
        """Return `local` (plain, kept in the autograd graph) as a DTensor of `spec`, sharing storage."""

    def adopt(self, result: Tensor, spec: TensorSpec) -> Tensor:
        """Return a fresh result that nobody else holds as a DTensor of `spec`; it may be converted in place."""
        return self.wrap(result, spec)

    def promised(self, shape: Sequence[int], dtype: DType, device: Any) -> Tensor:
        """Return a plain tensor for `adopt_later`, whose values do not matter; by default one of its own memory."""
        return self.empty(shape, dtype, device)

    def adopt_later(self, result: Tensor, spec: TensorSpec, finish: Callable[[], Tensor]) -> Tensor:
        """Return `result`, a recorded `promised` tensor, as a DTensor of `spec` with the data that `finish` gives.

        `finish` is called once, at the latest when the data is first used (`hp_dtensor.tensor.pending_dtensor`); by
        default at once.
        """
        self.copy_(self.detach(result), finish())
        return self.adopt(result, spec)

    @abstractmethod
    def unwrap(self, x: Tensor) -> Tensor:
        """Return the plain local tensor of a DTensor, sharing storage and autograd history."""

    def local_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the data on this rank: of a plain tensor, or of a DTensor's shard."""
        return tuple(self.unwrap(x).shape) if hasattr(x, "_spec") else tuple(x.shape)

    @abstractmethod
    def local_op(self) -> AbstractContextManager[None]:
        """Run operations on DTensors inside the block on their local data, with plain tensors as results."""

    def operation(self, name: str) -> Callable[..., Any] | None:
        """Return the framework's own function for an operation that sharding rules name, with torch's argument order.

        None where the framework has none that works here. The default knows those of `ops`.
        """
        return getattr(self.ops, name, None)

    def own_function(self, name: str) -> Callable[..., Any] | None:
        """Return the function of `operation`, taking the arguments that the framework's users give."""
        return self.operation(name)

    def operation_names(self, name: str) -> list[str]:
        """Return what users of the framework write for an operation of the rules, sorted; for documentation."""
        return []

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of all squared elements of plain tensors, as a 0-d float32 tensor."""
        float32 = self.dtype("float32")
        total = self.zeros((), float32)
        for x in tensors:
            total = self.ops.add(total, self.ops.sum(self.ops.square(self.ops.cast(x, float32))))
        return total

    def scale_(self, tensors: Sequence[Tensor], factor: Tensor) -> None:
        """Multiply plain tensors in place by a 0-d tensor."""
        for x in tensors:
            self.copy_(x, self.ops.mul(x, self.ops.cast(factor, x.dtype)))

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the default generator of this rank."""

    def random(self, distribution: str, shape: Sequence[int], dtype: DType) -> Tensor:
        """Return a whole tensor drawn by the default generator.

        Args:
            distribution: `"uniform"` in [0, 1), or standard `"normal"`.

        Raises:
            CapabilityError: the platform draws none.
        """
        raise CapabilityError(
            f"platform {self.name!r} draws no random tensors; use hp_dtensor.tensor.init.init_parameters"
        )
