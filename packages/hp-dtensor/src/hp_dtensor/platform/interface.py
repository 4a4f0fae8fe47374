"""What a framework must provide so that everything else here is written once.

A platform package implements `Platform` and registers an instance through the `hp_platform` hook. Nothing in
hp_dtensor imports a framework: tensors, dtypes and modules are opaque objects handled through this interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from hp_dtensor.comm.recording import is_recording, located
from hp_dtensor.exceptions import CapabilityError

if TYPE_CHECKING:
    import numpy

    from hp_dtensor.comm.world import World
    from hp_dtensor.spec.tensor_spec import TensorSpec

Tensor = Any
Module = Any
DType = Any

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


class Removable(ABC):
    """A registered hook; `remove` takes it off."""

    @abstractmethod
    def remove(self) -> None: ...


class Platform(ABC):
    """One framework on one kind of process.

    Attributes:
        name: `torch`, `mindspore`, ...; what `HP_PLATFORM` and `platform=` name.
        Tensor: the framework's tensor class.
        Parameter: its parameter class; `Parameter(tensor, requires_grad=...)`.
        Module: its module class, with `forward` as entry point, whose instances register parameters
            and sub-modules on attribute assignment (`hp_dtensor.parallel.nn.Module` derives from it).
        DTensor: its subclass of `hp_dtensor.DTensor` and `Tensor` that is the local shard.
        ops: functions over tensors, torch's names and argument orders, the same on every platform
            (`OP_NAMES` in `hp_dtensor.platform.ops` lists what must be there).
        device_types: the kinds of device that it can use here, best first (`("cuda", "cpu")`).
        picks_integers_first: an index's integers are taken before its tensors: `x[0, :, positions]` is
            `x[0][:, positions]`, where in NumPy the picked dimension would come first.
        masks_of_bytes: uint8 in an index is truth values; elsewhere it is refused.
        world: the job this process has joined with `connect`; None before.
    """

    name: str
    if TYPE_CHECKING:  # in this class these names are types of annotations too
        Tensor: TypeAlias = Any
        Module: TypeAlias = Any
    else:
        Tensor: type
        Module: type
    Parameter: Any
    DTensor: type
    ops: SimpleNamespace
    device_types: tuple[str, ...]
    picks_integers_first: bool = False
    masks_of_bytes: bool = False
    world: World | None = None

    # Processes -------------------------------------------------------------------------------------------

    @abstractmethod
    def connect(self, rank: int, size: int, address: str, timeout_seconds: float = 300.0, local_rank: int = 0) -> World:
        """Join a job of `size` ranks that meets at `address` (`host:port`, served by rank 0); sets `world`."""

    @abstractmethod
    def disconnect(self) -> None:
        """Leave the job; safe to call twice and after an error."""

    def environment(self, local_rank: int, local_size: int) -> dict[str, str]:
        """Extra environment variables for a rank started on this machine (thread counts, log levels)."""
        return {}

    def collective_dtypes(self, reducing: bool) -> tuple[str, ...]:
        """Names of the dtypes that its process groups can move (`reducing`: also reduce) here.

        The conformance suite tries each of them.
        """
        return tuple(name for name in DTYPE_NAMES if not (reducing and name == "bool"))

    @property
    def records_by_thread(self) -> bool:
        """Whether threads record operations for their gradients apart from each other, as simulated ranks need it."""
        return True

    def rank_state(self) -> Any:
        """Process-wide state that belongs to one rank, such as a global grad flag.

        Simulated ranks share a process: it is read when a rank's thread gives up its turn, and given back to
        `set_rank_state` when that thread goes on. A framework that keeps such state per thread has none.
        """
        return None

    def set_rank_state(self, state: Any) -> None:
        """Restore what `rank_state` returned; called in the thread of the rank that goes on."""

    # Dtypes and plain tensors ----------------------------------------------------------------------------

    @abstractmethod
    def dtype(self, name: str) -> DType:
        """The framework's dtype of a name in `DTYPE_NAMES`."""

    @abstractmethod
    def dtype_name(self, dtype: DType) -> str:
        """The name in `DTYPE_NAMES` of a framework dtype."""

    def dtype_meant(self, value: Any) -> Any:
        """The dtype of an operation's argument that names one in another form; anything else as it is."""
        return value

    @abstractmethod
    def itemsize(self, dtype: DType) -> int:
        """Bytes per element."""

    @abstractmethod
    def is_floating(self, dtype: DType) -> bool: ...

    def is_complex(self, dtype: DType) -> bool:
        """Complex numbers, which no platform needs to have, are not floating-point ones."""
        return False

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: DType, device: Any = None) -> Tensor:
        """An uninitialised tensor that owns its contiguous storage. `device` None: this rank's default."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: DType, device: Any = None) -> Tensor: ...

    @abstractmethod
    def from_numpy(self, array: numpy.ndarray, device: Any = None) -> Tensor:
        """A tensor with the array's values; on CPU it may share the array's memory."""

    @abstractmethod
    def to_numpy(self, x: Tensor) -> numpy.ndarray:
        """The values on the host, detached. A bfloat16 tensor comes as uint16 bit patterns."""

    @abstractmethod
    def from_bits(self, array: numpy.ndarray, dtype: DType, device: Any = None) -> Tensor:
        """Inverse of `to_numpy`: reinterpret the array's bits as `dtype` where they differ (bfloat16 from uint16)."""

    @abstractmethod
    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Overwrite `target` (also a view) with `source` of its shape, casting; untracked by autograd."""

    @abstractmethod
    def contiguous(self, x: Tensor) -> Tensor:
        """`x` if it is contiguous and fit to be communicated, else such a copy; tracked by autograd."""

    @abstractmethod
    def detach(self, x: Tensor) -> Tensor:
        """The same data outside the autograd graph, requiring no gradient."""

    @abstractmethod
    def device_of(self, x: Tensor) -> Any: ...

    @abstractmethod
    def is_meta(self, x: Tensor) -> bool:
        """Whether `x` has a shape but no data."""

    def default_device(self, device: Any) -> AbstractContextManager[None]:
        """Inside the block, tensors of this thread for which no device is named are made on `device`.

        `"meta"` gives tensors that have a shape but no data.

        Raises:
            CapabilityError: the framework has no such device.
        """
        raise CapabilityError(f"platform {self.name!r} cannot make tensors on {device!r} instead of its own device")

    # Autograd --------------------------------------------------------------------------------------------

    def linear_map(
        self, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """`forward(x)` as one autograd node whose gradient is `backward(grad)`: a linear map and its dual.

        Both take and return plain tensors and run without recording. Differentiating the backward again
        uses `forward` as its dual.
        """
        if is_recording():
            forward, backward = located(forward), located(backward)
        return self._linear_map(x, forward, backward)

    def custom_function(
        self,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        *inputs: Tensor,
    ) -> Any:
        """General autograd node. `forward(*inputs)` returns a tensor or a tuple of tensors; `backward(*grads)`
        gets the gradient of a single output, and one or None per output of a tuple, and returns one or None per
        input. Neither is recorded, and a second derivative is refused where a framework could take one; values
        needed in backward are kept by the closure, in a `hp_dtensor.comm.kept_tensors.Kept`."""
        return self._custom_function(forward, located(backward), *inputs)

    @abstractmethod
    def _linear_map(
        self, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor: ...

    @abstractmethod
    def _custom_function(self, forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Tensor) -> Any: ...

    @abstractmethod
    def is_in_backward(self) -> bool:
        """Whether what runs now in this thread was called by a backward of the framework."""

    @abstractmethod
    def is_for_parameters(self) -> bool:
        """Whether the backward that runs is for the gradients of parameters, not of inputs that it was told (`grad`);
        only to be called during one."""

    @abstractmethod
    def backward(self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        """Accumulate gradients of every leaf below `loss` (a scalar when `gradient` is None) into `.grad`."""

    @abstractmethod
    def grad(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        output_grads: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor | None]:
        """Gradients of `inputs`, touching no `.grad`; None where an input is unused.

        Raises:
            CapabilityError: the framework has no derivative of an operation.
        """

    @abstractmethod
    def no_grad(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def enable_grad(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def is_grad_enabled(self) -> bool: ...

    @abstractmethod
    def requires_grad(self, x: Tensor) -> bool: ...

    @abstractmethod
    def is_leaf(self, x: Tensor) -> bool:
        """Whether `x` was made by the user, not by a recorded operation."""

    def has_gradient_hooks(self, x: Tensor) -> bool:
        """Whether users have registered hooks on `x` that are called with its gradient, or after that."""
        return False

    def loss_dtype(self, x: Tensor) -> Any:
        """The dtype of a loss of logits `x`: theirs, unless a region of automatic mixed precision makes it wider."""
        return x.dtype

    def version(self, x: Tensor) -> int:
        """How often the storage of a plain tensor has been written in place, as far as autograd counts that.

        What was derived from `x` and kept is good only as long as the number stays the same.
        """
        return 0

    @abstractmethod
    def set_requires_grad(self, x: Tensor, flag: bool) -> None: ...

    @abstractmethod
    def get_grad(self, x: Tensor) -> Tensor | None:
        """The accumulated gradient of a leaf; a DTensor for a DTensor."""

    @abstractmethod
    def set_grad(self, x: Tensor, grad: Tensor | None) -> None: ...

    # Operations ------------------------------------------------------------------------------------------

    def operation(self, name: str) -> Callable[..., Any] | None:
        """The framework's own function for an operation that sharding rules name, with torch's order of arguments.

        None where the framework has none that works here. The default knows those of `ops`.
        """
        return getattr(self.ops, name, None)

    def own_function(self, name: str) -> Callable[..., Any] | None:
        """As `operation`, but with the arguments that the framework's users give."""
        return self.operation(name)

    def operation_names(self, name: str) -> list[str]:
        """What users of the framework write for an operation that sharding rules name, sorted; for documentation."""
        return []

    # DTensor ---------------------------------------------------------------------------------------------

    def check_dense(self, x: Tensor) -> None:
        """Raise `CapabilityError` for a plain tensor whose data is not an array of its shape (sparse, quantized)."""

    @abstractmethod
    def wrap(self, local: Tensor, spec: TensorSpec) -> Tensor:
        """`local` (plain, kept in the autograd graph) as a DTensor of `spec`, sharing storage."""

    def adopt(self, result: Tensor, spec: TensorSpec) -> Tensor:
        """As `wrap`, of a fresh result that nobody else holds; it may be converted in place."""
        return self.wrap(result, spec)

    def local_shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape of the local data, of a DTensor too."""
        return tuple(self.unwrap(x).shape) if hasattr(x, "_spec") else tuple(x.shape)

    def memory_order(self, x: Tensor) -> tuple[int, ...] | None:
        """The dimensions of a plain tensor, outermost in memory first, as random operations go through them.

        None, the default, where they go through every tensor as through a contiguous one.
        """
        return None

    @abstractmethod
    def unwrap(self, x: Tensor) -> Tensor:
        """The plain local tensor of a DTensor, sharing storage and autograd history."""

    @abstractmethod
    def local_op(self) -> AbstractContextManager[None]:
        """Inside the block operations on DTensors run on their local data and give plain tensors."""

    # Many tensors at once --------------------------------------------------------------------------------

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """The sum of all squared elements of plain tensors, as a 0-d float32 tensor."""
        float32 = self.dtype("float32")
        total = self.zeros((), float32)
        for x in tensors:
            total = self.ops.add(total, self.ops.sum(self.ops.square(self.ops.cast(x, float32))))
        return total

    def scale_(self, tensors: Sequence[Tensor], factor: Tensor) -> None:
        """Multiply plain tensors in place by a 0-d tensor."""
        for x in tensors:
            self.copy_(x, self.ops.mul(x, self.ops.cast(factor, x.dtype)))

    # Modules ---------------------------------------------------------------------------------------------

    @abstractmethod
    def named_modules(self, module: Module) -> Iterator[tuple[str, Module]]:
        """All modules with dotted names, `module` itself as "" first, each once."""

    @abstractmethod
    def named_parameters(
        self, module: Module, recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Parameters with dotted names."""

    @abstractmethod
    def set_parameter(self, module: Module, name: str, value: Tensor) -> None:
        """Replace the directly owned parameter `name` by a parameter, or for the time of a forward pass
        by any tensor, so that `module.<name>` gives `value`."""

    def is_container(self, module: Module) -> bool:
        """Whether it only holds others, as the framework's own lists do, and has a forward that nobody calls."""
        return False

    def is_statistic(self, module: Module, name: str) -> bool:
        """Whether a directly owned parameter is one that forwards write and nobody trains: a buffer elsewhere."""
        return False

    @abstractmethod
    def named_buffers(self, module: Module) -> Iterator[tuple[str, Tensor]]: ...

    @abstractmethod
    def add_forward_pre_hook(
        self,
        module: Module,
        hook: Callable[[Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None],
        prepend: bool = False,
    ) -> Removable:
        """`hook(module, args, kwargs)` before forward; may return new `(args, kwargs)`."""

    @abstractmethod
    def add_forward_hook(
        self,
        module: Module,
        hook: Callable[[Module, tuple[Any, ...], dict[str, Any], Any], Any],
        prepend: bool = False,
        always_call: bool = False,
    ) -> Removable:
        """`hook(module, args, kwargs, output)` after forward; may return another output.

        `always_call`: also after a forward that raises; `output` means nothing then.
        """

    # Randomness, time and memory -------------------------------------------------------------------------

    @abstractmethod
    def manual_seed(self, seed: int) -> None: ...

    def random(self, distribution: str, shape: Sequence[int], dtype: DType) -> Tensor:
        """A whole tensor from the default generator: `"uniform"` in [0, 1) or standard `"normal"`."""
        raise CapabilityError(
            f"platform {self.name!r} draws no random tensors; use hp_dtensor.tensor.init.init_parameters"
        )

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it (nothing on CPU)."""
