"""`TorchPlatform`: the interface that hp_dtensor requires of a framework, implemented with torch."""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.attention import BlockScores
from hp_dtensor.platform.autograd import SavedOperations
from hp_dtensor.platform.interface import DTYPE_NAMES, ModuleInterface, Platform, Removable
from hp_dtensor.spec.placements import Replicate, Shard
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_platform_torch import patches
from hp_platform_torch.ops import ascend, attention
from hp_platform_torch.ops.namespace import build_ops, function_named, names_of
from hp_platform_torch.processes import TorchProcesses
from hp_platform_torch.tensor import dtensor, torch_operation
from hp_platform_torch.tensor.autograd import (
    automatic_precision_of,
    custom_function,
    is_for_parameters,
    linear_map,
    needs_first_operand,
    split_backward,
)
from hp_platform_torch.tensor.dtensor import TorchDTensor
from hp_platform_torch.tensor.handlers import handler_of
from hp_platform_torch.tensor.saved_tensors import TorchHostCopies, saved_operations
from hp_platform_torch.tensor.torch_operation import LocalOperations, NoGrad

Tensor = torch.Tensor
Removable.register(RemovableHandle)


class TorchModules(ModuleInterface):
    """The part of the platform that handles `nn.Module`s: parameters and buffers by name, and hooks."""

    def compile_module(self, module: nn.Module, backend: str) -> None:
        """Compile as `torch.nn.Module.compile` does; the hooks of sharding stay outside of the compiled forward.

        Raises:
            CapabilityError: torch has no backend of this name.
        """
        known = self.compile_backends()
        if backend not in known:
            raise CapabilityError(f"torch.compile has no backend {backend!r}; it has {', '.join(known)}")
        module.compile(backend=backend)

    def compile_backends(self) -> tuple[str, ...]:
        return tuple(torch.compiler.list_backends(exclude_tags=()))

    def named_modules(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return module.named_modules()

    def named_parameters(
        self, module: nn.Module, recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return module.named_parameters(recurse=recurse, remove_duplicate=remove_duplicate)

    def set_parameter(self, module: nn.Module, name: str, value: Tensor) -> None:
        # Assignment on an nn.Module refuses a plain tensor under a parameter's name.
        parameters = module._parameters
        if name not in parameters:
            owned = ", ".join(parameters) or "none"
            raise KeyError(f"{type(module).__name__} owns no parameter {name!r}; its own are: {owned}")
        parameters[name] = value  # type: ignore[assignment]

    def named_buffers(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        return module.named_buffers()

    def add_forward_pre_hook(
        self,
        module: nn.Module,
        hook: Callable[[nn.Module, tuple, dict], tuple[tuple, dict] | None],
        prepend: bool = False,
    ) -> Removable:
        return module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=True)  # type: ignore[return-value]

    def add_forward_hook(
        self,
        module: nn.Module,
        hook: Callable[[nn.Module, tuple, dict, Any], Any],
        prepend: bool = False,
        always_call: bool = False,
    ) -> Removable:
        return module.register_forward_hook(  # type: ignore[return-value]
            hook, prepend=prepend, with_kwargs=True, always_call=always_call
        )

    def has_hooks(self, module: nn.Module) -> bool:
        kinds = ("forward_pre", "forward", "backward_pre", "backward")
        return any(getattr(module, f"_{kind}_hooks") for kind in kinds)

    def watch_functions(self, note: Callable[[str, Any], None]) -> AbstractContextManager[Any]:
        return torch_operation.WatchedFunctions(note)


DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (*DTYPE_NAMES, "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64")
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
"""Dtypes that NumPy lacks -> integer dtypes with the same number of bits."""
_DTYPES_OF_CLASSES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class TorchPlatform(TorchProcesses, TorchModules, Platform):
    """PyTorch on CPU, CUDA or Ascend.

    `HP_DEVICE` (`cpu`, `cuda`, `npu`) limits it to one device type where several are available.

    Attributes:
        device: this rank's default device, or that of an enclosing `default_device`.
    """

    name = "torch"
    Tensor = torch.Tensor
    Parameter = nn.Parameter
    Module = nn.Module
    DTensor = TorchDTensor
    host_device = "cpu"
    picks_integers_first = True
    masks_of_bytes = True
    function_modules = ("torch", "torch.nn.functional", "torch.linalg", "torch.special", "torch.fft")
    shard_names = frozenset({"data_ptr", "storage"})
    splits_backward = True
    recomputes_on_unpack = True

    def __init__(self) -> None:
        TorchProcesses.__init__(self)
        self._devices = threading.local()
        self.device = torch.device(self.device_types[0], 0) if self.device_types[0] != "cpu" else torch.device("cpu")
        self.ops = build_ops(lambda: self.device)
        torch_operation.operations.handler_of = handler_of
        patches.install()

    @property
    def device(self) -> torch.device:
        return getattr(self._devices, "chosen", None) or self._own_device

    @device.setter
    def device(self, device: torch.device) -> None:
        self._own_device = device

    # Dtypes and plain tensors ----------------------------------------------------------------------------

    def dtype(self, name: str) -> torch.dtype:
        if name not in DTYPES:
            raise ValueError(f"dtype {name!r} is unknown; expected one of {', '.join(DTYPES)}")
        return DTYPES[name]

    def dtype_of_number(self, value: complex) -> torch.dtype:
        # Depends on `torch.set_default_dtype` for real and complex numbers.
        return torch.full((), value, device="cpu").dtype

    def dtype_name(self, dtype: torch.dtype) -> str:
        # Checkpoints and other platforms go by these names.
        if dtype not in NAMES:
            raise ValueError(f"{dtype} has no counterpart on other platforms; expected one of {', '.join(DTYPES)}")
        return NAMES[dtype]

    def dtype_meant(self, value: Any) -> Any:
        """Return the dtype of `x.to(int)`, `x.type("torch.LongTensor")` or `x.type(torch.LongTensor)`."""
        kind = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
        if type(kind) is type(torch.LongTensor):
            return kind.dtype
        return _DTYPES_OF_CLASSES.get(value, value) if isinstance(value, type) else value

    itemsize = staticmethod(operator.attrgetter("itemsize"))

    def is_floating(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point

    def is_complex(self, dtype: torch.dtype) -> bool:
        return dtype.is_complex

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device or self.device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=device or self.device)

    def from_numpy(self, array: np.ndarray, device: Any = None) -> Tensor:
        # `torch.from_numpy` shares the memory; it warns about read-only arrays and refuses negative strides and other
        # byte orders.
        usable = array.flags.writeable and array.flags.c_contiguous and array.dtype.isnative
        ready = array if usable else np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(ready).to(device or self.device)

    def to_numpy(self, x: Tensor) -> np.ndarray:
        host = self.detach(self.unwrap(x)).cpu().resolve_conj().resolve_neg()
        return host.view(_BITS.get(host.dtype, host.dtype)).numpy()

    def from_bits(self, array: np.ndarray, dtype: torch.dtype, device: Any = None) -> Tensor:
        tensor = self.from_numpy(array, device)
        if tensor.dtype == dtype:
            return tensor
        if tensor.dtype.itemsize != dtype.itemsize:
            raise ValueError(
                f"from_bits: {array.dtype} has {tensor.dtype.itemsize} bytes per element, {dtype} has {dtype.itemsize}"
            )
        return tensor.view(dtype)

    def copy_(self, target: Tensor, source: Tensor) -> None:
        with NoGrad(), LocalOperations():
            shape = target.shape
            if source.shape != shape:
                if source.numel() != target.numel():
                    raise ValueError(f"copy_: expected a source of shape {list(shape)}, got {list(source.shape)}")
                source = source.reshape(shape)
            target.copy_(source)

    def set_data(self, x: Tensor, data: Tensor) -> None:
        x.data = data
        # Assigning `data` alone would let backward read the new values where it saved `x`.
        torch.autograd.graph.increment_version(x)

    def contiguous(self, x: Tensor) -> Tensor:
        # Backends send the storage as it is in memory, without pending conjugation or negation. The ZeroTensors that
        # torch returns for gradients known to be zero (of `sgn`) have no storage at all.
        if x._is_zerotensor():
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        return x.contiguous().resolve_conj().resolve_neg()

    def detach(self, x: Tensor) -> Tensor:
        return x.detach()

    def device_of(self, x: Tensor) -> torch.device:
        return x.device

    is_meta = staticmethod(operator.attrgetter("is_meta"))

    @contextlib.contextmanager
    def default_device(self, device: Any) -> Iterator[None]:
        before = getattr(self._devices, "chosen", None)
        self._devices.chosen = torch.device(device)
        try:
            with self._devices.chosen:
                yield
        finally:
            self._devices.chosen = before

    # Autograd --------------------------------------------------------------------------------------------

    _linear_map = staticmethod(linear_map)
    _custom_function = staticmethod(custom_function)

    def is_in_backward(self) -> bool:
        return bool(torch._C._current_graph_task_id() != -1)

    def is_for_parameters(self) -> bool:
        return is_for_parameters()

    def backward(self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        loss.backward(gradient, retain_graph=retain_graph)

    def grad(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], output_grads: Sequence[Tensor | None] | None = None
    ) -> list[Tensor | None]:
        try:
            return list(torch.autograd.grad(outputs, inputs, output_grads, allow_unused=True))
        except RuntimeError as error:
            if str(error).startswith("derivative for"):  # of aten::aminmax in torch 2.11, say
                raise CapabilityError(f"torch {torch.__version__}: {error}") from error
            raise

    def split_backward(
        self, outputs: Sequence[Tensor], output_grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], Callable[[], None]]:
        return split_backward(outputs, output_grads, inputs)

    def needs_first_operand(self) -> bool:
        return needs_first_operand()

    def recording(self, flag: bool) -> AbstractContextManager[None]:
        return torch.enable_grad() if flag else torch.no_grad()

    # Without a function around torch's own, because modules of FSDP call these several times per step.
    is_grad_enabled = staticmethod(torch.is_grad_enabled)
    requires_grad = staticmethod(operator.attrgetter("requires_grad"))

    is_leaf = staticmethod(operator.attrgetter("is_leaf"))

    def has_gradient_hooks(self, x: Tensor) -> bool:
        with self.local_op():
            return bool(x._backward_hooks or x._post_accumulate_grad_hooks)

    def automatic_precision(self) -> Callable[[], AbstractContextManager[Any]]:
        return automatic_precision_of({"cpu", self.device.type})

    def loss_dtype(self, x: Tensor) -> torch.dtype:
        is_wider = x.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(x.device.type)
        return torch.float32 if is_wider else x.dtype

    def saved_operations(self, kinds: Collection[str]) -> SavedOperations:
        return saved_operations(kinds)

    def uncompiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # A program that compiles has imported dynamo already; importing it here would take a second.
        if "torch._dynamo" not in sys.modules:
            return function
        disabled: Callable[..., Any] = torch.compiler.disable(function)
        return disabled

    def saving(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def saving_hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
        return torch._C._autograd._top_saved_tensors_default_hooks(True)

    def host_copies(self) -> TorchHostCopies:
        return TorchHostCopies()

    def random_state(self) -> tuple[Tensor, Tensor | None]:
        kind = self.device.type
        device = None if kind == "cpu" else getattr(torch, kind).get_rng_state(self.device)
        return torch.get_rng_state(), device

    def set_random_state(self, state: tuple[Tensor, Tensor | None]) -> None:
        host, device = state
        torch.set_rng_state(host)
        if device is not None:
            getattr(torch, self.device.type).set_rng_state(device, self.device)

    def is_random_state(self, state: tuple[Tensor, Tensor | None]) -> bool:
        now = self.random_state()
        return all(a is None or bool(torch.equal(a, b)) for a, b in zip(now, state, strict=True))

    def version(self, x: Tensor) -> int:
        try:
            return x._version
        except RuntimeError:
            return 0  # an inference tensor, which has no counter

    def set_requires_grad(self, x: Tensor, flag: bool) -> None:
        x.requires_grad_(flag)

    def get_grad(self, x: Tensor) -> Tensor | None:
        return x.grad

    def set_grad(self, x: Tensor, grad: Tensor | None) -> None:
        x.grad = grad

    # DTensor ---------------------------------------------------------------------------------------------

    def check_dense(self, x: Tensor) -> None:
        # Looking for attributes that a plain tensor lacks takes longer than the conversion to a DTensor.
        is_subclass = type(x) is not torch.Tensor and not isinstance(x, TorchDTensor)
        if is_subclass and hasattr(x, "_local_tensor") and hasattr(x, "device_mesh"):
            raise CapabilityError(
                "expected a plain tensor, got a DTensor of torch.distributed.tensor; "
                "hp_platform_torch.tensor.interop.from_torch_dtensor makes ours of it, over the same memory"
            )
        if x.layout is not torch.strided or x.is_quantized:
            kind = "quantized" if x.is_quantized else x.layout
            raise CapabilityError(f"DTensors are made of dense tensors, got a tensor that is {kind}; convert it first")

    def as_dtensor(self, x: Any) -> Any:
        # By attributes: importing torch's DTensor takes half a second, which programs without one need not spend.
        if isinstance(x, TorchDTensor) or not (hasattr(x, "_local_tensor") and hasattr(x, "device_mesh")):
            return x
        from hp_platform_torch.tensor.interop import from_torch_dtensor

        with torch.no_grad():
            return from_torch_dtensor(x.detach(), self)

    # Without methods around these functions: conversions and redistributions call them.
    wrap = staticmethod(dtensor.wrap)
    wrap_fresh = staticmethod(dtensor.wrap_output)

    def operation(self, name: str) -> Callable[..., Any] | None:
        return super().operation(name) or function_named(name)

    def own_function(self, name: str) -> Callable[..., Any] | None:
        return function_named(name)

    def operation_names(self, name: str) -> list[str]:
        return names_of(name)

    def empty_deferred(self, shape: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
        # One element expanded to the shape, so that no memory is used in addition to that of the arriving data.
        return torch.empty((1,) * len(shape), dtype=dtype, device=device).expand(*shape)

    def wrap_deferred(self, result: Tensor, spec: TensorSpec, finish: Callable[[], Tensor]) -> TorchDTensor:
        return dtensor.wrap_deferred(result, spec, finish)

    def local_shape(self, x: Tensor) -> tuple[int, ...]:
        with LocalOperations():
            return tuple(x.shape)

    def strides(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.stride())

    def memory_order(self, x: Tensor) -> tuple[int, ...]:
        inner_first = list(reversed(range(x.dim())))
        # An insertion sort, as TensorIterator's: it compares pairs, and passes over those that strides do not decide.
        for place in range(1, x.dim()):
            for inner in reversed(range(place)):
                wrong = _is_inner_to(x, inner_first[place], inner_first[inner])
                if wrong:
                    inner_first[inner], inner_first[place] = inner_first[place], inner_first[inner]
                    place = inner
                elif wrong is False:
                    break
        return tuple(reversed(inner_first))

    unwrap = staticmethod(dtensor.unwrap)
    local_op = staticmethod(LocalOperations)

    # Attention -------------------------------------------------------------------------------------------

    def route_attention(self, function: Callable[..., Any]) -> AbstractContextManager[Any]:
        return attention.RoutedAttention(function)

    def has_fused_attention(self, query: Tensor, value: Tensor) -> bool:
        return query.is_cuda or attention.takes(query, value) or ascend.takes_attention(query, value)

    def has_fused_blocks(self, query: Tensor, value: Tensor) -> bool:
        return attention.takes(query, value)

    def fused_rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
        # The compiler fuses the composition. What follows would end its graph. Other devices have no such operation.
        if torch.compiler.is_compiling() or x.device.type != "npu":
            return None
        # Sharded heads share the tables. Every other sharding, and a partial value, is left to the rules.
        if isinstance(x, TorchDTensor) and not all(each in (Replicate(), Shard(2)) for each in x.placements):
            return None
        with LocalOperations():
            local, *tables = (each.as_subclass(Tensor) for each in (x, cos, sin))
            rotated = ascend.rotary(local, *tables) if ascend.takes_rotary(local, tables[0]) else None
        if rotated is None or not isinstance(x, TorchDTensor):
            return rotated
        return dtensor.wrap_output(rotated, x.spec)

    def dropout_factors(
        self, p: float, rows: np.ndarray, heads: np.ndarray, queries: np.ndarray, keys: np.ndarray
    ) -> Tensor:
        return attention.dropout_factors(p, *(self.from_numpy(x) for x in (rows, heads, queries, keys)))

    def attention_block(self, query: Tensor, key: Tensor, value: Tensor, scores: BlockScores) -> tuple[Tensor, Tensor]:
        if attention.takes_scores(scores) and attention.takes(query, value):
            return attention.block(query, key, value, scores)
        return super().attention_block(query, key, value, scores)

    def attention_block_grad(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scores: BlockScores
    ) -> tuple[Tensor, Tensor, Tensor]:
        if attention.takes_scores(scores) and attention.takes(query, value):
            return attention.block_grad(grad, query, key, value, out, lse, scores)
        return super().attention_block_grad(grad, query, key, value, out, lse, scores)

    def merge_blocks_in_place(self, one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return attention.merge_blocks_in_place(one, other)

    def add_into(self, total: Tensor, x: Tensor) -> Tensor:
        return total.add_(x)

    # Many tensors at once --------------------------------------------------------------------------------

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for together in _by_device(tensors).values():
            # `_foreach_norm` refuses to reduce float64 in float32.
            dtype = torch.float64 if any(x.dtype is torch.float64 for x in together) else torch.float32
            total = total + torch.stack(torch._foreach_norm(together, 2, dtype=dtype)).square_().sum().float()
        return total

    def scale_(self, tensors: Sequence[Tensor], factor: Tensor) -> None:
        with torch.no_grad():
            for device, together in _by_device(tensors).items():
                torch._foreach_mul_(together, factor.to(device))

    # Randomness ------------------------------------------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def random(self, distribution: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        draw = {"uniform": torch.rand, "normal": torch.randn}[distribution]
        return draw(tuple(shape), dtype=dtype, device=self.device)


def _is_inner_to(x: Tensor, dim: int, than: int) -> bool | None:
    """Return True if `dim` is inner to `than` in memory, as TensorIterator decides; None if strides do not show it."""
    (stride, size), (other, other_size) = ((x.stride(d), x.shape[d]) for d in (dim, than))
    if not stride or not other or (stride == other and size >= other_size):
        return None
    return stride < other or stride == other


def _by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Group tensors by device: offloaded gradients are on the host, those of replicated parameters on the device."""
    found: dict[torch.device, list[Tensor]] = {}
    for x in tensors:
        found.setdefault(x.device, []).append(x)
    return found
