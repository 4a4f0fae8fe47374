"""`Platform`: everything that a framework provides, so that the rest of hp_dtensor is written once.

A platform package implements `Platform` and registers an instance through the `hp_platform` hook. Nothing in
hp_dtensor imports a framework: tensors, dtypes and modules are opaque objects handled through this interface.
Abstract methods are required. Methods with a body are optional: a framework overrides those that it does better.
The smallest platform that passes the conformance suite is the NumPy platform in `tests/numpy_platform`.

To add a method, define it here or in `autograd.py` or `attention.py`, with a default where one is possible; implement
it in both platforms; and add a test to `hp_dtensor/testing/conformance`. This folder imports nothing of hp_dtensor but
`exceptions` and `trees`.
"""

from __future__ import annotations

import math
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.attention import AttentionInterface
from hp_dtensor.platform.autograd import AutogradInterface

OP_SIGNATURES: dict[str, str] = {
    # creation (plain tensors on the default device)
    "zeros": "(shape, dtype)",
    "ones": "(shape, dtype)",
    "full": "(shape, value, dtype)",
    "arange": "(end, dtype)",
    "zeros_like": "(x)",
    "ones_like": "(x)",
    # pointwise
    **dict.fromkeys(("add", "sub", "mul", "div", "maximum", "minimum", "pow"), "(x, y)"),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "(x, y)"),
    **dict.fromkeys(("logical_and", "logical_or"), "(x, y)"),
    **dict.fromkeys(
        (
            "neg",
            "exp",
            "log",
            "sqrt",
            "rsqrt",
            "abs",
            "sin",
            "cos",
            "tanh",
            "sigmoid",
            "relu",
            "silu",
            "gelu",
            "isfinite",
            "logical_not",
            "square",
        ),
        "(x)",
    ),
    "clamp": "(x, min=None, max=None)",
    "where": "(condition, x, y)",
    "masked_fill": "(x, mask, value)",
    "cast": "(x, dtype)",
    "clone": "(x)",
    # reductions
    "sum": "(x, dim=None, keepdim=False)",
    "mean": "(x, dim=None, keepdim=False)",
    "amax": "(x, dim, keepdim=False)",
    "amin": "(x, dim, keepdim=False)",
    "argmax": "(x, dim, keepdim=False)",
    "logsumexp": "(x, dim, keepdim=False)",
    "cumsum": "(x, dim)",
    # products
    "matmul": "(x, y)",
    "bmm": "(x, y)",
    "linear": "(x, weight, bias=None)",
    "scaled_dot_product_attention": "(query, key, value, is_causal=False, enable_gqa=False): [batch, heads, rows, dim]",
    # normalization, losses, tables
    "softmax": "(x, dim)",
    "log_softmax": "(x, dim)",
    "rms_norm": "(x, weight, eps): over the last dimension",
    "cross_entropy": "(logits, targets, reduction='mean' | 'sum' | 'none'): logits [rows, classes], targets [rows], "
    "-100 where a row takes no part",
    "embedding": "(ids, weight)",
    # shapes
    "reshape": "(x, shape)",
    "transpose": "(x, dim0, dim1)",
    "permute": "(x, dims)",
    "unsqueeze": "(x, dim)",
    "squeeze": "(x, dim)",
    "expand": "(x, shape)",
    "cat": "(tensors, dim)",
    "stack": "(tensors, dim)",
    "split": "(x, sizes, dim): list of sizes",
    "chunk": "(x, chunks, dim): pieces of ceil(size / chunks), the last smaller, perhaps fewer; of size 0: all empty",
    "narrow": "(x, dim, start, length)",
    "repeat_interleave": "(x, repeats: int, dim)",
    # selection
    "index_select": "(x, dim, index): differentiable in x",
    "gather": "(x, dim, index): differentiable in x",
    "index_put": "(x, index, values): a copy of x with rows index of dim 0 replaced; differentiable in x and values",
    "topk": "(x, k, dim) -> (values, indices), largest first; ties by lower index are not promised",
    "argsort": "(x, dim, stable=True, descending=False)",
    "bincount": "(x, minlength) -> int64 [minlength]; x int, 1-D, all below minlength",
    "one_hot": "(x, num_classes) -> int64",
}

OP_NAMES: tuple[str, ...] = tuple(OP_SIGNATURES)


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
            (`OP_NAMES` in `hp_dtensor.platform.interface` lists what must be there).
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

        `finish` is called once, at the latest when the data is first used (`hp_dtensor.tensor.base`); by
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


Tensor: TypeAlias = Any


class Removable(ABC):
    """A registered hook."""

    @abstractmethod
    def remove(self) -> None:
        """Take the hook off."""


class ModuleInterface(ABC):
    """The part of `Platform` that walks modules and hooks into them; modules are opaque to hp_dtensor.

    Attributes:
        Module: the framework's module class, with `forward` as entry point, whose instances register parameters
            and sub-modules on attribute assignment (`hp_dtensor.parallel.nn.Module` derives from it).
    """

    if TYPE_CHECKING:  # in this class the name is a type of annotations too
        Module: TypeAlias = Any
    else:
        Module: type

    @abstractmethod
    def named_modules(self, module: Module) -> Iterator[tuple[str, Module]]:
        """Yield all modules with dotted names, `module` itself as "" first, each once."""

    @abstractmethod
    def named_parameters(
        self, module: Module, recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters with dotted names."""

    @abstractmethod
    def named_buffers(self, module: Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of `module` and its sub-modules with dotted names."""

    @abstractmethod
    def set_parameter(self, module: Module, name: str, value: Tensor) -> None:
        """Replace the directly owned parameter `name`, so that `module.<name>` gives `value`.

        The value is a parameter, or for the time of a forward pass any tensor.
        """

    def is_container(self, module: Module) -> bool:
        """Return whether `module` only holds others, as the framework's own lists do; nobody calls its forward."""
        return False

    def is_statistic(self, module: Module, name: str) -> bool:
        """Return whether forwards write the directly owned parameter `name` and nobody trains it."""
        return False

    def compile_module(self, module: Module, backend: str) -> None:
        """Let the framework compile the forward of a module, in place, when it is first called.

        Args:
            backend: the compiler, by the framework's name for it.

        Raises:
            CapabilityError: the framework cannot, which is the default.
        """
        raise CapabilityError("this platform does not compile modules; train with training.compile=false")

    def compile_backends(self) -> tuple[str, ...]:
        """Return the names that `compile_module` takes as `backend`; by default none, since it cannot compile."""
        return ()

    @abstractmethod
    def add_forward_pre_hook(
        self,
        module: Module,
        hook: Callable[[Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None],
        prepend: bool = False,
    ) -> Removable:
        """Call `hook(module, args, kwargs)` before every forward; it may return new `(args, kwargs)`."""

    @abstractmethod
    def add_forward_hook(
        self,
        module: Module,
        hook: Callable[[Module, tuple[Any, ...], dict[str, Any], Any], Any],
        prepend: bool = False,
        always_call: bool = False,
    ) -> Removable:
        """Call `hook(module, args, kwargs, output)` after every forward; it may return another output.

        Args:
            always_call: also after a forward that raises; `output` means nothing then.
        """


Module: TypeAlias = Any
World: TypeAlias = Any
"""`hp_dtensor.World`, which is built on platforms and therefore not named here."""


class ProcessInterface(ABC):
    """The part of `Platform` that joins jobs and tells what a rank can do.

    Attributes:
        device_types: the kinds of device that it can use here, best first (`("cuda", "cpu")`).
    """

    device_types: tuple[str, ...]
    _world: World | None = None

    @property
    def world(self) -> World | None:
        """The `World` of the job that this process has joined; None before.

        The default: `_world`, which `connect` and `disconnect` set.
        """
        return self._world

    @abstractmethod
    def connect(self, rank: int, size: int, address: str, timeout_seconds: float = 300.0, local_rank: int = 0) -> World:
        """Join a job of `size` ranks that meets at `address` (`host:port`, served by rank 0); returns its `world`."""

    def join_launched(self) -> None:
        """Join the job of the launcher that has started this process, if one has; the default: stay alone."""

    @abstractmethod
    def disconnect(self) -> None:
        """Leave the job; safe to call twice and after an error."""

    def environment(self, local_rank: int, local_size: int) -> dict[str, str]:
        """Return extra environment variables for a rank started on this machine (thread counts, log levels)."""
        return {}

    def num_accelerators(self) -> int:
        """Return how many accelerators of its best kind this machine offers to ranks; 0: ranks run on the CPU."""
        return 0

    def max_local_ranks(self) -> int | None:
        """Return how many ranks this machine can have: one for each accelerator; None: any number."""
        return self.num_accelerators() or None

    def peak_memory(self) -> int:
        """Return the largest number of bytes that this rank's device has held at once for it so far.

        The default, for ranks on the CPU: that of the process, in main memory.
        """
        # Kibibytes on Linux.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def live_bytes(self) -> AbstractContextManager[Any]:
        """Count the bytes of tensors that operations of this thread make inside the block, while they are alive.

        Returns:
            A context manager that gives an object with two attributes: `now`, the bytes alive, and `peak`, the most so
            far.

        Raises:
            CapabilityError: the framework does not tell, which is the default.
        """
        raise CapabilityError("this platform does not tell when the memory of a tensor is freed")

    def peak_flops(self, dtype: str) -> float | None:
        """Return the matrix products' peak rate of this rank's device, in floating-point operations per second.

        Args:
            dtype: name of the operands' dtype.

        Returns:
            The figure of the maker's data sheet, without sparsity; None, the default, where it is not known.
        """
        return None

    def profile(self, folder: Path, rank: int) -> AbstractContextManager[None]:
        """Profile what this rank runs inside the block.

        Writes `rank<rank>-trace.json` (or `.json.gz`) for trace viewers such as Perfetto into the folder, and beside it
        what the framework tells of operations and of memory.

        Raises:
            CapabilityError: the framework has no profiler, which is the default.
        """
        raise CapabilityError("this platform has no profiler")

    def collective_dtypes(self, reducing: bool) -> tuple[str, ...]:
        """Return the names of the dtypes that its process groups can move here.

        The conformance suite tries each of them.

        Args:
            reducing: also reduce.
        """
        return tuple(name for name in DTYPE_NAMES if not (reducing and name == "bool"))

    @property
    def records_by_thread(self) -> bool:
        """Return whether threads record operations for their gradients apart from each other, as simulated ranks do."""
        return True

    def rank_state(self) -> Any:
        """Return process-wide state that belongs to one rank, such as a global grad flag.

        Simulated ranks share a process: the state is read when a rank's thread gives up its turn, and given back to
        `set_rank_state` when that thread goes on. A framework that keeps such state per thread has none.
        """
        return None

    def set_rank_state(self, state: Any) -> None:
        """Restore what `rank_state` returned; called in the thread of the rank that goes on."""

    def adopt_mesh(self, mesh: Any) -> Any | None:
        """Return a device mesh of the framework's own as a `hp_dtensor.DeviceMesh` over the same groups.

        None, the default, for something else.
        """
        return None

    def adopt_group(self, group: Any) -> Any | None:
        """Return a process group of the framework's own as a `hp_dtensor.ProcessGroup` that communicates through it.

        None, the default, for something else.
        """
        return None

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it (nothing on CPU)."""


class Platform(TensorInterface, AutogradInterface, AttentionInterface, ModuleInterface, ProcessInterface):
    """One framework on one kind of process: its tensors, autograd, modules and processes.

    The methods are those of the five interfaces. What is abstract must be there; what has a body is a default that
    a framework may do better. `hp_dtensor.testing` checks an implementation (the conformance suite).

    Example:
        >>> platform.to_numpy(platform.zeros((2,), platform.dtype("float32"))).tolist()
        [0.0, 0.0]
    """
