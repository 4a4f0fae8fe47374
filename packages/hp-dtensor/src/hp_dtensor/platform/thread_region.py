"""`ThreadRegion`: `with` blocks in which operations of the current thread behave differently."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


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
