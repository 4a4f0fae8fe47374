"""Regions of a program in which operations behave in another way, each thread being in its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class ThreadRegion(threading.local):
    """A way to behave that `with` blocks of this thread ask for, of all operations or of single ones.

    Simulated ranks are threads of one process, so a region of one rank must be none of the others.

    Attributes:
        depth: blocks for all operations that this thread is inside of.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._operations: list[str] = []

    @contextlib.contextmanager
    def of_all(self) -> Iterator[None]:
        """Be in the region inside the block."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    @contextlib.contextmanager
    def of(self, operation: str) -> Iterator[None]:
        """Be in the region inside the block for one operation, by its platform-neutral name."""
        self._operations.append(operation)
        try:
            yield
        finally:
            self._operations.remove(operation)

    def has(self, operation: str) -> bool:
        """Return True if this thread is in the region as far as an operation is concerned."""
        return self.depth > 0 or operation in self._operations
