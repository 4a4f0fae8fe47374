"""Links of a chosen rate, simulated: all-to-alls of a group take as long as their bytes would."""

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
    """One all-to-all on a slow link; times are `time.perf_counter()`.

    Attributes:
        num_bytes: what this rank sends to others.
        begun: time of the call.
        arrived: time at which the link has carried it, after all that was begun before.
        waited: time at which the caller began to wait for it; 0.0: not yet.

    Example:
        >>> Transfer(num_bytes=100, begun=1.0, arrived=2.0).waited
        0.0
    """

    num_bytes: int
    begun: float
    arrived: float
    waited: float = 0.0


class _Late:
    """A communication that is over when it is, but not before its transfer has arrived."""

    def __init__(self, work: Work, transfer: Transfer) -> None:
        self._work = work
        self._transfer = transfer

    def wait(self) -> None:
        self._transfer.waited = time.perf_counter()
        self._work.wait()
        time.sleep(max(0.0, self._transfer.arrived - time.perf_counter()))


@contextlib.contextmanager
def slow_link(group: ProcessGroup, bytes_per_second: float) -> Iterator[list[Transfer]]:
    """Let all-to-alls of a group take as long as a link of this rate from this rank would, while the rank goes on.

    Transfers follow each other in the order in which they begin. Waiting sleeps, which leaves the processor to others.

    Yields:
        The transfers so far, first begun first: a timeline.

    Example:
        >>> def program():
        ...     group = init_device_mesh("cpu", (2,)).get_group()
        ...     x = platform.ops.ones((2, 250), platform.dtype("float32"))
        ...     with slow_link(group, bytes_per_second=1e5) as timeline:
        ...         all_to_all_rows_data(x, group, [1, 1], [1, 1])
        ...     return timeline[0].num_bytes, round(timeline[0].arrived - timeline[0].begun, 3)
        >>> run_ranks(program, 2)  # 1000 bytes to the other rank
        [(1000, 0.01), (1000, 0.01)]
    """
    original, timeline = group._all_to_all_into, list[Transfer]()

    def slowed(output: Any, x: Any, output_rows: Rows, input_rows: Rows, async_op: bool) -> Work:
        num_bytes = (sum(input_rows) - input_rows[group.rank]) * row_bytes(group.platform, x)
        begun = time.perf_counter()
        free = max(begun, timeline[-1].arrived) if timeline else begun
        timeline.append(Transfer(num_bytes, begun, free + num_bytes / bytes_per_second))
        late = _Late(original(output, x, output_rows, input_rows, async_op), timeline[-1])
        if async_op:
            return late
        late.wait()
        return DONE

    with mock.patch.object(group, "_all_to_all_into", slowed):
        yield timeline
