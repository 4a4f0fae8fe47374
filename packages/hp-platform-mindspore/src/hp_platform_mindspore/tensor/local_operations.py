"""The context in which operations see the local data of DTensors."""

from __future__ import annotations

import threading
from types import TracebackType

from mindspore._c_expression import NoFallbackGuard


class _Depth(threading.local):
    value = 0


_depth = _Depth()


class LocalOperations:
    """Context in which operations on DTensors run on their local data and give plain tensors; per thread."""

    __slots__ = ("_guard",)

    def __enter__(self) -> None:
        self._guard = NoFallbackGuard()
        self._guard.__enter__()
        _depth.value += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _depth.value -= 1
        self._guard.__exit__(kind, error, trace)


def is_local() -> bool:
    """Return True inside `LocalOperations` of this thread."""
    return _depth.value > 0
