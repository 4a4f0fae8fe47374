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

import functools
import math
import os
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.attention import AttentionInterface
from hp_dtensor.platform.autograd import AutogradInterface
from hp_dtensor.platform.thread_region import ThreadRegion, watching

# The functions that every platform's `ops` namespace provides, with torch's names and argument orders. Model code
# written against `platform.ops` runs on every platform, on plain tensors and on DTensors. Arguments that are not shown
# are not part of the contract. `dtype` arguments are the platform's dtypes.
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
    **dict.fromkeys("neg exp log sqrt rsqrt abs sin cos tanh sigmoid relu silu gelu".split(), "(x)"),
    **dict.fromkeys(("isfinite", "logical_not", "square"), "(x)"),
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
    "-100 for rows to ignore",
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
    "chunk": "(x, chunks, dim): chunks of ceil(size / chunks), perhaps fewer; all empty if size is 0",
    "narrow": "(x, dim, start, length)",
    "repeat_interleave": "(x, repeats: int, dim)",
    # selection
    "index_select": "(x, dim, index): differentiable in x",
    "gather": "(x, dim, index): differentiable in x",
    "index_put": "(x, index, values): a copy of x with rows of dim 0 replaced; differentiable in x and values",
    "topk": "(x, k, dim) -> (values, indices), largest first; the order of ties is not specified",
    "argsort": "(x, dim, stable=True, descending=False)",
    "bincount": "(x, minlength) -> int64 [minlength]; x int, 1-D, all below minlength",
    "one_hot": "(x, num_classes) -> int64",
}

OP_NAMES: tuple[str, ...] = tuple(OP_SIGNATURES)


DType: TypeAlias = Any
TensorSpec: TypeAlias = Any
"""Stands for `hp_dtensor.TensorSpec`, which is built on platforms, so it cannot be imported here."""

DTYPE_NAMES = tuple("float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split())


class TensorInterface(ABC):
    """The part of `Platform` for tensors and dtypes, both opaque to hp_dtensor.

    Attributes:
        name: `torch`, `mindspore`, ..., as used by `HP_PLATFORM` and `platform=`.
        Tensor: the framework's tensor class.
        Parameter: its parameter class, called as `Parameter(tensor, requires_grad=...)`.
        DTensor: its subclass of `hp_dtensor.DTensor` and `Tensor`. An instance is or holds the local shard, and has its
            spec as `_spec`.
        ops: functions of tensors with torch's names and argument orders, the same on every platform. `OP_NAMES` lists
            the required ones.
        picks_integers_first: whether integers in an index apply before its tensors, so that `x[0, :, positions]` is
            `x[0][:, positions]`. In NumPy the dimension of positions would come first.
        dtypes: the framework's dtypes by name, those of `DTYPE_NAMES` that it has and no others, which no test covers.
            The default `dtype`, `dtype_name`, `itemsize` and `is_floating` answer from it.
        host_device: the `device=` argument for a tensor on the host. None: the framework's default.
        masks_of_bytes: whether a uint8 index is a mask. Otherwise such an index is refused.
        function_modules: names of modules with functions of tensors, such as `"torch.nn.functional"`. Empty: the
            top-level package of `Tensor`. The conformance suite calls them, and the methods of `Tensor`, with DTensors.
        shard_names: functions and methods that describe this rank's shard on purpose, such as `data_ptr`, those that
            crash the process if an argument is missing, and those that are wrong on the framework's plain tensors. The
            conformance suite does not call them.
    """

    name: str
    if TYPE_CHECKING:  # annotations in this class use the name as a type
        Tensor: TypeAlias = Any
    else:
        Tensor: type
    Parameter: Any
    DTensor: type
    ops: SimpleNamespace
    host_device: Any = None
    picks_integers_first: bool = False
    masks_of_bytes: bool = False
    dtypes: Mapping[str, DType] = MappingProxyType({})
    function_modules: tuple[str, ...] = ()
    shard_names: frozenset[str] = frozenset()

    def dtype(self, name: str) -> DType:
        """Return the framework's dtype of a name in `DTYPE_NAMES`, by default from `dtypes`.

        Raises:
            ValueError: an unknown name, or a dtype that the framework lacks.
        """
        if name not in self.dtypes:
            known = ", ".join(self.dtypes) or f"those that platform {self.name!r} lists in `dtypes`: none yet"
            raise ValueError(f"dtype {name!r} is unknown; expected one of {known}")
        return self.dtypes[name]

    def has_dtype(self, name: str) -> bool:
        """Return whether the framework has the dtype of a name in `DTYPE_NAMES`.

        float32, int64 and bool are required. The conformance suites skip the tests of others that are missing.
        """
        try:
            self.dtype(name)
        except ValueError:
            return False
        return True

    def dtype_name(self, dtype: DType) -> str:
        """Return the name in `DTYPE_NAMES` of a framework dtype.

        Raises:
            ValueError: a dtype without such a name.
        """
        # By equality, because the dtypes of some frameworks cannot be dictionary keys.
        found = next((name for name, each in self.dtypes.items() if each == dtype), None)
        if found is None:
            raise ValueError(f"{dtype} has no counterpart on other platforms; expected one of {', '.join(self.dtypes)}")
        return found

    def dtype_meant(self, value: Any) -> Any:
        """Return the dtype of an argument that denotes one in another form, such as a string, else the argument."""
        return value

    def itemsize(self, dtype: DType) -> int:
        """Return the bytes per element."""
        name = self.dtype_name(dtype)
        return 2 if name == "bfloat16" else numpy.dtype(name).itemsize

    def is_floating(self, dtype: DType) -> bool:
        """Return whether `dtype` is real floating-point."""
        return self.dtype_name(dtype) in ("float64", "float32", "float16", "bfloat16")

    def is_complex(self, dtype: DType) -> bool:
        """Return whether `dtype` is complex, and thus not floating. A platform may have no complex dtypes."""
        return False

    def dtype_of_number(self, value: complex) -> DType:
        """Return the default dtype of a tensor filled with a number: bool, int64, complex64 or float32."""
        # NumPy separates bool from int, which Python does not. Its float64 becomes float32, the frameworks' default.
        kind = numpy.asarray(value).dtype.kind
        return self.dtype({"b": "bool", "i": "int64", "u": "int64", "c": "complex64"}.get(kind, "float32"))

    def empty(self, shape: Sequence[int], dtype: DType, device: Any = None) -> Tensor:
        """Return an uninitialised tensor that owns its contiguous storage, by default on this rank's device.

        By default its elements are zero.
        """
        return self.zeros(shape, dtype, device)

    def zeros(self, shape: Sequence[int], dtype: DType, device: Any = None) -> Tensor:
        """Return a tensor of zeros that owns its contiguous storage."""
        name = self.dtype_name(dtype)
        array = numpy.zeros(tuple(shape), "uint16" if name == "bfloat16" else name)
        return self.from_bits(array, dtype, device)

    @abstractmethod
    def from_numpy(self, array: numpy.ndarray, device: Any = None) -> Tensor:
        """Return a tensor with the array's values. On CPU it may share the array's memory."""

    @abstractmethod
    def to_numpy(self, x: Tensor) -> numpy.ndarray:
        """Return the values on the host, detached. A bfloat16 tensor becomes an array of uint16 bit patterns."""

    def from_bits(self, array: numpy.ndarray, dtype: DType, device: Any = None) -> Tensor:
        """Return a tensor of `dtype` with the array's bits (bfloat16 from uint16): the inverse of `to_numpy`."""
        name = self.dtype_name(dtype)
        if name != "bfloat16":
            return self.from_numpy(array.view(name), device)
        # The upper half of a float32. The cast is exact, and outside of the graph.
        wide = (array.astype(numpy.uint32) << numpy.uint32(16)).view(numpy.float32)
        return self.detach(self.ops.cast(self.from_numpy(wide, device), dtype))

    @abstractmethod
    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Copy `source`, of the same shape, into `target`, which may be a view. Casts; not tracked by autograd."""

    @abstractmethod
    def set_data(self, x: Tensor, data: Tensor) -> None:
        """Give the plain tensor `x` the values, shape and memory of `data`. It counts as a write to `x`.

        Other tensors that share the former memory of `x` are unchanged.
        """

    @abstractmethod
    def contiguous(self, x: Tensor) -> Tensor:
        """Return `x` if it is contiguous and can be communicated, else a copy that is. Tracked by autograd."""

    @abstractmethod
    def detach(self, x: Tensor) -> Tensor:
        """Return the same data outside the autograd graph, requiring no gradient."""

    def device_of(self, x: Tensor) -> Any:
        """Return the device of `x`, as the framework's name or object. By default all tensors are on one device."""
        return self.host_device

    def is_meta(self, x: Tensor) -> bool:
        """Return whether `x` has a shape but no data. By default no tensor is without data."""
        return False

    def check_dense(self, x: Tensor) -> None:
        """Check that a plain tensor is dense (neither sparse nor quantized) and has a supported dtype.

        Raises:
            CapabilityError: it is not.
        """
        self.check_dtype(x.dtype)

    def check_dtype(self, dtype: DType) -> None:
        """Check that DTensors support a dtype of the framework.

        Raises:
            CapabilityError: they do not. The message lists the supported dtypes.
        """

    def default_device(self, device: Any) -> AbstractContextManager[None]:
        """Make `device` the default device of this thread inside the block.

        Tensors on `"meta"` have a shape but no data.

        Raises:
            CapabilityError: the framework has no such device.
        """
        raise CapabilityError(f"platform {self.name!r} cannot make tensors on {device!r} instead of its own device")

    def strides(self, x: Tensor) -> tuple[int, ...]:
        """Return the strides of a plain tensor in elements. The default assumes that it is contiguous."""
        return tuple(math.prod(x.shape[dim + 1 :]) for dim in range(len(x.shape)))

    def memory_order(self, x: Tensor) -> tuple[int, ...] | None:
        """Return the order in which random operations fill the dimensions of a plain tensor, outermost first.

        None, the default: they fill every tensor as a contiguous one.
        """
        return None

    @abstractmethod
    def wrap(self, local: Tensor, spec: TensorSpec) -> Tensor:
        """Return the plain tensor `local` as a DTensor of `spec` that shares its storage and autograd history."""

    def wrap_fresh(self, result: Tensor, spec: TensorSpec) -> Tensor:
        """Return a new result, which has no other references, as a DTensor of `spec`. It may be converted in place."""
        return self.wrap(result, spec)

    def empty_deferred(self, shape: Sequence[int], dtype: DType, device: Any) -> Tensor:
        """Return a plain tensor of arbitrary values for `wrap_deferred`. By default it has its own memory."""
        return self.empty(shape, dtype, device)

    def wrap_deferred(self, result: Tensor, spec: TensorSpec, finish: Callable[[], Tensor]) -> Tensor:
        """Return a recorded tensor of `empty_deferred` as a DTensor of `spec` whose data `finish` returns.

        `finish` is called once, at the latest when the data is first used (`hp_dtensor.tensor.base`), by default
        immediately.
        """
        # Through a detached alias: the write is not an operation of the user's graph.
        self.copy_(self.detach(result), finish())
        return self.wrap_fresh(result, spec)

    def as_dtensor(self, x: Any) -> Any:
        """Return a distributed tensor of the framework itself as a DTensor over the same memory, detached.

        Anything else is returned unchanged, by default everything.
        """
        return x

    @abstractmethod
    def unwrap(self, x: Tensor) -> Tensor:
        """Return the plain local tensor of a DTensor, sharing storage and autograd history."""

    def local_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the data on this rank: of a plain tensor, or of a DTensor's shard."""
        # `x.shape` of a DTensor is the global shape.
        return tuple(self.unwrap(x).shape) if hasattr(x, "_spec") else tuple(x.shape)

    def local_op(self) -> AbstractContextManager[None]:
        """Inside the block, operations on DTensors use their local data and return plain tensors.

        The interception of a platform asks `is_local` by default; see `hp_dtensor.dispatch.interception`.
        """
        return self._local_region.of_all()

    def is_local(self) -> bool:
        """Return whether this thread is inside of a block of the default `local_op`."""
        return self._local_region.depth > 0

    @functools.cached_property
    def _local_region(self) -> ThreadRegion:
        return ThreadRegion()

    def operation(self, name: str) -> Callable[..., Any] | None:
        """Return the framework's function for an operation of the sharding rules, with torch's argument order.

        None if the framework has no such function here. The default knows the functions of `ops`.
        """
        return getattr(self.ops, name, None)

    def own_function(self, name: str) -> Callable[..., Any] | None:
        """Return the function of `operation` with the framework's own signature."""
        return self.operation(name)

    def watch_functions(self, note: Callable[[str, Any], None]) -> AbstractContextManager[Any]:
        """Call `note(name, result)` after each of the framework's functions in the context, in this thread.

        Methods of tensors are functions too; those that a function calls need not be noted. By default the functions of
        `ops` are noted.
        """
        return watching(self.ops, note)

    def operation_names(self, name: str) -> list[str]:
        """Return the framework's names of an operation of the sharding rules, sorted. Used by the documentation."""
        return []

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of all squared elements of plain tensors, as a 0-d float32 tensor."""
        # In float32, because squares of half precision overflow. One result for all tensors, so that the host need not
        # wait for each.
        float32 = self.dtype("float32")
        total = self.zeros((), float32)
        for x in tensors:
            total = self.ops.add(total, self.ops.sum(self.ops.square(self.ops.cast(x, float32))))
        return total

    def scale_(self, tensors: Sequence[Tensor], factor: Tensor) -> None:
        """Multiply plain tensors in place by a 0-d tensor."""
        for x in tensors:
            # Where 0-d tensors take part in type promotion, as in NumPy 2, a float32 factor would make a wide copy of
            # each half precision tensor.
            self.copy_(x, self.ops.mul(x, self.ops.cast(factor, x.dtype)))

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the default generator of this rank."""

    def random(self, distribution: str, shape: Sequence[int], dtype: DType) -> Tensor:
        """Return a plain tensor drawn from the default generator.

        Args:
            distribution: `"uniform"` in [0, 1), or standard `"normal"`.

        Raises:
            CapabilityError: the platform has no random tensors, which is the default.
        """
        raise CapabilityError(
            f"platform {self.name!r} draws no random tensors; use hp_dtensor.tensor.init.init_parameters"
        )


Tensor: TypeAlias = Any


class Removable(ABC):
    """A registered hook."""

    @abstractmethod
    def remove(self) -> None:
        """Unregister the hook."""


class ModuleInterface(ABC):
    """The part of `Platform` for modules, which are opaque to hp_dtensor: their names, parameters and hooks.

    Attributes:
        Module: the framework's module class. Its entry point is `forward`, and attribute assignment registers
            parameters and submodules (`hp_dtensor.parallel.nn.Module` derives from it). `register_buffer(name, tensor)`
            makes an attribute that `named_buffers` yields unless it is None. `training` is a flag, initially True.
    """

    if TYPE_CHECKING:  # annotations in this class use the name as a type
        Module: TypeAlias = Any
    else:
        Module: type

    @abstractmethod
    def named_modules(self, module: Module) -> Iterator[tuple[str, Module]]:
        """Yield each module once with its dotted name, starting with `module` itself as ""."""

    @abstractmethod
    def named_parameters(
        self, module: Module, recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (dotted name, parameter), a shared parameter once unless `remove_duplicate` is False."""

    def named_buffers(self, module: Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of `module` and its sub-modules with dotted names. By default modules have none."""
        return iter(())

    @abstractmethod
    def set_parameter(self, module: Module, name: str, value: Tensor) -> None:
        """Replace the directly owned parameter `name`, so that `module.<name>` is `value`.

        The value is a parameter or, during a forward pass, any tensor.

        Raises:
            KeyError: the module owns no parameter of this name.
        """

    def is_container(self, module: Module) -> bool:
        """Return whether `module` only holds other modules, as a module list does, and its forward is never called."""
        return False

    def is_statistic(self, module: Module, name: str) -> bool:
        """Return whether the directly owned parameter `name` is written by forward and not trained."""
        return False

    def compile_module(self, module: Module, backend: str) -> None:
        """Compile the forward of a module in place, when it is first called.

        Args:
            backend: the compiler, by the framework's name for it.

        Raises:
            CapabilityError: the framework does not compile modules, which is the default.
        """
        raise CapabilityError("this platform does not compile modules; train with training.compile=false")

    def compile_backends(self) -> tuple[str, ...]:
        """Return the `backend` names of `compile_module`, by default none."""
        return ()

    @abstractmethod
    def add_forward_pre_hook(
        self,
        module: Module,
        hook: Callable[[Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None],
        prepend: bool = False,
    ) -> Removable:
        """Call `hook(module, args, kwargs)` before every forward. It may return new `(args, kwargs)`."""

    @abstractmethod
    def add_forward_hook(
        self,
        module: Module,
        hook: Callable[[Module, tuple[Any, ...], dict[str, Any], Any], Any],
        prepend: bool = False,
        always_call: bool = False,
    ) -> Removable:
        """Call `hook(module, args, kwargs, output)` after every forward. It may return another output.

        Args:
            always_call: also call it after a forward that raised. `output` has no meaning then.
        """

    @abstractmethod
    def has_hooks(self, module: Module) -> bool:
        """Return whether a call of `module` itself calls hooks, of its forward or its backward."""


Module: TypeAlias = Any
World: TypeAlias = Any
"""Stands for `hp_dtensor.World`, which is built on platforms, so it cannot be imported here."""


class DeviceFacts(NamedTuple):
    """A rank's device.

    Attributes:
        name: as its vendor calls it; `cpu` for this machine's processor.
        memory: bytes.
        versions: of the libraries of its vendor that the framework uses, by name.
    """

    name: str
    memory: int
    versions: dict[str, str]


_JOINS_ONCE = "a process of this platform joins a job only once"


class ProcessInterface(ABC):
    """The part of `Platform` for processes: joining a job, devices, memory and profiling.

    Attributes:
        device_types: the device types available here, best first (`("cuda", "cpu")`).
    """

    device_types: tuple[str, ...]
    _world: World | None = None

    @property
    def world(self) -> World | None:
        """The `World` of the job that this process has joined, else None.

        By default this is `_world`, which `connect` and `disconnect` set.
        """
        return self._world

    @abstractmethod
    def connect(self, rank: int, size: int, address: str, timeout_seconds: float = 300.0, local_rank: int = 0) -> World:
        """Join a job of `size` ranks that meet at `address` (`host:port`, served by rank 0), and return its world."""

    def join_launched(self) -> None:
        """Join the job of the launcher that started this process, if any. By default nothing happens."""

    def disconnect(self) -> None:
        """Leave the job. It is safe to call this twice, and after an error."""
        world, self._world = self._world, None
        if world is not None:
            world.close()

    def serve_meeting_point(self, host: str) -> tuple[str, Callable[[], None]]:
        """Serve a meeting point in this process, which is not a rank; return its address and a function that closes it.

        Ranks join there with `connect_served`. Ranks that still wait there when it is closed fail.

        Raises:
            CapabilityError: a process of the platform joins a job only once, which is the default. After the death of a
                rank all ranks then start again.
        """
        raise CapabilityError(_JOINS_ONCE)

    def connect_served(
        self, rank: int, size: int, address: str, timeout_seconds: float = 300.0, local_rank: int = 0
    ) -> World:
        """Join a job as `connect` does, at an address of `serve_meeting_point`."""
        raise CapabilityError(_JOINS_ONCE)

    def abort_collectives(self) -> None:
        """Make collectives in progress fail, called in another thread when a peer has died.

        By default nothing happens: they fail by themselves when the connections of the peer are closed.
        """

    def num_accelerators(self) -> int:
        """Return the number of accelerators of the best type on this machine. With 0, ranks run on the CPU."""
        return 0

    def max_local_ranks(self) -> int | None:
        """Return the maximal number of ranks on this machine, one per accelerator. None: any number."""
        # Without accelerators there is no limit: any number of ranks share the CPU.
        return self.num_accelerators() or None

    def describe_device(self) -> DeviceFacts:
        """Return name and memory of this rank's device, and the versions of the libraries that drive it.

        By default these are the processor and the memory of this machine.
        """
        return DeviceFacts("cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), {})

    def peak_memory(self) -> int:
        """Return this rank's peak device memory so far, in bytes.

        By default this is the peak memory of the process, for ranks on the CPU.
        """
        # Linux reports kibibytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def peak_flops(self, dtype: str) -> float | None:
        """Return the peak rate of matrix products on this rank's device, in floating-point operations per second.

        Args:
            dtype: name of the operands' dtype.

        Returns:
            The figure of the vendor's data sheet, without sparsity, or None (the default) if it is unknown.
        """
        return None

    def profile(self, folder: Path, rank: int) -> AbstractContextManager[None]:
        """Profile this rank inside the block.

        Writes `rank<rank>-trace.json` (or `.json.gz`), for trace viewers such as Perfetto, and the framework's reports
        of operations and memory into the folder.

        Raises:
            CapabilityError: the framework has no profiler, which is the default.
        """
        raise CapabilityError("this platform has no profiler")

    def collective_dtypes(self, reducing: bool) -> tuple[str, ...]:
        """Return the names of the dtypes that the platform's process groups support here.

        The conformance suite tests each of them.

        Args:
            reducing: for reductions, not only for sending.
        """
        if TYPE_CHECKING:
            assert isinstance(self, Platform)
        # No backend adds booleans; rules count them instead.
        return tuple(name for name in DTYPE_NAMES if self.has_dtype(name) and not (reducing and name == "bool"))

    @property
    def records_by_thread(self) -> bool:
        """True if each thread records its own autograd graph, which simulated ranks need."""
        return True

    def rank_state(self) -> Any:
        """Return the process-wide state that belongs to one rank, such as a global grad flag.

        Simulated ranks share a process. The state is read when the thread of a rank is suspended, and passed to
        `set_rank_state` when that thread continues. A framework with thread-local state returns None.
        """
        return None

    def set_rank_state(self, state: Any) -> None:
        """Restore the value of `rank_state`. Called in the thread of the rank that continues."""

    def simulated_rank(self) -> AbstractContextManager[Any]:
        """Return the context in which the thread of a simulated rank runs its program.

        The thread waits for other ranks inside a backward too. A framework that runs the backwards of several threads
        in one of its own must run them in the calling thread here, or the ranks wait for each other forever.
        """
        return nullcontext()

    def wrap_mesh(self, mesh: Any) -> Any | None:
        """Return the framework's own device mesh as a `hp_dtensor.DeviceMesh` over the same groups.

        Returns None for any other object, and by default.
        """
        return None

    def wrap_group(self, group: Any) -> Any | None:
        """Return the framework's own process group as a `hp_dtensor.ProcessGroup` that communicates through it.

        Returns None for any other object, and by default.
        """
        return None

    def synchronize(self) -> None:
        """Wait until the device has completed all its work. On the CPU there is nothing to wait for."""


class Platform(TensorInterface, AutogradInterface, AttentionInterface, ModuleInterface, ProcessInterface):
    """One framework on one kind of process: its tensors, autograd, modules and processes.

    It combines the five interfaces. Abstract methods are required, the others have defaults. The conformance suite in
    `hp_dtensor.testing` checks an implementation.

    Examples:
        >>> platform.to_numpy(platform.zeros((2,), platform.dtype("float32"))).tolist()
        [0.0, 0.0]
    """
