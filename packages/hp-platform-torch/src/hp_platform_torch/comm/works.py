"""Works: communications under way, which the caller waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hp_dtensor.comm.process_group import DONE, Work

Tensor = torch.Tensor

POLL_SECONDS = 0.0001


class Then:
    """A communication with local work after it: `wait` waits for the first and then calls `finish`, once."""

    def __init__(self, work: Work, finish: Callable[[], object]) -> None:
        self._work = work
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        self._work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Exchange:
    """The sends and receives that one composed collective consists of.

    Gloo matches those of two ranks in the order in which they begin, and one that is let go of under way takes what
    follows with it. So a group keeps them, also those that nobody waits for after an error, and ends them in order.

    Args:
        works: each is waited for once, as gloo's point-to-point works can be.
        unfinished: of the group, in the order in which they began.
        kept: what must live until they are over.
    """

    def __init__(self, works: Sequence[Work], unfinished: list[Exchange], kept: object = None) -> None:
        self._works = list(works)
        self._kept = kept
        self._unfinished = unfinished
        unfinished.append(self)

    def wait(self) -> None:
        while self in self._unfinished:
            self._unfinished[0]._end()
            del self._unfinished[0]

    def _end(self) -> None:
        while self._works:
            self._works[0].wait()
            del self._works[0]
        self._kept = None


class PendingFacts:
    """An all-gather of bytes under way; row `i` of `gathered` `[ranks, bytes]` is that of rank `i`."""

    def __init__(self, work: Any, gathered: Tensor) -> None:
        self._work = work
        self._gathered = gathered

    def wait(self, timeout_seconds: float | None = None) -> list[bytes] | None:
        """Return the bytes of all ranks in rank order, or None if some rank did not answer in time."""
        if timeout_seconds is not None:
            deadline = time.monotonic() + timeout_seconds
            while not self._work.is_completed():
                if time.monotonic() >= deadline:
                    return None
                time.sleep(POLL_SECONDS)
        self._work.wait()
        return [row.tobytes() for row in self._gathered.numpy()]


def settle(work: Work | None, async_op: bool) -> Work:
    """Return `work` to a caller that waits for it later; else wait now and return `DONE`."""
    if async_op and work is not None:
        return work
    if work is not None:
        work.wait()
    return DONE
