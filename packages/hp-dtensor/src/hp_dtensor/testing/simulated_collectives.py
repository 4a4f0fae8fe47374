"""The collectives of simulated ranks, computed for all ranks by the last one to call them, and simulated slow links.

Data is exchanged as host arrays, which every platform has. Reductions use the platform's own arithmetic in rank order,
so that low-precision dtypes round as they do on real ranks. `slow_link` delays all-to-alls by the time that their bytes
would take on a link of a given rate.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from hp_dtensor.comm.process_group import DONE, ProcessGroup, Rows, Work, row_bytes
from hp_dtensor.comm.sockets import host_values, put_values, reduce_tensors
from hp_dtensor.exceptions import CollectiveError
from hp_dtensor.platform.interface import Platform

Tensor = Any


@dataclass(slots=True)
class Call:
    """One rank's call of a collective.

    Attributes:
        facts: operands of the call that must be equal on all ranks, by name.
        payload: the buffers.
        here: the calls of the ranks that have reached the collective, by group rank.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    facts: dict[str, Any]
    payload: Any
    result: Any = None
    here: Mapping[int, Any] = field(default_factory=dict)

    def describe(self) -> str:
        return " ".join([self.name, *(f"{key} {value}" for key, value in self.facts.items())])


def describe_tensor(platform: Platform, x: Tensor, shape: Sequence[int] | None = None) -> str:
    """Return dtype and shape, such as `float32[2, 3]`."""
    return f"{platform.dtype_name(x.dtype)}{list(x.shape if shape is None else shape)}"


# Each of these functions computes one collective: it reads the payloads of all ranks' calls and writes their buffers.


def all_reduce(platform: Platform, calls: list[Call]) -> None:
    # A new tensor, so the payloads may be overwritten in any order.
    total = reduce_tensors(platform, [call.payload for call in calls], calls[0].facts["op"])
    for call in calls:
        platform.copy_(call.payload, total)


def reduce_scatter(platform: Platform, calls: list[Call]) -> None:
    total = reduce_tensors(platform, [call.payload[1] for call in calls], calls[0].facts["op"])
    # Equal chunks of the row-major data are equal chunks along dimension 0.
    parts = np.split(host_values(platform, total), len(calls))
    for call, part in zip(calls, parts, strict=True):
        put_values(platform, call.payload[0], part)


def all_gather(platform: Platform, calls: list[Call]) -> None:
    # A copy of all data before the first output is written: an input may be a view of this rank's part of the output.
    gathered = np.concatenate([host_values(platform, call.payload[1]) for call in calls])
    for call in calls:
        put_values(platform, call.payload[0], gathered)


def all_to_all(platform: Platform, calls: list[Call]) -> None:
    _check_rows(calls)
    # Rows are contiguous, so the chunk for each rank is a range of the flat data. It is copied before any output is
    # written: input and output may share memory.
    sent = [
        np.split(host_values(platform, x).copy(), np.cumsum(rows)[:-1] * math.prod(x.shape[1:]))
        for x, rows in ((call.payload[1], call.payload[3]) for call in calls)
    ]
    for receiver, call in enumerate(calls):
        put_values(platform, call.payload[0], np.concatenate([chunks[receiver] for chunks in sent]))


def exchange(platform: Platform, calls: list[Call]) -> None:
    _check_exchange(platform, calls)
    # All data is copied before any is written: a sent and a received tensor may share memory.
    transfers = [
        (calls[target].payload[1][source], host_values(platform, calls[source].payload[0][target]).copy())
        for source in range(len(calls))
        for target in range(len(calls))
        if source != target and not _is_nothing(calls[source].payload[0][target])
    ]
    for into, data in transfers:
        put_values(platform, into, data)


def broadcast(platform: Platform, calls: list[Call]) -> None:
    source = calls[calls[0].facts["source"]].payload
    for call in calls:
        # A copy onto itself would count as a write, and would invalidate values that autograd has saved.
        if call.payload is not source:
            platform.copy_(call.payload, source)


def all_gather_bytes(platform: Platform, calls: list[Call]) -> None:
    everything = [call.payload for call in calls]
    for call in calls:
        # A list of its own for each rank, as separate processes have.
        call.result = list(everything)


def _is_nothing(x: Tensor | None) -> bool:
    # Both sides skip empty messages, so one side may pass None where the other passes an empty tensor.
    return x is None or math.prod(x.shape) == 0


def _check_rows(calls: list[Call]) -> None:
    """Check that all pairs of ranks agree on their rows. Real backends would hang or overwrite memory."""
    problems = [
        f"\n  rank {sender.ranks[i]} sends {sender.payload[3][j]} rows to rank {receiver.ranks[j]}, "
        f"which expects {receiver.payload[2][i]}"
        for i, sender in enumerate(calls)
        for j, receiver in enumerate(calls)
        # O(ranks ** 2) comparisons, which only simulated ranks can make: here all tables are in one process.
        if sender.payload[3][j] != receiver.payload[2][i]
    ]
    if problems:
        raise CollectiveError(f"the splits of all_to_all in group {calls[0].ranks} do not agree:{''.join(problems)}")


def _check_exchange(platform: Platform, calls: list[Call]) -> None:
    """Check that all pairs of ranks agree on what they exchange."""

    def kind(x: Tensor | None) -> str:
        return "nothing" if x is None or _is_nothing(x) else describe_tensor(platform, x)

    pairs = [
        (i, j, kind(calls[i].payload[0][j]), kind(calls[j].payload[1][i]))
        for i in range(len(calls))
        for j in range(len(calls))
        if i != j
    ]
    ranks = calls[0].ranks
    problems = [
        f"\n  rank {ranks[i]} sends {sent} to rank {ranks[j]}, which expects {expected}"
        for i, j, sent, expected in pairs
        if sent != expected
    ]
    if problems:
        raise CollectiveError(f"exchange in group {ranks} does not agree:{''.join(problems)}")


@dataclass
class Transfer:
    """One all-to-all on a simulated slow link. Times are those of `time.perf_counter()`.

    Attributes:
        num_bytes: bytes that this rank sends to other ranks.
        started: time of the call.
        arrived: end of the transfer on the link, which carries one transfer at a time.
        waited: start of the caller's wait; 0.0: not yet.

    Examples:
        >>> Transfer(num_bytes=100, started=1.0, arrived=2.0).waited
        0.0
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

    Examples:
        >>> def program():
        ...     group = init_device_mesh("cpu", (2,)).get_group()
        ...     x = platform.ops.ones((2, 250), platform.dtype("float32"))
        ...     with slow_link(group, bytes_per_second=1e5) as timeline:
        ...         all_to_all_rows_data(x, group, [1, 1], [1, 1])
        ...     return timeline[0].num_bytes, round(timeline[0].arrived - timeline[0].started, 3)
        >>> run_ranks(program, 2)  # 1000 bytes to the other rank
        [(1000, 0.01), (1000, 0.01)]
    """
    original, timeline = group._all_to_all_into, list[Transfer]()

    def slowed(output: Any, x: Any, output_rows: Rows, input_rows: Rows, async_op: bool) -> Work:
        # Rows of this rank to itself do not use the link.
        num_bytes = (sum(input_rows) - input_rows[group.rank]) * row_bytes(group.platform, x)
        started = time.perf_counter()
        free = max(started, timeline[-1].arrived) if timeline else started
        timeline.append(Transfer(num_bytes, started, free + num_bytes / bytes_per_second))
        # The data itself is communicated now. Only the wait is delayed, so results are those of the fast link.
        late = _Late(original(output, x, output_rows, input_rows, async_op), timeline[-1])
        if async_op:
            return late
        late.wait()
        return DONE

    # Patched on the object: other groups of this rank keep their speed.
    with mock.patch.object(group, "_all_to_all_into", slowed):
        yield timeline
