"""Results of torch's operations that stay from a computation to its repetition, below autograd.

A dispatch mode sees each operation after autograd has recorded it: what stands in for a result is part of a graph like
what the operation itself would have given. `torch.utils.checkpoint`'s selective policies rest on the same.

Copies in host memory of what torch's autograd saves, by its saved-tensor hooks.

On an accelerator the host's memory is page-locked, and each direction has a stream of its own.
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
from hp_dtensor.platform.autograd import HostCopies, KeptOperations, Wait
from hp_platform_torch.tensor.dtensor import TorchDTensor
from hp_platform_torch.tensor.operations import LocalMode, LocalOperations, NoGrad, is_intercepting

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


def kept_operations(kinds: Collection[str]) -> KeptOperations:
    """Return what keeps the results of these kinds; see `Platform.kept_operations`."""
    operations = _operations_of(frozenset(kinds))
    return KeptResults(operations) if operations else KeptOperations()


@functools.cache
def _operations_of(kinds: frozenset[str]) -> frozenset[Any]:
    names = [name for kind in kinds for name in _NAMES.get(kind, ())]
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    # Variants that write into a given tensor are not repeated by giving a result.
    return frozenset(
        getattr(packet, overload)
        for packet in packets
        for overload in packet.overloads()
        if "out" not in overload.split("_")
    )


class KeptResults(KeptOperations):
    """Keeps the results of some operations, in the order of their calls."""

    def __init__(self, operations: Collection[Any]) -> None:
        self._operations = operations
        self._kept: list[tuple[Any, Any]] = []
        self._is_paused = False

    def first(self) -> LocalMode:
        """See `KeptOperations`."""
        return LocalMode(self._keep)

    def again(self) -> LocalMode:
        """See `KeptOperations`."""
        rest = iter(self._kept)
        return LocalMode(lambda func, args, kwargs: self._take(rest, func, args, kwargs))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """See `KeptOperations`."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _keep(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if func in self._operations and not self._is_paused:
            self._kept.append((func, tree_map_only(torch.Tensor, _Versioned, result)))
        return result

    def _take(self, rest: Iterator[tuple[Any, Any]], func: Any, args: Any, kwargs: Any) -> Any:
        if func not in self._operations or self._is_paused:
            return func(*args, **kwargs)
        kept, result = next(rest, (None, None))
        if kept is not func:
            raise RuntimeError(f"{RECOMPUTED_DIFFERENTLY}; {func} came where {kept or 'nothing'} had been kept")
        return tree_map_only(_Versioned, _Versioned.alias, result)


class _Versioned:
    """A result as it was; reading one that has been written since is refused."""

    def __init__(self, result: torch.Tensor) -> None:
        # Without the graph that autograd makes it a part of, which holds this. Torch counts the writes to such an alias
        # together with the result's only if it is told to, below autograd.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._result = result.detach()
        self._version = self._result._version

    def alias(self) -> torch.Tensor:
        """Return a tensor that shares the memory: autograd makes those that it is given part of its graph."""
        if self._result._version != self._version:
            raise RuntimeError(
                f"a kept result of shape {list(self._result.shape)} has been modified in place since; write to a clone "
                "of it, use an operation that is not in place, or keep other kinds of results"
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
    """Mark memory as no activation's: whoever frees and refills it himself would have it freed by nobody else."""
    setattr(storage, _STAYS, True)


class TorchHostCopies(HostCopies):
    """See `HostCopies`."""

    def memory_of(self, x: torch.Tensor) -> tuple[Hashable, int] | None:
        """See `HostCopies`."""
        # A function of the user's that is given DTensors wants them back; anywhere else they are their shards.
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
        """See `HostCopies`."""
        return _Form(x.dtype, x.storage_offset(), tuple(x.shape), x.stride())

    def memory(self, x: torch.Tensor) -> torch.Tensor:
        """See `HostCopies`."""
        storage = x.untyped_storage()
        form = _Form(torch.uint8, 0, (storage.nbytes(),), (1,))
        return _over(storage, form)

    def to_host(self, memory: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        """See `HostCopies`."""
        # Modes that count memory count the device's, also where that is the host.
        with _disable_current_modes(), NoGrad():
            if memory.device.type == "cpu":
                return torch.empty(memory.shape, dtype=torch.uint8).copy_(memory), _nothing
            host = torch.empty(memory.shape, dtype=torch.uint8, pin_memory=True)
            return host, _copy_beside("to host", host, memory)

    def to_device(self, host: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        """See `HostCopies`."""
        with NoGrad(), LocalOperations():
            if not host.is_pinned():
                return torch.empty_like(host).copy_(host), _nothing
            # Of the computation's memory, which it is to be freed to.
            memory = torch.empty(host.shape, dtype=torch.uint8, device=torch.accelerator.current_accelerator())
            return memory, _copy_beside("to device", memory, host)

    def tensor(self, memory: torch.Tensor, form: _Form) -> torch.Tensor:
        """See `HostCopies`."""
        return _over(memory.untyped_storage(), form)


def _over(storage: torch.UntypedStorage, form: _Form) -> torch.Tensor:
    with NoGrad(), LocalOperations():
        tensor = torch.empty(0, dtype=form.dtype, device=storage.device)
        # torch's types do not know this form of `set_`.
        return tensor.set_(storage, form.offset, form.shape, form.strides)  # type: ignore[call-overload, no-any-return]


def _copy_beside(purpose: str, target: torch.Tensor, source: torch.Tensor) -> Wait:
    """Copy between host and device, after what the computation has begun, beside what comes."""
    stream, current = _stream(purpose, torch.accelerator.current_device_index()), torch.accelerator.current_stream()
    stream.wait_stream(current)
    torch.accelerator.set_stream(stream)
    try:
        target.copy_(source, non_blocking=True)
    finally:
        torch.accelerator.set_stream(current)
    # A graph that is dropped frees memory that may still be copied.
    (source if purpose == "to host" else target).record_stream(stream)
    event = stream.record_event()

    def wait() -> None:
        computing = torch.accelerator.current_stream()
        computing.wait_event(event)
        if purpose == "to device":
            # Backward may have begun the copy on the stream of another block.
            target.record_stream(computing)

    return wait


@functools.cache
def _stream(purpose: str, device: int) -> torch.Stream:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None  # the memory that is copied lies on it
    return torch.Stream(torch.device(accelerator.type, device))


def _nothing() -> None:
    """Wait for nothing: a copy within the host is over when it returns."""
