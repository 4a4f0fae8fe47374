"""Progress of preparing or verifying data: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO

_SECONDS = 10.0


class PreparingProgress:
    """Tells how much of a source has been read, on standard error; nothing where it takes less than a second.

    Args:
        title: the source.
        total: bytes of its files.
        action: said before the title.
    """

    def __init__(self, title: str, total: int, stream: TextIO | None = None, action: str = "preparing") -> None:
        self._title, self._total = f"{action} {title}", max(1, total)
        self._stream = stream if stream is not None else sys.stderr
        self._read = 0
        self._told = self._began = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, size: int) -> None:
        """Note that `size` more bytes have been read."""
        self._read = min(self._total, self._read + size)
        now = time.monotonic()
        if self._stream.isatty():
            self._show(now)
        elif now - self._told >= _SECONDS:
            self._told = now
            print(f"{self._title}: {self._read / self._total:.0%}", file=self._stream, flush=True)

    def _show(self, now: float) -> None:
        if self._bar is None and now - self._began >= 1:
            self._bar = _bar(self._stream)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total)
        if self._bar is not None and now - self._told >= 0.1:
            self._told = now
            self._bar.update(self._task, completed=self._read)


def _bar(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(file=stream),
    )
