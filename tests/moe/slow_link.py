"""Simulated slow links for all-to-alls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from hp_dtensor.comm.process_group import DONE, ProcessGroup, Rows, Work, row_bytes


@dataclass
class Transfer:
    """One all-to-all on a simulated slow link. Times are those of `time.perf_counter()`.

    Attributes:
        num_bytes: bytes that this rank sends to other ranks.
        started: time of the call.
        arrived: end of the transfer on the link, which carries one transfer at a time.
        waited: start of the caller's wait; 0.0: not yet.
    """

    num_bytes: int
    started: float
    arrived: float
    waited: float = 0.0


class _Late:
    """Work that completes when the wrapped work and the transfer on the slow link are both complete."""

    def __init__(self, work: Work, transfer: Transfer) -> None:
        self._work = work
        self._transfer = transfer

    def wait(self) -> None:
        self._transfer.waited = time.perf_counter()
        self._work.wait()
        time.sleep(max(0.0, self._transfer.arrived - time.perf_counter()))


@contextlib.contextmanager
def slow_link(group: ProcessGroup, bytes_per_second: float) -> Iterator[list[Transfer]]:
    """Delay the all-to-alls of a group as a link of the given rate would, asynchronously to this rank's computation.

    Transfers run one after the other in the order of their calls. A wait sleeps, so other processes can compute.

    Yields:
        The list of transfers so far, in the order of their calls.
    """
    original, timeline = group._all_to_all_into, list[Transfer]()

    def slowed(output: Any, x: Any, output_rows: Rows, input_rows: Rows, async_op: bool, *indices: Any) -> Work:
        # Rows of this rank to itself do not use the link.
        num_bytes = (sum(input_rows) - input_rows[group.rank]) * row_bytes(group.platform, x)
        started = time.perf_counter()
        free = max(started, timeline[-1].arrived) if timeline else started
        timeline.append(Transfer(num_bytes, started, free + num_bytes / bytes_per_second))
        # The data itself is communicated now. Only the wait is delayed, so results are those of the fast link.
        late = _Late(original(output, x, output_rows, input_rows, async_op, *indices), timeline[-1])
        if async_op:
            return late
        late.wait()
        return DONE

    # Patched on the object: other groups of this rank keep their speed.
    with mock.patch.object(group, "_all_to_all_into", slowed):
        yield timeline
