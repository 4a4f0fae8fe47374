"""`MindSporePlatform`: the interface of hp_dtensor to a framework, on MindSpore in PyNative mode."""

from __future__ import annotations

import contextlib
import inspect
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn
from mindspore.common.hook_handle import HookHandle
from mindspore.graph.api import _pynative_executor as executor
from mindspore.profiler import ProfilerActivity

try:
    from mindspore._c_expression import _unsafe_set_version_counter as set_versions
except ImportError:  # MindSpore 2.9
    set_versions = None

from hp_dtensor.comm.world import World
from hp_dtensor.dispatch.operation import forget_plans
from hp_dtensor.exceptions import CapabilityError, PlatformError
from hp_dtensor.launch.environment import from_environment, is_launched
from hp_dtensor.platform.attention import BlockScores
from hp_dtensor.platform.interface import DeviceFacts, Removable
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.gradients import check_autograd_reaches, plain_backward_arguments
from hp_dtensor.tensor.redistribution import shortcut_views, with_shortcuts
from hp_platform_mindspore.ops.cpu_kernels import attention
from hp_platform_mindspore.ops.namespace import FOUND, Operations, build_functions, build_ops, fits_flash_attention
from hp_platform_mindspore.ops.primitive_names import names_of, primitives_of
from hp_platform_mindspore.ops.primitives import call_primitive
from hp_platform_mindspore.patches import table
from hp_platform_mindspore.platform_base import CPU, MindSporeBase, choose_device
from hp_platform_mindspore.tensor import autograd, dtensor, modules
from hp_platform_mindspore.tensor.dtensor import LocalOperations
from hp_platform_mindspore.tensor.memory import (
    DTYPES,
    FLOATING,
    HOST_DTYPES,
    NAMES,
    MindSporeHostCopies,
    copy,
    host_view,
    numbers,
    share,
    store,
)
from hp_platform_mindspore.tensor.modules import META, META_EXISTS, Parameter, is_making_meta, making_meta, meta_tensor
from hp_platform_mindspore.world import MindSporeWorld

Removable.register(HookHandle)
# MindSpore 2.9 does not call hooks if forward raises.
_CALLS_ALWAYS = "always_call" in inspect.signature(nn.Cell.register_forward_hook).parameters


class MindSporePlatform(MindSporeBase):
    """MindSpore in PyNative mode, on CPU or Ascend.

    `HP_DEVICE` (`cpu`, `npu`) selects the kind of device if there are several.

    Attributes:
        capabilities: what MindSpore supports on this process's device.
    """

    name = "mindspore"
    Tensor = Tensor
    Parameter = Parameter
    Module = modules.Module
    DTensor = dtensor.MindSporeDTensor
    function_modules = ("mindspore.ops", "mindspore.mint", "mindspore.mint.nn.functional")
    # On a plain tensor of float32, MindSpore's `any` along a dimension reads bytes. On DTensors it is right.
    shard_names = frozenset({"data_ptr", "any"})
    recomputes_on_unpack = hasattr(ms, "saved_tensors_hooks")

    def __init__(self) -> None:
        self.capabilities = choose_device()
        self.device_types = ("cpu",) if self.capabilities is CPU else (self.capabilities.device_type, "cpu")
        self.ops = build_ops(self)
        table.install()
        self._generator = np.random.Generator(np.random.Philox())
        self.functions = build_functions(self, self.generator)
        self.operations = Operations(self)
        autograd.turn_grad_flag_on()

    # Dtypes and plain tensors ----------------------------------------------------------------------------

    def dtype(self, name: str) -> Any:
        if name not in DTYPES:
            raise ValueError(f"dtype {name!r} is unknown; expected one of {', '.join(DTYPES)}")
        return DTYPES[name]

    def dtype_name(self, dtype: Any) -> str:
        if dtype not in NAMES:
            raise ValueError(f"{dtype} has no counterpart on other platforms; expected one of {', '.join(DTYPES)}")
        return NAMES[dtype]

    def itemsize(self, dtype: Any) -> int:
        return HOST_DTYPES[dtype].itemsize

    def is_floating(self, dtype: Any) -> bool:
        return dtype in FLOATING

    def empty(self, shape: Sequence[int], dtype: Any, device: Any = None) -> Tensor:
        if is_making_meta() or device == META:
            return meta_tensor(shape, dtype)
        return mint.empty(tuple(shape), dtype=dtype)

    def zeros(self, shape: Sequence[int], dtype: Any, device: Any = None) -> Tensor:
        if device == META:  # buffers are zeros in `init_empty_weights` too
            return meta_tensor(shape, dtype)
        return mint.zeros(tuple(shape), dtype=dtype)

    def from_numpy(self, array: np.ndarray, device: Any = None) -> Tensor:
        # MindSpore's tensors have native byte order.
        return share(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))

    def to_numpy(self, x: Tensor) -> np.ndarray:
        if self.capabilities.host_memory:
            return host_view(x)
        # On a device `asnumpy` of a DTensor would gather; the local shard is wanted.
        host = dtensor.unwrap(x).asnumpy()
        return host.view(np.uint16) if x.dtype == ms.bfloat16 else host

    def from_bits(self, array: np.ndarray, dtype: Any, device: Any = None) -> Tensor:
        wanted = HOST_DTYPES[dtype]
        if array.dtype.itemsize != wanted.itemsize:
            raise ValueError(
                f"from_bits: {array.dtype} has {array.dtype.itemsize} bytes per element, {dtype} has {wanted.itemsize}"
            )
        return share(np.require(array, requirements="C").view(wanted), dtype)

    def copy_(self, target: Tensor, source: Tensor) -> None:
        if math.prod(target._shape) != math.prod(source._shape):
            raise ValueError(f"copy_: expected a source of shape {list(target._shape)}, got {list(source._shape)}")
        if self.capabilities.host_memory:
            # Through NumPy, because MindSpore's writes into views are lost.
            copy(target, source)
            # NumPy wrote behind autograd's back; the version makes saved tensors that were overwritten an error.
            self.count_write(target)
        else:
            with autograd.GradMode(False), LocalOperations():
                target.copy_(mint.reshape(source, target._shape))

    def count_write(self, target: Tensor) -> None:
        if set_versions is not None:
            # MindSpore 2.10 can set the version without writing.
            set_versions([target], [target._version + 1])
            return
        with autograd.GradMode(False), LocalOperations():
            target.copy_(target)

    def set_data(self, x: Tensor, data: Tensor) -> None:
        x.data = data
        self.count_write(x)

    def contiguous(self, x: Tensor) -> Tensor:
        return x if x.is_contiguous() else x.contiguous()

    def detach(self, x: Tensor) -> Tensor:
        return dtensor.detached(x)

    def check_dtype(self, dtype: Any) -> None:
        if dtype not in NAMES:
            raise CapabilityError(
                f"on MindSpore there are no DTensors of {dtype}: its collectives and CPU kernels do not take them; "
                f"expected one of {', '.join(DTYPES)}. Cast first, or keep the tensor plain."
            )

    def default_device(self, device: Any) -> AbstractContextManager[None]:
        if device == META and META_EXISTS:
            return making_meta()
        if device in self.device_types[:1]:
            return contextlib.nullcontext()
        return super().default_device(device)

    def device_of(self, x: Tensor) -> str:
        if self.is_meta(x):
            return META
        return "cpu" if x.device.startswith("CPU") else self.capabilities.device_type

    def is_meta(self, x: Tensor) -> bool:
        return bool(x.has_init) or bool(x.is_meta)

    # Autograd --------------------------------------------------------------------------------------------

    _linear_map = staticmethod(autograd.linear_map)
    _custom_function = staticmethod(autograd.custom_function)

    def is_in_backward(self) -> bool:
        return bool(executor.get_current_autodiff_engine_id() != -1)

    def is_for_parameters(self) -> bool:
        return autograd.is_for_parameters()

    def backward(self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        autograd.backward(*plain_backward_arguments(loss, gradient), retain_graph)

    def grad(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        output_grads: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor | None]:
        # Raises for inputs whose gradients autograd does not have, such as parameters of `fully_shard`.
        check_autograd_reaches("grad", inputs)
        seeds = output_grads if output_grads is not None else [None] * len(outputs)
        roots = [plain_backward_arguments(y, g) for y, g in zip(outputs, seeds, strict=True)]
        bypassing = [shortcut_views(x) if isinstance(x, dtensor.MindSporeDTensor) else [] for x in inputs]
        views = [view for several in bypassing for _, view in several]
        # Inputs and the views that bypass gathered tensors are asked for in one call.
        grads = autograd.grad([y for y, _ in roots], [*inputs, *views], [g for _, g in roots])
        rest = iter(grads[len(inputs) :])
        found = [
            with_shortcuts(x, g, [(axes, next(rest)) for axes, _ in several]) if several else g
            for x, several, g in zip(inputs, bypassing, grads, strict=False)
        ]
        return [
            g if g is None or not isinstance(x, dtensor.MindSporeDTensor) else dtensor.wrap_gradient(x, g)
            for x, g in zip(inputs, found, strict=True)
        ]

    def recording(self, flag: bool) -> AbstractContextManager[None]:
        return autograd.GradMode(flag)

    def is_grad_enabled(self) -> bool:
        return executor.enable_grad()

    def requires_grad(self, x: Tensor) -> bool:
        return x._requires_grad

    def is_leaf(self, x: Tensor) -> bool:
        return x._is_leaf

    def has_gradient_hooks(self, x: Tensor) -> bool:
        return bool(x.hooks())

    def saving(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> AbstractContextManager[Any]:
        hooks: AbstractContextManager[Any] = ms.saved_tensors_hooks(pack, unpack)
        return hooks

    def host_copies(self) -> MindSporeHostCopies:
        return MindSporeHostCopies(self.capabilities.host_memory)

    def random_state(self) -> tuple[np.ndarray[Any, Any], Any]:
        return ms.get_rng_state().asnumpy().copy(), self._generator.bit_generator.state

    def set_random_state(self, state: tuple[np.ndarray[Any, Any], Any]) -> None:
        ms.set_rng_state(Tensor(state[0]))
        self._generator.bit_generator.state = state[1]

    def is_random_state(self, state: tuple[np.ndarray[Any, Any], Any]) -> bool:
        own, generator = self.random_state()
        return bool((own == state[0]).all()) and repr(generator) == repr(state[1])

    def version(self, x: Tensor) -> int:
        return x._version

    def set_requires_grad(self, x: Tensor, flag: bool) -> None:
        if isinstance(x, ms.Parameter):
            x.requires_grad = flag
        else:
            x.requires_grad_(flag)
        # A leaf that starts to require a gradient needs the hook before its first backward.
        autograd.accumulate_safely(x)

    def get_grad(self, x: Tensor) -> Tensor | None:
        return x.grad if isinstance(x, dtensor.MindSporeDTensor) else x._grad

    def set_grad(self, x: Tensor, grad: Tensor | None) -> None:
        if isinstance(x, dtensor.MindSporeDTensor):
            x.grad = grad
        else:
            x._grad = grad

    def operation(self, name: str) -> Callable[..., Any] | None:
        # Kernels of this package first: they are right on empty tensors.
        return self.own_operation(name) or FOUND.get(name)

    def own_operation(self, name: str) -> Callable[..., Any] | None:
        return getattr(self.ops, name, None) or self.functions.get(name)

    def operation_names(self, name: str) -> list[str]:
        function = self.operation(name)
        return [] if function is None else names_of(name, function) + primitives_of(name)

    # DTensor ---------------------------------------------------------------------------------------------

    def wrap(self, local: Tensor, spec: TensorSpec) -> Tensor:
        return dtensor.wrap(local, spec)

    def wrap_deferred(self, result: Tensor, spec: TensorSpec, finish: Callable[[], Tensor]) -> Tensor:
        return dtensor.wrap_deferred(result, spec, finish)

    def local_shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x._shape)

    def strides(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.stride())

    def unwrap(self, x: Tensor) -> Tensor:
        return dtensor.unwrap(x)

    def call_primitive(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call_primitive(self, func, args, kwargs)

    def local_op(self) -> AbstractContextManager[None]:
        return LocalOperations()

    def accurate_tanh(self, x: Tensor) -> Tensor:
        # MindSpore's own has errors of up to 1e-4 on the CPU, its exponential only relative ones of 6e-6.
        ops = self.ops
        return ops.sub(1.0, ops.div(2.0, ops.add(ops.exp(ops.mul(x, 2.0)), 1.0)))

    # Many tensors at once --------------------------------------------------------------------------------

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        if not self.capabilities.host_memory:
            return super().sum_of_squares(tensors)
        flat = [numbers(x).reshape(-1).astype(np.float32, copy=False) for x in tensors]
        return share(np.asarray(sum((np.dot(x, x) for x in flat), np.float32(0)), np.float32))

    def scale_(self, tensors: Sequence[Tensor], factor: Tensor) -> None:
        if not self.capabilities.host_memory:
            return super().scale_(tensors, factor)
        scale = numbers(factor)
        for x in tensors:
            scaled = numbers(x) * scale.astype(np.float32 if x.dtype == ms.bfloat16 else HOST_DTYPES[x.dtype])
            store(x, scaled)

    # Modules ---------------------------------------------------------------------------------------------

    def named_modules(self, module_: nn.Cell) -> Iterator[tuple[str, nn.Cell]]:
        return modules.named_modules(module_)

    def named_parameters(
        self, module_: nn.Cell, recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return modules.named_parameters(module_, recurse, remove_duplicate)

    def set_parameter(self, module_: nn.Cell, name: str, value: Tensor) -> None:
        modules.set_parameter(module_, name, value)

    def is_container(self, module_: nn.Cell) -> bool:
        # Containers do not run themselves, so hooks on their forward are never called.
        return type(module_).construct in (nn.CellList.construct, nn.CellDict.construct)

    def is_statistic(self, module_: nn.Cell, name: str) -> bool:
        return modules.is_statistic(module_, name)

    def named_buffers(self, module_: nn.Cell) -> Iterator[tuple[str, Tensor]]:
        return modules.named_buffers(module_)

    def add_forward_pre_hook(
        self,
        module_: nn.Cell,
        hook: Callable[[nn.Cell, tuple, dict], tuple[tuple, dict] | None],
        prepend: bool = False,
    ) -> Removable:
        return module_.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=True)

    def add_forward_hook(
        self,
        module_: nn.Cell,
        hook: Callable[[nn.Cell, tuple, dict, Any], Any],
        prepend: bool = False,
        always_call: bool = False,
    ) -> Removable:
        always = {"always_call": True} if always_call and _CALLS_ALWAYS else {}
        return module_.register_forward_hook(hook, prepend=prepend, with_kwargs=True, **always)

    def has_hooks(self, module_: nn.Cell) -> bool:
        kinds = ("forward_pre", "forward", "backward_pre", "backward")
        return any(getattr(module_, f"_{kind}_hook") for kind in kinds)

    # Randomness, time and memory -------------------------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        # MindSpore has several generators; its own plain operations draw from these two.
        ms.set_seed(seed % 2**32)
        ms.manual_seed(seed % 2**32)
        self._generator = np.random.Generator(np.random.Philox(seed % 2**64))

    def generator(self) -> np.random.Generator:
        """Return the generator from which random operations on the host draw."""
        return self._generator

    def random(self, distribution: str, shape: Sequence[int], dtype: Any) -> Tensor:
        draw = {"uniform": self._generator.random, "normal": self._generator.standard_normal}[distribution]
        return self.ops.cast(share(np.asarray(draw(tuple(shape), np.float32))), dtype)

    def synchronize(self) -> None:
        # On CPU launches block, and MindSpore would log an error.
        if self.capabilities is not CPU:
            ms.runtime.synchronize()

    def has_fused_attention(self, query: Tensor, value: Tensor) -> bool:
        return self.capabilities.native_operations and fits_flash_attention(query, value, value)

    def attention_block(self, query: Tensor, key: Tensor, value: Tensor, scores: BlockScores) -> tuple[Tensor, Tensor]:
        if self.capabilities.host_memory:
            return attention.block(query, key, value, scores)
        return super().attention_block(query, key, value, scores)

    def attention_block_grad(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        scores: BlockScores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.capabilities.host_memory:
            return attention.block_grad(grad, query, key, value, out, lse, scores)
        return super().attention_block_grad(grad, query, key, value, out, lse, scores)

    # Processes -------------------------------------------------------------------------------------------

    def connect(self, rank: int, size: int, address: str, timeout_seconds: float = 300.0, local_rank: int = 0) -> World:
        """Join a job as `Platform.connect` describes.

        On CPU, if a rank dies, a collective fails on the other ranks after `timeout_seconds`, or after
        `MS_CPU_COMM_OP_TIMEOUT` if that is set.

        Raises:
            PlatformError: this process has joined a job before (MindSpore can do that once), or the job cannot be
                joined.
        """
        if self._world is not None:
            raise PlatformError(
                f"this process is already rank {self._world.rank} of a job of {self._world.size}; disconnect() first"
            )
        self._world = MindSporeWorld.join(self, rank, size, address, timeout_seconds, local_rank)
        return self._world

    def join_launched(self) -> None:
        if is_launched():
            from_environment(self)

    def disconnect(self) -> None:
        # Cleared first, so that a failing close does not leave a half-closed world.
        world, self._world = self._world, None
        if world is not None:
            world.close()
        # Cached plans refer to groups of the closed world.
        forget_plans()

    def num_accelerators(self) -> int:
        return 0 if self.capabilities is CPU else int(ms.device_context.ascend.device_count())

    def describe_device(self) -> DeviceFacts:
        if self.capabilities is CPU:
            return super().describe_device()
        properties = ms.hal.get_device_properties(ms.get_current_device().device_id)
        return DeviceFacts(str(properties.name), int(properties.total_memory), {})

    def peak_memory(self) -> int:
        return super().peak_memory() if self.capabilities is CPU else int(ms.runtime.max_memory_allocated())

    def profile(self, folder: Path, rank: int) -> AbstractContextManager[None]:
        return _profiled(folder, rank, on_npu=self.capabilities is not CPU)

    def collective_dtypes(self, reducing: bool) -> tuple[str, ...]:
        return self.capabilities.reduced_dtypes if reducing else self.capabilities.moved_dtypes

    @property
    def records_by_thread(self) -> bool:
        return not ms.__version__.startswith("2.9")

    def rank_state(self) -> tuple[bool, bool, Any]:
        """Return the two grad flags and the state of the generator, which belong to a simulated rank."""
        return executor.grad_flag(), executor.enable_grad(), self._generator.bit_generator.state

    def set_rank_state(self, state: tuple[bool, bool, Any]) -> None:
        grad_flag, enabled, generator = state
        # Process-wide, so a simulated rank must restore its own before it runs.
        executor.set_grad_flag(grad_flag)
        executor.set_enable_grad(enabled)
        self._generator.bit_generator.state = generator


@contextlib.contextmanager
def _profiled(folder: Path, rank: int, *, on_npu: bool) -> Iterator[None]:
    """Profile the block; see `Platform.profile`. The profiler's tables are written to `rank<N>-profiler`."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.NPU] if on_npu else [])]
    # The profiler creates a folder named by host, process and time, so it gets a temporary one, which is moved after.
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"rank{rank}-") as scratch:
        profiler = ms.profiler.profile(
            activities=activities,
            profile_memory=on_npu,
            on_trace_ready=ms.profiler.tensorboard_trace_handler(scratch),
        )
        profiler.start()
        try:
            yield
        finally:
            profiler.stop()
        (written,) = Path(scratch).iterdir()
        tables = folder / f"rank{rank}-profiler"
        shutil.rmtree(tables, ignore_errors=True)
        shutil.move(written, tables)
        for trace in tables.rglob("trace_view.json"):
            shutil.move(trace, folder / f"rank{rank}-trace.json")
