"""`TorchPlatform`: everything that hp_dtensor asks of a framework, in terms of torch."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import ProcessGroup, World
from hp_dtensor.dispatch.operation import forget_plans
from hp_dtensor.exceptions import CapabilityError, PlatformError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.modules import Removable
from hp_dtensor.platform.tensors import DTYPE_NAMES
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_platform_torch.comm import rendezvous
from hp_platform_torch.comm.capabilities import device_types
from hp_platform_torch.comm.world import TorchWorld
from hp_platform_torch.ops.names import function_named, names_of
from hp_platform_torch.ops.namespace import build_ops
from hp_platform_torch.patches import backward_inputs, table
from hp_platform_torch.tensor import autograd, dtensor, operations
from hp_platform_torch.tensor.dtensor import TorchDTensor
from hp_platform_torch.tensor.handlers import handler_of
from hp_platform_torch.tensor.local_operations import LocalOperations, NoGrad

Tensor = torch.Tensor
Removable.register(RemovableHandle)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in (*DTYPE_NAMES, "complex64", "complex128")}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DTYPES_OF_CLASSES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class TorchPlatform(Platform):
    """PyTorch on CPU, CUDA or Ascend.

    `HP_DEVICE` (`cpu`, `cuda`, `npu`) limits it to one kind of device where it could use several.

    Attributes:
        device: this rank's default device, or that of `default_device` around it.
    """

    name = "torch"
    Tensor = torch.Tensor
    Parameter = nn.Parameter
    Module = nn.Module
    DTensor = TorchDTensor
    host_device = "cpu"
    picks_integers_first = True
    masks_of_bytes = True

    def __init__(self) -> None:
        self.device_types = _device_types()
        self._devices = threading.local()
        self.device = torch.device(self.device_types[0], 0) if self.device_types[0] != "cpu" else torch.device("cpu")
        self.ops = build_ops(lambda: self.device)
        self._owns_process_group = False
        self._connections = 0
        operations.operations.handler_of = handler_of
        table.install()

    @property
    def device(self) -> torch.device:
        return getattr(self._devices, "chosen", None) or self._own_device

    @device.setter
    def device(self, device: torch.device) -> None:
        self._own_device = device

    # Processes -------------------------------------------------------------------------------------------

    def connect(self, rank: int, size: int, address: str, timeout_seconds: float = 300.0, local_rank: int = 0) -> World:
        """See `Platform.connect`.

        A default process group that the program has made itself is used and left as it is. Where a peer has
        died, collectives fail at once or within `timeout_seconds`.

        Raises:
            PlatformError: this process has joined a job already, or the job cannot be joined.
        """
        if self.world is not None:
            raise PlatformError(
                f"this process is already rank {self.world.rank} of a job of {self.world.size}; disconnect() first"
            )
        timeout = timedelta(seconds=timeout_seconds)
        self._use_device(local_rank)
        self._connections += 1
        store = None
        if dist.is_initialized():
            _check_same_job(rank, size)
            store = rendezvous.joined_store(self._connections)
        elif size > 1:
            store = rendezvous.join(rank, size, address, timeout)
            self._owns_process_group = True
        self.world = TorchWorld(rank, size, self, store, timeout)
        return self.world

    def adopt_mesh(self, mesh: Any) -> DeviceMesh | None:
        """Return a `torch.distributed.device_mesh.DeviceMesh` as ours, over the same process groups."""
        from torch.distributed.device_mesh import DeviceMesh as TorchMesh

        from hp_platform_torch.tensor.interop import from_torch_mesh

        return from_torch_mesh(mesh, self) if isinstance(mesh, TorchMesh) else None

    def adopt_group(self, group: Any) -> ProcessGroup | None:
        """Return a process group of torch.distributed as ours, communicating through it."""
        from hp_platform_torch.tensor.interop import from_torch_group

        return from_torch_group(group, self) if isinstance(group, dist.ProcessGroup) else None

    def disconnect(self) -> None:
        world, self.world = self.world, None
        if world is not None:
            world.close()
        forget_plans()
        if self._owns_process_group:
            self._owns_process_group = False
            rendezvous.leave()

    def environment(self, local_rank: int, local_size: int) -> dict[str, str]:
        """Return settings of a new rank: threads, the cores of this machine divided among its ranks, unless set."""
        threads = max(1, len(os.sched_getaffinity(0)) // max(1, local_size))
        return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}

    def num_accelerators(self) -> int:
        kind = self.device_types[0]
        return 0 if kind == "cpu" else int(getattr(torch, kind).device_count())

    def _use_device(self, local_rank: int) -> None:
        kind = self.device_types[0]
        if kind != "cpu":
            self.device = torch.device(kind, local_rank)
            getattr(torch, kind).set_device(self.device)

    # Dtypes and plain tensors ----------------------------------------------------------------------------

    def dtype(self, name: str) -> torch.dtype:
        if name not in DTYPES:
            raise ValueError(f"dtype {name!r} is unknown; expected one of {', '.join(DTYPES)}")
        return DTYPES[name]

    def dtype_name(self, dtype: torch.dtype) -> str:
        if dtype not in NAMES:
            raise ValueError(f"{dtype} has no counterpart on other platforms; expected one of {', '.join(DTYPES)}")
        return NAMES[dtype]

    def dtype_meant(self, value: Any) -> Any:
        """Return the dtype that `x.to(int)`, `x.type("torch.LongTensor")` or `x.type(torch.LongTensor)` means."""
        kind = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
        if type(kind) is type(torch.LongTensor):
            return kind.dtype
        return _DTYPES_OF_CLASSES.get(value, value) if isinstance(value, type) else value

    def itemsize(self, dtype: torch.dtype) -> int:
        return dtype.itemsize

    def is_floating(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point

    def is_complex(self, dtype: torch.dtype) -> bool:
        return dtype.is_complex

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device or self.device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=device or self.device)

    def from_numpy(self, array: np.ndarray, device: Any = None) -> Tensor:
        usable = array.flags.writeable and array.flags.c_contiguous and array.dtype.isnative
        ready = array if usable else np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(ready).to(device or self.device)

    def to_numpy(self, x: Tensor) -> np.ndarray:
        host = self.detach(self.unwrap(x)).cpu().resolve_conj().resolve_neg()
        return (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()

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
            if target.numel() != source.numel():
                raise ValueError(f"copy_: expected a source of shape {list(target.shape)}, got {list(source.shape)}")
            target.copy_(source if target.shape == source.shape else source.reshape(target.shape))

    def contiguous(self, x: Tensor) -> Tensor:
        # Backends send storage as it lies: not conjugated or negated yet, or, of the ZeroTensors that torch gives for
        # gradients known to be zero (of `sgn`), no storage at all.
        if x._is_zerotensor():
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        return x.contiguous().resolve_conj().resolve_neg()

    def detach(self, x: Tensor) -> Tensor:
        return x.detach()

    def device_of(self, x: Tensor) -> torch.device:
        return x.device

    def is_meta(self, x: Tensor) -> bool:
        return x.is_meta

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

    _linear_map = staticmethod(autograd.linear_map)
    _custom_function = staticmethod(autograd.custom_function)

    def is_in_backward(self) -> bool:
        return bool(torch._C._current_graph_task_id() != -1)

    def is_for_parameters(self) -> bool:
        return not backward_inputs.are_named()

    def backward(self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        loss.backward(gradient, retain_graph=retain_graph)

    def grad(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        output_grads: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor | None]:
        try:
            return list(torch.autograd.grad(outputs, inputs, output_grads, allow_unused=True))
        except RuntimeError as error:
            if str(error).startswith("derivative for"):  # of aten::aminmax in torch 2.11, say
                raise CapabilityError(f"torch {torch.__version__}: {error}") from error
            raise

    def no_grad(self) -> AbstractContextManager[None]:
        return torch.no_grad()

    def enable_grad(self) -> AbstractContextManager[None]:
        return torch.enable_grad()

    def is_grad_enabled(self) -> bool:
        return torch.is_grad_enabled()

    def requires_grad(self, x: Tensor) -> bool:
        return x.requires_grad

    def is_leaf(self, x: Tensor) -> bool:
        return x.is_leaf

    def has_gradient_hooks(self, x: Tensor) -> bool:
        with self.local_op():
            return bool(x._backward_hooks or x._post_accumulate_grad_hooks)

    def loss_dtype(self, x: Tensor) -> torch.dtype:
        is_wider = x.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(x.device.type)
        return torch.float32 if is_wider else x.dtype

    def version(self, x: Tensor) -> int:
        return 0 if x.is_inference() else x._version

    def set_requires_grad(self, x: Tensor, flag: bool) -> None:
        x.requires_grad_(flag)

    def get_grad(self, x: Tensor) -> Tensor | None:
        return x.grad

    def set_grad(self, x: Tensor, grad: Tensor | None) -> None:
        x.grad = grad

    # DTensor ---------------------------------------------------------------------------------------------

    def check_dense(self, x: Tensor) -> None:
        if x.layout is not torch.strided or x.is_quantized:
            kind = "quantized" if x.is_quantized else x.layout
            raise CapabilityError(f"DTensors are made of dense tensors, got a tensor that is {kind}; convert it first")

    def wrap(self, local: Tensor, spec: TensorSpec) -> TorchDTensor:
        return dtensor.wrap(local, spec)

    def operation(self, name: str) -> Callable[..., Any] | None:
        return super().operation(name) or function_named(name)

    def own_function(self, name: str) -> Callable[..., Any] | None:
        return function_named(name)

    def operation_names(self, name: str) -> list[str]:
        return names_of(name)

    def adopt(self, result: Tensor, spec: TensorSpec) -> TorchDTensor:
        return dtensor.adopt_output(result, spec)

    def local_shape(self, x: Tensor) -> tuple[int, ...]:
        with LocalOperations():
            return tuple(x.shape)

    def strides(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.stride())

    def memory_order(self, x: Tensor) -> tuple[int, ...]:
        inner_first = list(reversed(range(x.dim())))
        for place in range(1, x.dim()):
            for inner in reversed(range(place)):
                wrong = _lies_further_in(x, inner_first[place], inner_first[inner])
                if wrong:
                    inner_first[inner], inner_first[place] = inner_first[place], inner_first[inner]
                    place = inner
                elif wrong is False:
                    break
        return tuple(reversed(inner_first))

    def unwrap(self, x: Tensor) -> Tensor:
        return dtensor.unwrap(x)

    def local_op(self) -> AbstractContextManager[None]:
        return LocalOperations()

    # Many tensors at once --------------------------------------------------------------------------------

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for together in _by_device(tensors).values():
            # Torch narrows no norm of its own accord.
            dtype = torch.float64 if any(x.dtype is torch.float64 for x in together) else torch.float32
            total = total + torch.stack(torch._foreach_norm(together, 2, dtype=dtype)).square_().sum().float()
        return total

    def scale_(self, tensors: Sequence[Tensor], factor: Tensor) -> None:
        with torch.no_grad():
            for device, together in _by_device(tensors).items():
                torch._foreach_mul_(together, factor.to(device))

    # Modules ---------------------------------------------------------------------------------------------

    def named_modules(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return module.named_modules()

    def named_parameters(
        self, module: nn.Module, recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return module.named_parameters(recurse=recurse, remove_duplicate=remove_duplicate)

    def set_parameter(self, module: nn.Module, name: str, value: Tensor) -> None:
        # nn.Module's own assignment refuses a plain tensor under a parameter's name.
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

    # Randomness, time and memory -------------------------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def random(self, distribution: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        draw = {"uniform": torch.rand, "normal": torch.randn}[distribution]
        return draw(tuple(shape), dtype=dtype, device=self.device)

    def rank_state(self) -> torch.Tensor:
        """Return the state of the CPU generator: every simulated rank draws its own numbers."""
        return torch.get_rng_state()

    def set_rank_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()


def _lies_further_in(x: Tensor, dim: int, than: int) -> bool | None:
    """Tell whether `dim` lies further in than another, as torch's TensorIterator does; None if strides do not tell."""
    (stride, size), (other, other_size) = ((x.stride(d), x.shape[d]) for d in (dim, than))
    if not stride or not other or (stride == other and size >= other_size):
        return None
    return stride < other or stride == other


def _by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Sort tensors by device: offloaded gradients lie on the host, those of replicated parameters on the device."""
    found: dict[torch.device, list[Tensor]] = {}
    for x in tensors:
        found.setdefault(x.device, []).append(x)
    return found


def _device_types() -> tuple[str, ...]:
    usable = device_types()
    wanted = os.environ.get("HP_DEVICE")
    if not wanted:
        return usable
    if wanted not in usable:
        raise PlatformError(f"HP_DEVICE is {wanted!r}, but torch can use here only: {', '.join(usable)}")
    return (wanted, "cpu") if wanted != "cpu" else ("cpu",)


def _check_same_job(rank: int, size: int) -> None:
    have = dist.get_rank(), dist.get_world_size()
    if have != (rank, size):
        raise PlatformError(f"torch.distributed is already rank {have[0]} of {have[1]}; expected rank {rank} of {size}")
