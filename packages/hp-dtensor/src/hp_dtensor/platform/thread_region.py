"""`ThreadRegion`: `with` blocks in which operations of the current thread behave differently, or are watched."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

Note = Callable[[str, Any], None]


class ThreadRegion(threading.local):
    """A mode that `with` blocks enable for this thread, for all operations or for single ones.

    It is thread-local because simulated ranks are threads of one process.

    Attributes:
        depth: number of blocks for all operations that this thread is inside of.
    """

    def __init__(self) -> None:
        # `threading.local` calls this in every thread that uses the object: a thread started inside a block does not
        # inherit the mode.
        self.depth = 0
        self._operations: list[str] = []

    @contextlib.contextmanager
    def of_all(self) -> Iterator[None]:
        """Enable the mode inside the block."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    @contextlib.contextmanager
    def of(self, operation: str) -> Iterator[None]:
        """Enable the mode inside the block for one operation, by its platform-neutral name."""
        # A list and not a set: blocks for one operation may be nested.
        self._operations.append(operation)
        try:
            yield
        finally:
            # Removes one occurrence, so an outer block for the same operation stays in effect.
            self._operations.remove(operation)

    def has(self, operation: str) -> bool:
        """Return whether the mode is enabled for an operation."""
        return self.depth > 0 or operation in self._operations


class _Watching(threading.local):
    notes: tuple[Note, ...] = ()


_watching = _Watching()
_installing = threading.Lock()


class _Watched:
    """A function whose calls are reported to the notes of the `watching` blocks that its thread is in."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        notes = _watching.notes
        if not notes:
            return self._function(*args, **kwargs)
        # Calls within this one, and within the notes, are not reported.
        _watching.notes = ()
        try:
            result = self._function(*args, **kwargs)
            for note in notes:
                note(self._name, result)
        finally:
            _watching.notes = notes
        return result


@contextlib.contextmanager
def watching(ops: SimpleNamespace, note: Note) -> Iterator[None]:
    """Call `note(name, result)` after each function of `ops` that this thread calls inside the block."""
    # Not undone at the end of the block, because other threads may be in blocks of their own. Outside of blocks, a call
    # costs one look-up more.
    with _installing:
        for name, function in list(vars(ops).items()):
            if not isinstance(function, _Watched):
                setattr(ops, name, _Watched(name, function))
    before, _watching.notes = _watching.notes, (*_watching.notes, note)
    try:
        yield
    finally:
        _watching.notes = before
