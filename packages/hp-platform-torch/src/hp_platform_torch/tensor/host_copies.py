"""Copies in host memory of what torch's autograd saves, by its saved-tensor hooks.

On an accelerator the host's memory is page-locked, and each direction has a stream of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hp_dtensor.platform.autograd import HostCopies, Wait
from hp_platform_torch.tensor.dtensor import TorchDTensor
from hp_platform_torch.tensor.local_operations import LocalOperations, NoGrad, is_intercepting

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
