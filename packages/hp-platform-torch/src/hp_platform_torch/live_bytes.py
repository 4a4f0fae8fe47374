"""Bytes of tensors that a block of code leaves alive, counted by torch's dispatch on any device."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from hp_platform_torch.tensor.torch_operation import LocalMode


@contextlib.contextmanager
def counted_bytes() -> Iterator[LiveBytes]:
    """Count the bytes that operations of this thread allocate inside the block."""
    live = LiveBytes()
    with LocalMode(live.run):
        yield live


class LiveBytes:
    """Counts the storages that operations create, until they are freed.

    Autograd's backward on the CPU runs in the same thread and is counted too. Views and tensors that existed before
    have no new storage.

    Attributes:
        now: live bytes.
        peak: most live bytes so far.
    """

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and count the storages of its results."""
        self._count_unknown((args, kwargs), is_new=False)
        result = func(*args, **kwargs)
        self._count_unknown(result, is_new=True)
        return result

    def _count_unknown(self, values: Any, *, is_new: bool) -> None:
        for storage in _storages(tree_iter(values)):
            key = storage._cdata
            if key in self._known:
                continue
            self._known.add(key)
            num_bytes = storage.nbytes() if is_new else 0
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def _storages(values: Iterable[Any]) -> Iterable[torch.UntypedStorage]:
    return (x.untyped_storage() for x in values if isinstance(x, torch.Tensor))
