"""Bytes of tensors that a block of code leaves alive, counted by torch's dispatch on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hp_platform_torch.tensor.local_operations import LocalOperations


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations of this thread make inside the block, from there until they are freed.

    Autograd's own backward on the CPU runs in the same thread and is counted too. A view is no storage of its own, nor
    is a tensor that there was before.

    Attributes:
        now: bytes alive.
        peak: the most so far.
    """

    knows_shards = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Below autograd a DTensor is its shard: its own functions would take the operation for one on the whole.
        with LocalOperations():
            self._see((args, kwargs), is_new=False)
            result = func(*args, **kwargs)
            self._see(result, is_new=True)
        return result

    def _see(self, values: Any, *, is_new: bool) -> None:
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
