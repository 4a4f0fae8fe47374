"""Flat buffers of hp-fsdp on torch, and the autograd nodes through which parameters are gathered.

`resize_` of the untyped storage frees and refills a buffer, so that views which autograd has saved stay valid. The
fill goes through an alias with its own version counter: otherwise every backward would report that its saved views had
been modified in place.

`TorchGatherExtension` gathers weights of tensor subclasses that define `fsdp_pre_all_gather` and
`fsdp_post_all_gather`, the protocol of `torch.distributed.fsdp._fully_shard._fsdp_param`; float8 training of torchao
uses it. A subclass must do what torch's `fully_shard` requires, and hold its values in one plain tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import math
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from hp_dtensor.comm.process_group import Work
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_fsdp.storage import GATHER_METHODS, GatherExtension, Gradients, ParameterStorage, Place, moved_to_front
from hp_platform_torch.tensor.dtensor import TorchDTensor, wrap_in_place
from hp_platform_torch.tensor.saved_tensors import stay_on_device
from hp_platform_torch.tensor.torch_operation import LocalOperations, NoGrad, run_locally

Tensor = torch.Tensor

# torch's own method, without the handling of DTensors. It gets storages here, not tensors.
_set = torch._C.TensorBase.set_
_grad = torch.Tensor.grad.__get__
_set_grad = torch.Tensor.grad.__set__
_version, _address = attrgetter("_version"), methodcaller("data_ptr")


class TorchParameterStorage(ParameterStorage):
    """`ParameterStorage` on torch."""

    # Every view is a separate tensor over the buffer's storage, not an autograd view. torch shares a version counter
    # between a tensor and its views, so that a separate tensor keeps its version when the buffer is filled through
    # another one.

    refuses_released = True

    def __init__(self, platform: Platform) -> None:
        super().__init__(platform)
        self._streams: dict[str, torch.Stream] = {}

    # Memory ----------------------------------------------------------------------------------------------

    def view(self, buffer: Tensor, start: int, shape: Sequence[int], outer_dim: int = 0) -> Tensor:
        shape = tuple(shape)
        return _set(buffer.new_empty(0), buffer.untyped_storage(), start, shape, _strides(shape, outer_dim))

    part = view

    def write(self, buffer: Tensor, places: Sequence[Place], tensors: Sequence[Tensor | None]) -> None:
        with LocalOperations():
            pieces = None if _in_mode() else _pieces(buffer, places, tensors)
            if pieces is not None:
                torch.cat(pieces, out=buffer)
                return
            # Views, which are cheaper than separate tensors, because only the copies use them.
            for (start, numel, outer_dim), x in zip(places, tensors, strict=True):
                if x is None:
                    buffer.as_strided((numel,), (1,), start).zero_()
                else:
                    buffer.as_strided(x.shape, _strides(x.shape, outer_dim), start).copy_(x)

    def versions(self, tensors: Sequence[Tensor]) -> list[int]:
        with LocalOperations():
            try:
                return list(map(_version, tensors))
            except RuntimeError:  # an inference tensor, which has no counter
                return super().versions(tensors)

    def new_buffer(self, numel: int, dtype: torch.dtype, device_type: str) -> Tensor:
        if device_type == "cpu":
            return allocate_on_host(numel, dtype)
        return super().new_buffer(numel, dtype, device_type)

    def release(self, buffer: Tensor) -> None:
        storage = buffer.untyped_storage()
        stay_on_device(storage)
        storage.resize_(0)

    def refill(self, buffer: Tensor) -> None:
        # The bytes of its shape, whatever memory it has now.
        storage, nbytes = buffer.untyped_storage(), buffer.nbytes
        if buffer.is_cpu:
            refill_on_host(storage, nbytes)
        else:
            storage.resize_(nbytes)

    def held_bytes(self, buffer: Tensor) -> int:
        return buffer.nbytes if buffer.untyped_storage().nbytes() else 0

    def add_(self, target: Tensor, x: Tensor) -> None:
        with NoGrad(), LocalOperations():
            target.add_(x)

    def scale_(self, target: Tensor, factor: float) -> None:
        target.mul_(factor if _in_mode() else _scalar(factor, target.dtype))

    def zero_(self, target: Tensor) -> None:
        with NoGrad():
            target.zero_()

    def differ(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
        if not pairs:
            return []
        with NoGrad():
            return torch.stack([torch.ne(_bits(a), _bits(b)).any() for a, b in pairs]).tolist()

    def unscale_(self, tensors: Sequence[Tensor], factor: float) -> Tensor:
        """Multiply float32 tensors in one fused operation per device, and others one by one."""
        # torch has no fused operation for float16 on CPU.
        found = torch.zeros((), device=self.platform.device)  # type: ignore[attr-defined]
        # Gradients may be on the device and, offloaded, on the host.
        fused: dict[torch.device, list[Tensor]] = {}
        others = []
        for x in tensors:
            (fused.setdefault(x.device, []) if x.dtype == torch.float32 else others).append(x)
        with NoGrad():
            for device, together in fused.items():
                here = torch.zeros(1, device=device)
                torch._amp_foreach_non_finite_check_and_unscale_(
                    together, here, torch.full((1,), factor, device=device)
                )
                found = torch.maximum(found, here.to(found.device).squeeze(0))
            return torch.maximum(found, super().unscale_(others, factor)) if others else found

    def address(self, x: Tensor) -> int:
        return x.data_ptr() if x.layout is torch.strided else 0  # a sparse gradient, for which an error follows

    def addresses(self, tensors: Sequence[Tensor]) -> list[int]:
        with LocalOperations():
            try:
                return list(map(_address, tensors))
            except RuntimeError:  # a sparse gradient
                return super().addresses(tensors)

    def gather_extension(self, parameter: Tensor) -> GatherExtension | None:
        return find_extension(parameter)

    def as_bytes(self, buffer: Tensor) -> Tensor:
        return buffer.view(torch.uint8)

    # Offload ---------------------------------------------------------------------------------------------

    def check_offload(self, device_type: str) -> None:
        """Accept every device: all accelerators of torch have streams and page-locked host memory."""

    def check_streaming(self, device_type: str) -> None:
        # Torch assigns `data` between the host and CUDA, but not between the host and a device of PrivateUse1.
        if not torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device_type)):
            raise CapabilityError(
                f"stream_optimizer: torch cannot move offloaded parameters to {device_type} for the step. Without "
                "stream_optimizer the step runs on the host; CPUOffloadPolicy(parameters=False) leaves the parameters "
                "on the device"
            )

    def host_buffer(self, numel: int, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pin_memory and torch.accelerator.is_available())

    def copy_stream(self) -> AbstractContextManager[None]:
        return self._on_own_stream("to device")

    @contextlib.contextmanager
    def _on_own_stream(self, purpose: str) -> Iterator[None]:
        stream, current = self._stream(purpose), torch.accelerator.current_stream()
        stream.wait_stream(current)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(current)

    def to_device(self, target: Tensor, host: Tensor) -> Work:
        with NoGrad():
            target.copy_(host, non_blocking=True)
        # Otherwise the allocator could reuse the memory for the computation's stream while this stream still writes it.
        target.record_stream(torch.accelerator.current_stream())
        return _CopiedToDevice(target, torch.accelerator.current_stream().record_event())

    def finish_reading(self, copying: Work) -> None:
        if isinstance(copying, _CopiedToDevice):
            copying.event.synchronize()

    def to_host(self, host: Tensor, source: Tensor) -> Work:
        with self._on_own_stream("to host"), NoGrad():
            host.copy_(source, non_blocking=True)
            source.record_stream(torch.accelerator.current_stream())
            return _CopiedToHost(torch.accelerator.current_stream().record_event())

    def _stream(self, purpose: str) -> torch.Stream:
        """Return the stream of a direction of copies. Each direction has its own, so that both run at the same time."""
        if purpose not in self._streams:
            self._streams[purpose] = torch.Stream(torch.accelerator.current_accelerator())
        return self._streams[purpose]

    def check_separate_gradients(self) -> None:
        return

    # Parameters ------------------------------------------------------------------------------------------

    def named_modules(self, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        return module.named_modules(remove_duplicate=False)

    def parameter(self, local: Tensor, spec: TensorSpec, requires_grad: bool) -> Tensor:
        # The same as nn.Parameter of a subclass, without an operation that would be dispatched to a sharding rule.
        local.requires_grad_(requires_grad)
        parameter = wrap_in_place(local, spec)
        parameter._is_param = True
        return parameter

    def get_parameters(self, owners: Sequence[tuple[nn.Module, str]]) -> list[Tensor | None]:
        return [module._parameters.get(name) for module, name in owners]

    def set_parameters(self, owners: Sequence[tuple[nn.Module, str]], tensors: Sequence[Tensor]) -> None:
        for (module, name), tensor in zip(owners, tensors, strict=True):
            parameters = module._parameters
            if name not in parameters:
                self.platform.set_parameter(module, name, tensor)  # raises
            parameters[name] = tensor  # type: ignore[assignment]

    def put_data(self, parameter: Tensor, local: Tensor) -> None:
        with LocalOperations():
            parameter.data = local

    def local_grad(self, parameter: Tensor) -> Tensor | None:
        return run_locally(_grad, (), (parameter,))  # type: ignore[no-any-return]

    def set_local_grad(self, parameter: Tensor, grad: Tensor | None, spec: TensorSpec) -> None:
        # The `grad` property of DTensors wraps it as a DTensor when it is read.
        run_locally(_set_grad, (), (parameter, grad))

    def take_grads(self, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        with LocalOperations():
            grads = list(map(_grad, leaves))
            for leaf, grad in zip(leaves, grads, strict=True):
                if grad is not None:
                    _set_grad(leaf, None)
        return grads

    def add_local_grads(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        with LocalOperations():
            for parameter, grad in zip(parameters, grads, strict=True):
                present = _grad(parameter)
                if present is None:
                    _set_grad(parameter, grad)
                else:
                    self.add_(present, grad)

    def run_gradient_hooks(self, parameter: Tensor) -> None:
        # Autograd does not call them: it accumulates into the unsharded parameter, and a DTensor hides its hooks.
        hooks = parameter._post_accumulate_grad_hooks
        if not hooks:
            return
        with NoGrad():
            for hook in list(hooks.values()):
                returned = hook(parameter)
                if returned is not None and returned is not parameter:
                    raise RuntimeError("Tensor post accumulate grad hooks should return None.")

    def check_grad_dtype(self, dtype: torch.dtype) -> None:
        return

    def set_grad_dtype(self, parameter: Tensor, dtype: torch.dtype) -> None:
        with LocalOperations():
            parameter.grad_dtype = dtype

    # Autograd --------------------------------------------------------------------------------------------

    def check_transforms(self) -> None:
        if torch._C._are_functorch_transforms_active():
            raise CapabilityError(
                "torch.func (jvp, vmap, grad and the like) through modules of fully_shard: every tensor inside of a "
                "transform is torch's wrapper without memory, which no collective can fill. Transform a function of "
                "the full parameters: torch.func.functional_call of a module that is not sharded, with "
                "hp_fsdp.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
            )

    def anchor(self) -> Tensor:
        device = getattr(self.platform, "device", None)
        return torch.empty(0, device=device, requires_grad=True)

    def gather_node(
        self, token: Tensor, views: Sequence[Tensor], backward: Callable[[Gradients], None]
    ) -> tuple[Tensor, list[Tensor]]:
        token, *outputs = _apply_gather(token, backward, views)
        return token, outputs

    def join(self, token: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        with LocalOperations():
            joined = _Join.apply(token, *tensors)
        return [
            wrap_in_place(after, before._spec) if isinstance(before, TorchDTensor) else after
            for before, after in zip(tensors, joined, strict=True)
        ]

    def before_backward(self, tensors: list[Tensor], hook: Callable[[], None]) -> list[Tensor]:
        def call(grad: Tensor) -> None:
            hook()

        with LocalOperations():
            for tensor in tensors:
                if tensor.grad_fn is None:
                    tensor.register_hook(call)
                    continue
                # The same as `register_hook`, at a third of its cost: without the handle that removes a hook.
                if tensor._backward_hooks is None:
                    tensor._backward_hooks = OrderedDict()
                    tensor.grad_fn._register_hook_dict(tensor)
                tensor._backward_hooks[call] = call
        return tensors

    def on_gradient(self, tensor: Tensor, hook: Callable[[], None]) -> None:
        with LocalOperations():
            tensor.register_hook(lambda grad: hook())

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        if torch.is_grad_enabled():
            raise CapabilityError(
                "create_graph=True: a backward through modules of fully_shard frees what it gathers and cannot be "
                "differentiated; take such gradients (a gradient penalty) through modules that are not sharded"
            )
        Variable._execution_engine.queue_callback(callback)


def _pieces(buffer: Tensor, places: Sequence[Place], tensors: Sequence[Tensor | None]) -> list[Tensor] | None:
    """Return the flat pieces of which one concatenation makes `buffer`, if that copies nothing else."""
    pieces, dtype = [], buffer.dtype
    for (_, numel, outer_dim), x in zip(places, tensors, strict=True):
        if x is None and numel <= _GAP:
            pieces.append(_zeros(numel, dtype, buffer.device))
        elif x is not None and x.dtype is dtype and not outer_dim and x.is_contiguous():
            pieces.append(x if x.ndim == 1 else x.view(-1))
        else:
            return None
    return pieces


_GAP = 1024  # elements: of the padding between parameters
# In a dispatch mode torch may make tensors without memory, which must not be cached for steps outside of it.
_in_mode = torch._C._len_torch_dispatch_stack


@functools.lru_cache(maxsize=4096)
def _scalar(factor: float, dtype: torch.dtype) -> Tensor:
    """Return a factor of a tensor of `dtype` as a tensor, of which torch makes one in each product by a number."""
    # Of the same dtype where that is the one in which torch multiplies: another one is converted in each product.
    return torch.tensor(factor, dtype=dtype if dtype is torch.float32 else torch.float64, device="cpu")


@functools.lru_cache(maxsize=4096)
def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...], outer_dim: int) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of `shape` whose outermost dimension in memory is `outer_dim`."""
    stored = moved_to_front(shape, outer_dim)
    strides = [math.prod(stored[dim + 1 :]) for dim in range(len(shape))]
    strides.insert(outer_dim, strides.pop(0)) if outer_dim else None
    return tuple(strides)


def _bits(x: Tensor) -> Tensor:
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


# Host memory ---------------------------------------------------------------------------------------------

# The allocator retains the pages of freed buffers for the next ones, up to a size of the request. Fresh pages cost as
# much as the transfer that fills them, because the kernel clears each one when it is first touched. Larger buffers are
# mapped directly, and unmapped when they are freed; huge pages make their first touch cheaper.
RETAINED_BYTES = 2**25  # glibc's largest threshold

_PAGE = 4096
_MADV_HUGEPAGE = 14


def allocate_on_host(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised flat tensor in host memory, the only one over its storage."""
    tensor = torch.empty(numel, dtype=dtype, device="cpu")
    if tensor.nbytes > RETAINED_BYTES:
        _advise_huge_pages(tensor.untyped_storage())
    return tensor


def refill_on_host(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Give an empty storage `nbytes` bytes of uninitialised host memory."""
    storage.resize_(nbytes)
    if nbytes > RETAINED_BYTES:
        _advise_huge_pages(storage)


def _advise_huge_pages(storage: torch.UntypedStorage) -> None:
    advise = _advise()
    if advise is not None:
        start = -(-storage.data_ptr() // _PAGE) * _PAGE
        # A refusal only costs speed.
        advise(ctypes.c_void_p(start), ctypes.c_size_t(storage.nbytes() - _PAGE), _MADV_HUGEPAGE)


@functools.cache
def _advise() -> Any:
    """Return `madvise` of the C library. None on other systems than Linux."""
    return ctypes.CDLL(None).madvise if sys.platform == "linux" else None


# Copies and autograd nodes --------------------------------------------------------------------------------


class _CopiedToHost:
    """A copy to the host, for which `wait` blocks the host."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class _CopiedToDevice:
    """A copy to the device, for which `wait` blocks the current stream."""

    def __init__(self, target: Tensor, event: torch.Event) -> None:
        # Weak: a target that has been freed needs no `record_stream`.
        self._target = weakref.ref(target)
        self.event = event

    def wait(self) -> None:
        stream = torch.accelerator.current_stream()
        stream.wait_event(self.event)
        target = self._target()
        if target is not None:
            target.record_stream(stream)


class _Gather(torch.autograd.Function):
    """Autograd node of the all-gather of a flat buffer: from a token to the next token and the unsharded parameters.

    Tokens connect the nodes in forward order, so that autograd runs their backwards in the reverse order.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, backward: Callable[[Gradients], None], views: Sequence[Tensor]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.complete = backward
        return token.detach(), *[view.detach() for view in views]

    @staticmethod
    def backward(ctx: Any, token: Tensor | None, *grads: Tensor | None) -> Any:
        with LocalOperations():
            ctx.complete(grads)
        # The previous node runs without a gradient of its token too: autograd counts edges, not gradients.
        return None, None, None


# The `apply` below that of `Function`, which looks for `torch.func` transforms. `check_transforms` has refused them.
_apply_gather = super(torch.autograd.Function, _Gather).apply


class _Join(torch.autograd.Function):
    """Autograd node that returns its tensors, and has their backward run before that of the token's node."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *grads


_PLAIN = torch.Tensor, torch.nn.Parameter


def find_extension(parameter: Tensor) -> TorchGatherExtension | None:
    """Return the gather that a parameter's class defines, or None.

    Raises:
        CapabilityError: the class defines one of the two methods only, or one with other arguments; or its values are
            not in one tensor.
    """
    # Without either method it is an ordinary weight.
    missing = [name for name in GATHER_METHODS if not hasattr(parameter, name)]
    if len(missing) == len(GATHER_METHODS):
        return None
    kind = type(parameter)
    if missing:
        raise CapabilityError(f"{kind.__name__} has one of {' and '.join(GATHER_METHODS)}, and lacks {missing[0]}")
    if any(not hasattr(kind, name) for name in GATHER_METHODS):
        raise CapabilityError(
            f"{' / '.join(GATHER_METHODS)} have been set on the weight itself, and its shards would lack them. Define "
            "them in a tensor subclass"
        )
    count = len(inspect.signature(getattr(parameter, GATHER_METHODS[0])).parameters)
    if count not in (1, 5):
        raise CapabilityError(
            f"{kind.__name__}.fsdp_pre_all_gather takes {count} arguments, expected (mesh), or (mesh, outer_size, "
            "outer_stride, module, mp_policy)"
        )
    return TorchGatherExtension(parameter, takes_mesh_only=count == 1)


class TorchGatherExtension(GatherExtension):
    """`GatherExtension` of one weight."""

    def __init__(self, parameter: Tensor, takes_mesh_only: bool) -> None:
        self.kind = type(parameter).__name__
        self._full = parameter.detach()
        self._takes_mesh_only = takes_mesh_only
        # For a weight that has its own memory: torch's operations return instances without these attributes.
        self._attributes = {name: value for name, value in vars(parameter).items() if name != "_is_param"}
        self._size = self._full.size()
        self._strides = tuple(torch.empty(self._size, device="meta").stride())  # those of a contiguous tensor
        self._holder = _attribute_of_values(self._full)
        # Only for a weight with memory of its own: a wrapper class may refuse operations that it does not implement.
        own = self._full.as_subclass(torch.Tensor) if self._holder is None else None
        self.values = getattr(self._full, str(self._holder)).detach() if own is None else own
        self._shard: Any = None
        self._metadata: Any = None
        self._unsharded: Tensor | None = None
        self._inner: list[Tensor] = []

    def split(self, num_shards: int, index: int) -> None:
        # The class's own operations copy the other attributes of an instance. torch's fully_shard uses them too.
        with NoGrad():
            chunks = torch.chunk(self._full, num_shards, dim=0)
            self._shard = chunks[index] if index < len(chunks) else chunks[0].narrow(0, 0, 0)
        del self._full, self.values

    def inputs(self, shard: Tensor, mesh: Any, module: Any, mp_policy: Any) -> list[Tensor]:
        shard = shard.detach()
        if self._holder is not None:
            setattr(self._shard, self._holder, shard)
        elif self._shard.data_ptr() != shard.data_ptr() or not self._shard.numel():
            # Another instance over this shard's memory, which is a copy if the shard is stored on the host.
            self._attributes.update(vars(self._shard))
            self._shard = shard.as_subclass(type(self._shard))
            vars(self._shard).update(self._attributes)
        more = () if self._takes_mesh_only else (self._size, self._strides, module, mp_policy)
        with NoGrad():
            inputs, self._metadata = self._shard.fsdp_pre_all_gather(mesh, *more)
            return [x.contiguous() for x in inputs]

    def unsharded(self, outputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        metadata, self._metadata = self._metadata, None
        with NoGrad():
            if self._unsharded is None:
                made, inner = self._shard.fsdp_post_all_gather(tuple(outputs), metadata, dtype)
                self._inner = [each for each in inner if _storage(each) not in set(map(_storage, outputs))]
                self._unsharded = made if made.size() == self._size else made.as_strided(self._size, self._strides)
                return self._unsharded
            # Tensors of the weight that autograd has saved are valid: the class writes the same values again.
            with torch.autograd._unsafe_preserve_version_counter(tuple(self._inner)):
                self._shard.fsdp_post_all_gather(tuple(outputs), metadata, dtype, out=self._unsharded)
            return self._unsharded

    def inner_tensors(self) -> list[Tensor]:
        return self._inner


def _attribute_of_values(weight: Tensor) -> str | None:
    """Return the attribute of a wrapper subclass that holds its values. None if the weight itself holds them.

    Raises:
        CapabilityError: they are not in one plain tensor of the weight's shape and dtype, as in a weight that is stored
            quantized.
    """
    kind = type(weight)
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return None
    found = [
        name
        for name, value in _attributes(weight)
        if type(value) in _PLAIN and value.shape == weight.shape and value.dtype == weight.dtype
    ]
    if len(found) == 1:
        return found[0]
    got = f"{len(found)} ({', '.join(found)})" if found else "none"
    raise CapabilityError(
        f"{kind.__name__} does not hold its values in one tensor: expected one attribute with a plain tensor of "
        f"{list(weight.shape)}, {weight.dtype}, which the optimizer updates, got {got}"
    )


def _attributes(weight: Tensor) -> Iterator[tuple[str, Any]]:
    names = dict.fromkeys(vars(weight)) if hasattr(weight, "__dict__") else {}
    for kind in type(weight).__mro__:
        slots = vars(kind).get("__slots__", ())
        names.update(dict.fromkeys((slots,) if isinstance(slots, str) else slots))
    yield from ((name, getattr(weight, name, None)) for name in names)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
