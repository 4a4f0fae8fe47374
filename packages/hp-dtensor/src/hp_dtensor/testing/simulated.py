"""`run_ranks`: simulated ranks as threads of one process, with collectives in memory."""

from __future__ import annotations

import math
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hp_dtensor.comm.process_group import DONE, PendingBytes, ProcessGroup, Rows, Work
from hp_dtensor.comm.sockets import host_values, put_values, reduce_tensors
from hp_dtensor.comm.world import World, use_world
from hp_dtensor.exceptions import CapabilityError, CollectiveError, LaunchError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform

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


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    platform: Platform | str | None = None,
    *args: Any,
    timeout_seconds: float = 300.0,
) -> list[Any]:
    """Call `fn(*args)` on each simulated rank, and return the results by rank.

    Inside `fn`, `current_world(platform)` is the world of the rank. One rank runs at a time, until it waits for others.

    Args:
        platform: the platform of the tensors, or its name; None: the selected one.
        timeout_seconds: limit for all ranks together.

    Raises:
        LaunchError: a rank raised (its exception is the cause), or the timeout expired. All ranks stop at once.
        CollectiveError: deadlock, or different collectives, shapes or dtypes on the ranks of a group.
        CapabilityError: the framework does not record gradients per thread (MindSpore 2.9).
    """
    if world_size < 1:
        raise LaunchError(f"run_ranks needs at least one rank, got world_size={world_size}")
    job = Job(world_size, get_platform(platform), SimulatedWorld)
    if world_size > 1 and not job.platform.records_by_thread:
        raise CapabilityError(
            f"run_ranks: this version of {job.platform.name} mixes up what threads record for their gradients, and "
            "simulated ranks are threads. Start real ones (hp_dtensor.launch), or take a newer version"
        )
    threads = [
        # Daemons: after a timeout the running rank may never return, and must not keep the interpreter from exiting.
        threading.Thread(target=job.run, args=(rank, fn, args), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    # Each rank restores its own state when it continues, so the caller's is lost unless it is saved here.
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

    def __init__(self, rank: int, job: Job) -> None:
        super().__init__(rank, job.size, job.platform)
        self._job = job

    def _create_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        return SimulatedGroup(ranks, ranks.index(self.rank), self._job)


class SimulatedGroup(ProcessGroup):
    """A group of simulated ranks. The last rank to reach a collective computes it for all."""

    platform: Platform
    backend = "simulated"

    def __init__(self, ranks: tuple[int, ...], rank: int, job: Job) -> None:
        super().__init__(ranks, rank, job.platform)
        self._job = job

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work:
        return self._meet("all_reduce", {"op": op, "tensor": self._kind(x)}, x, all_reduce)

    def _all_gather_into(self, output: Tensor, x: Tensor, async_op: bool) -> Work:
        return self._meet("all_gather", {"tensor": self._kind(x)}, (output, x), all_gather)

    def _reduce_scatter_into(self, output: Tensor, x: Tensor, op: str, async_op: bool) -> Work:
        facts = {"op": op, "tensor": self._kind(x)}
        return self._meet("reduce_scatter", facts, (output, x), reduce_scatter)

    def _all_to_all_into(self, output: Tensor, x: Tensor, output_rows: Rows, input_rows: Rows, async_op: bool) -> Work:
        # The numbers of rows differ by rank, so they are no facts. They are compared pair by pair when all calls are
        # there.
        facts = {"rows of": self._kind(x, x.shape[1:])}
        return self._meet("all_to_all", facts, (output, x, output_rows, input_rows), all_to_all)

    def _exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None:
        # No facts: shapes and dtypes may differ for each pair of ranks, and are compared when all calls are there.
        self._meet("exchange", {}, (tuple(sends), tuple(receives)), exchange)

    def _broadcast(self, x: Tensor, source: int, async_op: bool) -> Work:
        return self._meet("broadcast", {"source": source, "tensor": self._kind(x)}, x, broadcast)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        call = Call("all_gather_bytes", self.ranks, self.rank, {}, data)
        self._job.meet(call, all_gather_bytes)
        everything: list[bytes] = call.result
        return everything

    def _start_all_gather_bytes(self, data: bytes) -> PendingBytes:
        return self._job.post(Call("all_gather_bytes", self.ranks, self.rank, {}, data))

    def _send(self, x: Tensor, target: int, async_op: bool) -> Work:
        # A copy, so that the sender may overwrite `x` at once. A send never blocks, unlike those of some backends.
        values = np.array(self.platform.to_numpy(x))
        call = Call("send", self.ranks, self.rank, {"tensor": self._kind(x)}, values)
        self._job.send(call, target)
        return DONE

    def _receive(self, x: Tensor, source: int, async_op: bool) -> Work:
        call = Call("receive", self.ranks, self.rank, {"tensor": self._kind(x)}, x)
        # The message is chosen now and not in `wait`: receives match sends in the order in which they are posted.
        work = Receiving(call, source, self._job)
        if not async_op:
            work.wait()
        return work

    def _meet(self, name: str, facts: dict[str, Any], payload: Any, complete: Complete) -> Work:
        # `async_op` has no effect: a collective is complete when its call returns. A forgotten `wait` is therefore not
        # noticed here; different orders of calls on the ranks are.
        self._job.meet(Call(name, self.ranks, self.rank, facts, payload), complete)
        return DONE

    def _kind(self, x: Tensor, shape: Sequence[int] | None = None) -> str:
        return describe_tensor(self.platform, x, shape)


Complete = Callable[[Platform, "list[Call]"], None]
Message = tuple[tuple[int, ...], int, int, int]
"""Key of a message: (ranks of the group, sender, receiver, sequence number); sender and receiver are group ranks."""


class Posted:
    """A pending all-gather of bytes."""

    def __init__(self, call: Call, job: Job) -> None:
        self._call = call
        self._job = job

    def wait(self, timeout_seconds: float | None = None) -> list[bytes] | None:
        """Return the bytes of all ranks, or None. A timeout other than 0 expires when no rank can continue."""
        # A timeout of 0 only looks and lets no other rank run, so a loop that only polls would never see a change.
        if not self._is_complete and timeout_seconds != 0:
            self._job.wait_for_post(self._call, is_patient=timeout_seconds is None)
        everything = sorted(self._call.here.items())
        return [call.payload for _, call in everything] if self._is_complete else None

    @property
    def _is_complete(self) -> bool:
        return len(self._call.here) == len(self._call.ranks)


class Receiving:
    """A posted receive: the sender's next message that has no pending receive."""

    def __init__(self, call: Call, source: int, job: Job) -> None:
        self._call = call
        self._job = job
        self._message = job.expect(call, source)
        self._is_over = False

    def wait(self) -> None:
        """Wait until the message is in the tensor of the call. Another shape or dtype raises on all ranks."""
        if not self._is_over:
            self._is_over = True
            self._job.receive(self._call, self._message)


class Aborted(BaseException):
    """Exception that unwinds a rank whose job has failed elsewhere; no `except Exception` may swallow it."""


class Job:
    """Scheduler of one `run_ranks`: the running rank, the calls in which others are blocked, and the first error."""

    def __init__(self, size: int, platform: Platform, make_world: Callable[[int, Job], World]) -> None:
        self.size = size
        self.platform = platform
        self._make_world = make_world
        self.results: list[Any] = [None] * size
        self.error: Exception | None = None
        # Only the running rank touches this state, so it needs no lock.
        self._ended = [False] * size
        self._waits: list[Call | None] = [None] * size
        self._impatient = [False] * size
        # One meeting per group is enough, because a rank blocks in it until all ranks of the group have come. Posts do
        # not block, so several rounds of one group may be open.
        self._meetings: dict[tuple[int, ...], dict[int, Call]] = {}
        self._posts: dict[tuple[tuple[int, ...], int], dict[int, Call]] = {}
        self._num_posted: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)
        self._mail: dict[Message, Call] = {}
        self._num_messages: dict[tuple[str, tuple[int, ...], int, int], int] = defaultdict(int)
        # Plain locks, which another thread may release: a semaphore takes twice the time for each of many turns.
        self._turns = [threading.Lock() for _ in range(size)]
        for turn in self._turns:
            turn.acquire()
        self._states = [platform.rank_state()] * size
        self._running: tuple[int, int] | None = None  # (rank, thread)
        self._finished = threading.Event()

    def serve(self, timeout_seconds: float) -> None:
        """Start the first rank and wait until all have ended."""
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
        """Return the first error and the results, and drop the references: caches of plans keep the job alive."""
        error, results = self.error, self.results
        self.error, self.results, self._states = None, [], []
        return error, results

    def run(self, rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Run one rank's program in its thread, in turn with the others."""
        try:
            self._take_turn(rank)
            with use_world(self._make_world(rank, self)), self.platform.simulated_rank():
                self.results[rank] = fn(*args)
        except Aborted:
            pass
        except BaseException as error:
            # Errors of the ranks that unwind after the first one are consequences.
            if self.error is None:
                what = f"{type(error).__name__}: {error}"
                self.error = LaunchError(f"rank {rank} of {self.size} failed: {what}", rank)
                self.error.__cause__ = error
        finally:
            self._ended[rank] = True
            self._pass_on()

    def meet(self, call: Call, complete: Complete) -> None:
        """Block until every rank of the group has reached this call and `complete` has run for them."""
        if self.error is not None:
            raise Aborted
        calls = self._meetings.setdefault(call.ranks, {})
        calls[call.rank] = call
        call.here = calls
        self._check_agreement(calls)
        if len(calls) == len(call.ranks):
            del self._meetings[call.ranks]
            try:
                with self.platform.no_grad():
                    complete(self.platform, [calls[rank] for rank in range(len(call.ranks))])
            except CollectiveError as error:
                # Every rank of the job must stop, not only this one, which happens to compute for all.
                self.error = error
                raise Aborted from None
            for rank in call.ranks:
                self._waits[rank] = None
            # The calls refer to each other: without this their buffers would live until a garbage collection.
            calls.clear()
        else:
            self._wait(call.ranks[call.rank], call)

    def post(self, call: Call) -> Posted:
        """Post the call's bytes for the other ranks. The n-th posts of all ranks of a group belong together."""
        if self.error is not None:
            raise Aborted
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
        return Posted(call, self)

    def send(self, call: Call, target: int) -> None:
        """Store a message (a host array) for another rank of the group."""
        if self.error is not None:
            raise Aborted
        # The two directions count separately, so that a send and its receive get equal keys whichever comes first.
        message = self._next_message("send", call.ranks, call.rank, target)
        self._mail[message] = call
        receiver = call.ranks[target]
        waiting = self._waits[receiver]
        if waiting is not None and waiting.here.get(call.rank) == message:
            self._waits[receiver] = None

    def expect(self, call: Call, source: int) -> Message:
        """Return the key of the message that this `receive` from the group rank `source` will get."""
        message = self._next_message("receive", call.ranks, source, call.rank)
        # Every other rank counts as present. The sender's entry says which message ends the wait.
        call.here = {i: message if i == source else None for i in range(len(call.ranks))}
        return message

    def receive(self, call: Call, message: Message) -> None:
        """Wait for a message and copy it into the call's tensor."""
        if self.error is not None:
            raise Aborted
        if message not in self._mail:
            self._wait(call.ranks[call.rank], call)
        # Removed, so that the array is freed as soon as it has been received.
        sent = self._mail.pop(message)
        self._check_agreement({sent.rank: Call("receive", sent.ranks, sent.rank, sent.facts, None), call.rank: call})
        values = self.platform.from_bits(sent.payload, call.payload.dtype, self.platform.device_of(call.payload))
        with self.platform.no_grad():
            self.platform.copy_(call.payload, values)

    def _next_message(self, which: str, ranks: tuple[int, ...], source: int, target: int) -> Message:
        # The n-th send from one rank to another meets the n-th receive: messages do not overtake each other.
        number = self._num_messages[which, ranks, source, target]
        self._num_messages[which, ranks, source, target] += 1
        return ranks, source, target, number

    def wait_for_post(self, call: Call, is_patient: bool) -> None:
        """Let other ranks continue until all have posted or, if not patient, until no rank can continue."""
        rank = call.ranks[call.rank]
        self._impatient[rank] = not is_patient
        self._wait(rank, call)
        self._impatient[rank] = False

    def _wait(self, rank: int, call: Call) -> None:
        """Let other ranks run until `call` of this rank can continue."""
        self._waits[rank] = call
        # State that a framework has per process, such as the grad mode, is saved and restored for each rank.
        self._states[rank] = self.platform.rank_state()
        self._pass_on()
        self._take_turn(rank)

    def _take_turn(self, rank: int) -> None:
        """Block until this rank may run, and restore its state of the framework."""
        self._turns[rank].acquire()
        self._running = rank, threading.get_ident()
        self.platform.set_rank_state(self._states[rank])
        if self.error is not None:
            raise Aborted

    def _pass_on(self) -> None:
        """Let the lowest rank that can continue run. After a failure every rank can, to unwind."""
        if all(self._ended):
            self._finished.set()
            return
        # O(ranks) for each switch. Always the lowest rank, so that the order of events is the same in every run.
        can_continue = [self.error is not None or call is None for call in self._waits]
        ready = [rank for rank in range(self.size) if can_continue[rank] and not self._ended[rank]]
        if not ready:
            # There is no clock: a wait with a timeout expires when no other rank can continue.
            ready = [rank for rank in range(self.size) if self._impatient[rank]]
            # One rank at a time: what it does next may let the others continue before their timeouts expire.
            self._waits = [None if rank in ready[:1] else wait for rank, wait in enumerate(self._waits)]
        if not ready:
            lines = [f"\n  rank {rank} {self._where(rank)}" for rank in range(self.size)]
            self.error = CollectiveError(f"no rank can go on:{''.join(lines)}")
            # One rank is enough. It unwinds, and passes the turn on to the next when it has ended.
            ready = [self._ended.index(False)]
        self._turns[ready[0]].release()

    def _check_agreement(self, calls: dict[int, Call]) -> None:
        """Check that ranks call the same collective with the same operands, and stop the job if not."""
        # Checked at each arrival and not when all are there: ranks in different collectives would otherwise be reported
        # as a deadlock.
        first, *others = calls.values()
        if any(call.name != first.name or call.facts != first.facts for call in others):
            lines = [f"\n  rank {call.ranks[call.rank]}: {call.describe()}" for call in calls.values()]
            self.error = CollectiveError(
                f"the ranks of group {first.ranks} came to collectives that do not agree:{''.join(lines)}"
            )
            raise Aborted

    def _where(self, rank: int) -> str:
        """Return in which call a rank is blocked and for whom it waits, for the message of a deadlock."""
        call = self._waits[rank]
        if call is None:
            return "has ended"
        # A receive counts all ranks as present; the sender has the entry with the awaited message.
        is_receive = call.name == "receive"
        missing = [
            str(other)
            for i, other in enumerate(call.ranks)
            if i not in call.here or (is_receive and call.here[i] is not None)
        ]
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        return f"waits in {call.describe()} of group {call.ranks} for {ranks}"

    def _late(self, seconds: float) -> LaunchError:
        """Return the error of a job that did not finish in time, with the stack of the rank that is running."""
        assert self._running is not None
        rank, thread = self._running
        # Only the running rank can be the cause: the others wait for their turn.
        stack = "".join(traceback.format_stack(sys._current_frames().get(thread)))
        return LaunchError(f"the ranks did not finish within {seconds:g} s; rank {rank} is running:\n{stack}", rank)
