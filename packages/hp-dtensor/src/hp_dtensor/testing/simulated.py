"""Simulated ranks: threads of one process of which one runs at a time, with collectives in memory.

A rank runs until it meets a collective that others have not reached; then the lowest rank that can go on
does. So runs are deterministic, and a deadlock is found the moment it happens: no rank can go on.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hp_dtensor.comm.world import DONE, PendingBytes, ProcessGroup, Work, World, use_world
from hp_dtensor.exceptions import CapabilityError, CollectiveError, LaunchError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform

Tensor = Any


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    platform: Platform | str | None = None,
    *args: Any,
    timeout_seconds: float = 300.0,
) -> list[Any]:
    """Call `fn(*args)` on each rank, every one with its own `current_world(platform)`; results by rank.

    Args:
        platform: whose tensors the collectives take; a name, or None for the selected platform.
        timeout_seconds: how long all ranks together may take.

    Raises:
        LaunchError: a rank raised (its exception is the cause), or the time is up. All ranks stop at once.
        CollectiveError: ranks wait for each other, or their collectives, shapes or dtypes do not agree.
        CapabilityError: the framework mixes up what threads record (MindSpore 2.9).
    """
    if world_size < 1:
        raise LaunchError(f"run_ranks needs at least one rank, got world_size={world_size}")
    job = _Job(world_size, get_platform(platform))
    if world_size > 1 and not job.platform.records_by_thread:
        raise CapabilityError(
            f"run_ranks: this version of {job.platform.name} mixes up what threads record for their gradients, and "
            "simulated ranks are threads. Start real ones (hp_dtensor.launch), or take a newer version"
        )
    threads = [
        threading.Thread(target=job.run, args=(rank, fn, args), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    before = job.platform.rank_state()
    for thread in threads:
        thread.start()
    try:
        job.serve(timeout_seconds)
    finally:
        job.platform.set_rank_state(before)
    for thread in threads:
        thread.join()
    error, results = job.close()
    if error is not None:
        raise error
    return results


class SimulatedWorld(World):
    """The world of one simulated rank."""

    def __init__(self, rank: int, job: _Job) -> None:
        super().__init__(rank, job.size, job.platform)
        self._job = job

    def _create_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        return SimulatedGroup(ranks, ranks.index(self.rank), self._job)


class SimulatedGroup(ProcessGroup):
    """A group of simulated ranks; the last rank to come to a collective does it for all."""

    platform: Platform
    backend = "simulated"

    def __init__(self, ranks: tuple[int, ...], rank: int, job: _Job) -> None:
        super().__init__(ranks, rank, job.platform)
        self._job = job

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work:
        return self._meet("all_reduce", {"op": op, "tensor": self._kind(x)}, x, _all_reduce)

    def _all_gather_into(self, output: Tensor, x: Tensor, async_op: bool) -> Work:
        return self._meet("all_gather", {"tensor": self._kind(x)}, (output, x), _all_gather)

    def _reduce_scatter_into(self, output: Tensor, x: Tensor, op: str, async_op: bool) -> Work:
        facts = {"op": op, "tensor": self._kind(x)}
        return self._meet("reduce_scatter", facts, (output, x), _reduce_scatter)

    def _all_to_all_into(
        self,
        output: Tensor,
        x: Tensor,
        output_rows: tuple[int, ...],
        input_rows: tuple[int, ...],
        async_op: bool,
    ) -> Work:
        facts = {"rows of": self._kind(x, x.shape[1:])}
        return self._meet("all_to_all", facts, (output, x, output_rows, input_rows), _all_to_all)

    def _exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None:
        self._meet("exchange", {}, (tuple(sends), tuple(receives)), _exchange)

    def _broadcast(self, x: Tensor, source: int, async_op: bool) -> Work:
        return self._meet("broadcast", {"source": source, "tensor": self._kind(x)}, x, _broadcast)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        call = _Call("all_gather_bytes", self.ranks, self.rank, {}, data)
        self._job.meet(call, _all_gather_bytes)
        everything: list[bytes] = call.result
        return everything

    def _start_all_gather_bytes(self, data: bytes) -> PendingBytes:
        return self._job.post(_Call("all_gather_bytes", self.ranks, self.rank, {}, data))

    def _meet(self, name: str, facts: dict[str, Any], payload: Any, complete: _Complete) -> Work:
        self._job.meet(_Call(name, self.ranks, self.rank, facts, payload), complete)
        return DONE

    def _kind(self, x: Tensor, shape: Sequence[int] | None = None) -> str:
        return describe_tensor(self.platform, x, shape)


def describe_tensor(platform: Platform, x: Tensor, shape: Sequence[int] | None = None) -> str:
    """Dtype and shape, such as `float32[2, 3]`."""
    return f"{platform.dtype_name(x.dtype)}{list(x.shape if shape is None else shape)}"


@dataclass(slots=True)
class _Call:
    """One rank inside a collective: what must agree between ranks, and its buffers."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    facts: dict[str, Any]
    payload: Any
    result: Any = None
    here: Mapping[int, Any] = field(default_factory=dict)

    def describe(self) -> str:
        return " ".join([self.name, *(f"{key} {value}" for key, value in self.facts.items())])


_Complete = Callable[[Platform, "list[_Call]"], None]


class _Posted:
    """Bytes of every rank under way."""

    def __init__(self, call: _Call, job: _Job) -> None:
        self._call = call
        self._job = job

    def wait(self, timeout_seconds: float | None = None) -> list[bytes] | None:
        """A time that is not 0 is over when no rank can go on."""
        if not self._is_complete and timeout_seconds != 0:
            self._job.wait_for_post(self._call, is_patient=timeout_seconds is None)
        everything = sorted(self._call.here.items())
        return [call.payload for _, call in everything] if self._is_complete else None

    @property
    def _is_complete(self) -> bool:
        return len(self._call.here) == len(self._call.ranks)


class _Aborted(BaseException):
    """Unwinds a rank whose job has failed elsewhere; no `except Exception` may swallow it."""


class _Job:
    """The ranks of one `run_ranks`: who has the baton, who waits where, and what went wrong first."""

    def __init__(self, size: int, platform: Platform) -> None:
        self.size = size
        self.platform = platform
        self.results: list[Any] = [None] * size
        self.error: Exception | None = None
        self._ended = [False] * size
        self._waits: list[_Call | None] = [None] * size
        self._impatient = [False] * size
        self._meetings: dict[tuple[int, ...], dict[int, _Call]] = {}
        self._posts: dict[tuple[tuple[int, ...], int], dict[int, _Call]] = {}
        self._num_posted: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._states = [platform.rank_state()] * size
        self._running: tuple[int, int] | None = None  # (rank, thread)
        self._finished = threading.Event()

    def serve(self, timeout_seconds: float) -> None:
        """Give the first rank the baton and wait until it has gone through all of them."""
        self._pass_on()
        try:
            in_time = self._finished.wait(timeout_seconds)
        except BaseException:
            self.error = LaunchError("interrupted")
            raise
        if not in_time:
            self.error = self._late(timeout_seconds)
            raise self.error

    def close(self) -> tuple[Exception | None, list[Any]]:
        """What came of it, kept here no longer: caches of plans know meshes, and so this job, for a long time."""
        error, results = self.error, self.results
        self.error, self.results, self._states = None, [], []
        return error, results

    def run(self, rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """The life of one rank's thread."""
        try:
            self._take_turn(rank)
            with use_world(SimulatedWorld(rank, self)):
                self.results[rank] = fn(*args)
        except _Aborted:
            pass
        except BaseException as error:
            self._fail(rank, error)
        finally:
            self._ended[rank] = True
            self._pass_on()

    def meet(self, call: _Call, complete: _Complete) -> None:
        """Return when every rank of the group has come to this call and `complete` has run for them."""
        if self.error is not None:
            raise _Aborted
        calls = self._meetings.setdefault(call.ranks, {})
        calls[call.rank] = call
        call.here = calls
        self._check_agreement(calls)
        if len(calls) == len(call.ranks):
            del self._meetings[call.ranks]
            self._complete([calls[rank] for rank in range(len(call.ranks))], complete)
            for rank in call.ranks:
                self._waits[rank] = None
        else:
            self._wait(call.ranks[call.rank], call)

    def post(self, call: _Call) -> _Posted:
        """Leave the call's bytes for the other ranks, whose posts meet in their order."""
        if self.error is not None:
            raise _Aborted
        round_ = self._num_posted[call.ranks, call.rank]
        self._num_posted[call.ranks, call.rank] += 1
        calls = self._posts.setdefault((call.ranks, round_), {})
        calls[call.rank] = call
        call.here = calls
        if len(calls) == len(call.ranks):
            del self._posts[call.ranks, round_]
            for other in calls.values():
                if self._waits[call.ranks[other.rank]] is other:
                    self._waits[call.ranks[other.rank]] = None
        return _Posted(call, self)

    def wait_for_post(self, call: _Call, is_patient: bool) -> None:
        """Let other ranks go on until all have posted; not patient: or until nobody can go on."""
        rank = call.ranks[call.rank]
        self._impatient[rank] = not is_patient
        self._wait(rank, call)
        self._impatient[rank] = False

    def _complete(self, calls: list[_Call], complete: _Complete) -> None:
        try:
            with self.platform.no_grad():
                complete(self.platform, calls)
        except CollectiveError as error:
            self.error = error
            raise _Aborted from None

    def _wait(self, rank: int, call: _Call) -> None:
        self._waits[rank] = call
        self._states[rank] = self.platform.rank_state()
        self._pass_on()
        self._take_turn(rank)

    def _take_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        self._running = rank, threading.get_ident()
        self.platform.set_rank_state(self._states[rank])
        if self.error is not None:
            raise _Aborted

    def _pass_on(self) -> None:
        """Hand the baton to the lowest rank that can go on; after a failure every rank can, to unwind."""
        if all(self._ended):
            self._finished.set()
            return
        ready = [rank for rank in range(self.size) if not self._ended[rank] and self._can_go_on(rank)]
        if not ready:
            ready = [rank for rank in range(self.size) if self._impatient[rank]]
            self._waits = [None if rank in ready[:1] else wait for rank, wait in enumerate(self._waits)]
        if not ready:
            self.error = CollectiveError(self._stuck())
            ready = [self._ended.index(False)]
        self._turns[ready[0]].release()

    def _can_go_on(self, rank: int) -> bool:
        return self.error is not None or self._waits[rank] is None

    def _fail(self, rank: int, error: BaseException) -> None:
        if self.error is None:
            what = f"{type(error).__name__}: {error}"
            self.error = LaunchError(f"rank {rank} of {self.size} failed: {what}", rank)
            self.error.__cause__ = error

    def _check_agreement(self, calls: dict[int, _Call]) -> None:
        first, *others = calls.values()
        if any(call.name != first.name or call.facts != first.facts for call in others):
            lines = [f"\n  rank {call.ranks[call.rank]}: {call.describe()}" for call in calls.values()]
            self.error = CollectiveError(
                f"the ranks of group {first.ranks} came to collectives that do not agree:{''.join(lines)}"
            )
            raise _Aborted

    def _stuck(self) -> str:
        lines = [f"\n  rank {rank} {self._where(rank)}" for rank in range(self.size)]
        return f"no rank can go on:{''.join(lines)}"

    def _where(self, rank: int) -> str:
        call = self._waits[rank]
        if call is None:
            return "has ended"
        missing = [other for i, other in enumerate(call.ranks) if i not in call.here]
        return f"waits in {call.describe()} of group {call.ranks} for {_ranks(missing)}"

    def _late(self, seconds: float) -> LaunchError:
        assert self._running is not None
        rank, thread = self._running
        stack = "".join(traceback.format_stack(sys._current_frames().get(thread)))
        return LaunchError(f"the ranks did not finish within {seconds:g} s; rank {rank} is running:\n{stack}", rank)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# The collectives. Data moves as host arrays, which every platform has; reductions use the platform's own
# arithmetic, in rank order, so that low-precision dtypes round as they do on real ranks.


def _all_reduce(platform: Platform, calls: list[_Call]) -> None:
    total = _reduce(platform, [call.payload for call in calls], calls[0].facts["op"])
    for call in calls:
        platform.copy_(call.payload, total)


def _reduce_scatter(platform: Platform, calls: list[_Call]) -> None:
    total = _reduce(platform, [call.payload[1] for call in calls], calls[0].facts["op"])
    parts = np.split(_flat(platform, total), len(calls))
    for call, part in zip(calls, parts, strict=True):
        _put(platform, call.payload[0], part)


def _all_gather(platform: Platform, calls: list[_Call]) -> None:
    whole = np.concatenate([_flat(platform, call.payload[1]) for call in calls])
    for call in calls:
        _put(platform, call.payload[0], whole)


def _all_to_all(platform: Platform, calls: list[_Call]) -> None:
    _check_rows(calls)
    sent = [_pieces(platform, call.payload[1], call.payload[3]) for call in calls]
    for receiver, call in enumerate(calls):
        _put(platform, call.payload[0], np.concatenate([pieces[receiver] for pieces in sent]))


def _exchange(platform: Platform, calls: list[_Call]) -> None:
    _check_exchange(platform, calls)
    moves = [
        (calls[target].payload[1][source], _flat(platform, calls[source].payload[0][target]).copy())
        for source in range(len(calls))
        for target in range(len(calls))
        if source != target and not _is_nothing(calls[source].payload[0][target])
    ]
    for into, data in moves:
        _put(platform, into, data)


def _broadcast(platform: Platform, calls: list[_Call]) -> None:
    source = calls[calls[0].facts["source"]].payload
    for call in calls:
        if call.payload is not source:
            platform.copy_(call.payload, source)


def _all_gather_bytes(platform: Platform, calls: list[_Call]) -> None:
    everything = [call.payload for call in calls]
    for call in calls:
        call.result = list(everything)


def _reduce(platform: Platform, tensors: list[Tensor], op: str) -> Tensor:
    ops = platform.ops
    pairwise = {"max": ops.maximum, "min": ops.minimum, "product": ops.mul}.get(op, ops.add)
    total = functools.reduce(pairwise, tensors)
    return ops.div(total, len(tensors)) if op == "avg" else total


def _flat(platform: Platform, x: Tensor) -> np.ndarray:
    return np.asarray(platform.to_numpy(x)).reshape(-1)


def _put(platform: Platform, output: Tensor, flat: np.ndarray) -> None:
    values = platform.from_bits(flat.reshape(tuple(output.shape)), output.dtype, platform.device_of(output))
    platform.copy_(output, values)


def _pieces(platform: Platform, x: Tensor, rows: Sequence[int]) -> list[np.ndarray]:
    row = math.prod(x.shape[1:])
    ends = np.cumsum(rows)[:-1] * row
    return np.split(_flat(platform, x), ends)


def _is_nothing(x: Tensor | None) -> bool:
    return x is None or math.prod(x.shape) == 0


def _check_rows(calls: list[_Call]) -> None:
    problems = [
        f"\n  rank {sender.ranks[i]} sends {sender.payload[3][j]} rows to rank {receiver.ranks[j]}, "
        f"which expects {receiver.payload[2][i]}"
        for i, sender in enumerate(calls)
        for j, receiver in enumerate(calls)
        if sender.payload[3][j] != receiver.payload[2][i]
    ]
    if problems:
        raise CollectiveError(f"the splits of all_to_all in group {calls[0].ranks} do not agree:{''.join(problems)}")


def _check_exchange(platform: Platform, calls: list[_Call]) -> None:
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
