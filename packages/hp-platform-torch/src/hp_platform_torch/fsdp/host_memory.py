"""Large buffers in host memory whose memory goes back to the system when they are freed.

An allocator keeps what is freed for the next request that fits. Where buffers of many sizes come and go with every
group of parameters, what it keeps adds up to more than what is in use. The C library maps memory of its own, and unmaps
it at once, only for requests above `MAPPED_BYTES` (glibc's largest threshold), so a smaller buffer asks for as much:
pages that nothing touches take no memory. Huge pages make the others cheap to touch anew.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch

SMALLEST = 2**20  # bytes; below, the allocator's way costs less
MAPPED_BYTES = 2**25 + 2**16

_PAGE = 4096
_MADV_HUGEPAGE = 14


def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised flat tensor in host memory, the only one over its storage."""
    if numel * dtype.itemsize < SMALLEST:
        return torch.empty(numel, dtype=dtype)
    tensor = torch.empty(0, dtype=dtype)
    storage = tensor.untyped_storage()
    refill(storage, numel * dtype.itemsize)
    return tensor.set_(storage, 0, (numel,), (1,))  # type: ignore[call-overload, no-any-return]


def refill(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Give an empty storage at least `nbytes` bytes of uninitialised host memory."""
    if nbytes < SMALLEST:
        storage.resize_(nbytes)
        return
    storage.resize_(max(nbytes, MAPPED_BYTES))
    advise = _advise()
    if advise is not None:
        start = -(-storage.data_ptr() // _PAGE) * _PAGE
        advise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), _MADV_HUGEPAGE)


@functools.cache
def _advise() -> Any:
    """Return `madvise` of the C library, whose refusal only costs speed; None on other systems than Linux."""
    return ctypes.CDLL(None).madvise if sys.platform == "linux" else None
