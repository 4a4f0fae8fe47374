"""What torch's autograd saves: copies in host memory until backward, and operation results saved for recomputation.

`SavedResults` works below autograd: a dispatch mode sees each operation after autograd has recorded it, so a saved
result becomes part of the graph just as the operation's own would. The selective policies of `torch.utils.checkpoint`
do the same. On an accelerator, host copies are in page-locked memory, and each direction has a stream of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from hp_dtensor.comm.saved_tensors import ATTENTION, PRODUCTS, RECOMPUTED_DIFFERENTLY
from hp_dtensor.platform.autograd import HostCopies, SavedOperations, Wait
from hp_platform_torch.tensor.dtensor import TorchDTensor
from hp_platform_torch.tensor.torch_operation import LocalMode, LocalOperations, NoGrad, is_intercepting

_NAMES = {
    PRODUCTS: ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm"),
    ATTENTION: (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    ),
}


def saved_operations(kinds: Collection[str]) -> SavedOperations:
    """Return an object that saves the results of these kinds of operations; see `Platform.saved_operations`."""
    operations = _operations_of(frozenset(kinds))
    return SavedResults(operations) if operations else SavedOperations()


@functools.cache
def _operations_of(kinds: frozenset[str]) -> frozenset[Any]:
    names = [name for kind in kinds for name in _NAMES.get(kind, ())]
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    # Without overloads that write into an `out` tensor: returning a saved result would not repeat the write.
    return frozenset(
        getattr(packet, overload)
        for packet in packets
        for overload in packet.overloads()
        if "out" not in overload.split("_")
    )


class SavedResults(SavedOperations):
    """Saves the results of some operations, in the order of their calls."""

    def __init__(self, operations: Collection[Any]) -> None:
        self._operations = operations
        self._saved: list[tuple[Any, Any]] = []
        self._is_paused = False

    def first(self) -> LocalMode:
        return LocalMode(self._save)

    def again(self) -> LocalMode:
        rest = iter(self._saved)
        return LocalMode(lambda func, args, kwargs: self._take(rest, func, args, kwargs))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _save(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if func in self._operations and not self._is_paused:
            self._saved.append((func, tree_map_only(torch.Tensor, _Versioned, result)))
        return result

    def _take(self, rest: Iterator[tuple[Any, Any]], func: Any, args: Any, kwargs: Any) -> Any:
        if func not in self._operations or self._is_paused:
            return func(*args, **kwargs)
        saved, result = next(rest, (None, None))
        if saved is not func:
            raise RuntimeError(f"{RECOMPUTED_DIFFERENTLY}; {func} was called where {saved or 'nothing'} had been saved")
        return tree_map_only(_Versioned, _Versioned.alias, result)


class _Versioned:
    """A saved result with its version; reading it after a write raises."""

    def __init__(self, result: torch.Tensor) -> None:
        # Detached, because the autograd graph that the result becomes part of refers to this object. Below autograd, an
        # alias shares the result's version counter only if ADInplaceOrView is included again.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._result = result.detach()
        self._version = self._result._version

    def alias(self) -> torch.Tensor:
        """Return a new tensor over the same memory, because autograd makes a returned tensor part of its graph."""
        if self._result._version != self._version:
            raise RuntimeError(
                f"a saved result of shape {list(self._result.shape)} has been modified in place since; write to a "
                "clone of it, use an operation that is not in place, or save other kinds of results"
            )
        with torch.no_grad():
            return self._result.detach()


_STAYS = "_hp_stays_on_device"
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class _Form(NamedTuple):
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def stay_on_device(storage: torch.UntypedStorage) -> None:
    """Exclude memory from host copies, because its owner frees and refills it itself (FSDP's gathered parameters)."""
    setattr(storage, _STAYS, True)


class TorchHostCopies(HostCopies):
    """See `HostCopies`."""

    def memory_of(self, x: torch.Tensor) -> tuple[Hashable, int] | None:
        # A user's function with DTensors must get them back as DTensors; everywhere else they stand for their shards.
        is_shard = isinstance(x, TorchDTensor) and not is_intercepting()
        if type(x) not in _PLAIN and not is_shard:
            return None
        with LocalOperations():
            if x.layout is not torch.strided or x.is_nested or x.is_quantized or x.is_meta:
                return None
            if x.is_conj() or x.is_neg() or x._is_zerotensor():
                return None
            storage = x.untyped_storage()
        return None if getattr(storage, _STAYS, False) else (storage._cdata, storage.nbytes())

    def form(self, x: torch.Tensor) -> _Form:
        return _Form(x.dtype, x.storage_offset(), tuple(x.shape), x.stride())

    def memory(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        form = _Form(torch.uint8, 0, (storage.nbytes(),), (1,))
        return _over(storage, form)

    def to_host(self, memory: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        # Outside dispatch modes: those that count memory should count the device's only, also where that is the CPU.
        with _disable_current_modes(), NoGrad():
            if memory.device.type == "cpu":
                return torch.empty(memory.shape, dtype=torch.uint8).copy_(memory), _nothing
            host = torch.empty(memory.shape, dtype=torch.uint8, pin_memory=True)
            return host, _copy_on_own_stream("to host", host, memory)

    def to_device(self, host: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        with NoGrad(), LocalOperations():
            if not host.is_pinned():
                return torch.empty_like(host).copy_(host), _nothing
            # Allocated on the computing stream, to whose memory pool it returns when it is freed.
            memory = torch.empty(host.shape, dtype=torch.uint8, device=torch.accelerator.current_accelerator())
            return memory, _copy_on_own_stream("to device", memory, host)

    def tensor(self, memory: torch.Tensor, form: _Form) -> torch.Tensor:
        return _over(memory.untyped_storage(), form)


def _over(storage: torch.UntypedStorage, form: _Form) -> torch.Tensor:
    with NoGrad(), LocalOperations():
        tensor = torch.empty(0, dtype=form.dtype, device=storage.device)
        return tensor.set_(storage, form.offset, form.shape, form.strides)


def _copy_on_own_stream(purpose: str, target: torch.Tensor, source: torch.Tensor) -> Wait:
    """Copy on a stream of its own: after work already queued on the computing stream, in parallel with later work."""
    stream, current = _stream(purpose, torch.accelerator.current_device_index()), torch.accelerator.current_stream()
    stream.wait_stream(current)
    torch.accelerator.set_stream(stream)
    try:
        target.copy_(source, non_blocking=True)
    finally:
        torch.accelerator.set_stream(current)
    # Dropping the graph may free memory during its copy; the allocator must not reuse it before the stream is done.
    (source if purpose == "to host" else target).record_stream(stream)
    event = stream.record_event()

    def wait() -> None:
        computing = torch.accelerator.current_stream()
        computing.wait_event(event)
        if purpose == "to device":
            # The copy may have started while backward used another stream.
            target.record_stream(computing)

    return wait


@functools.cache
def _stream(purpose: str, device: int) -> torch.Stream:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None  # its memory is being copied
    return torch.Stream(torch.device(accelerator.type, device))


def _nothing() -> None:
    """Do nothing: a copy within the host has finished when it returns."""
