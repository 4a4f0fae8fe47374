"""`ReplacedRanks`: ranks of which those that die are replaced while the others keep their processes.

The parent serves the meeting point of each generation of ranks, so that any rank may die, rank 0 too. When one has
died, the parent starts a process in its place and sends the survivors a `Leave`. Their collectives fail, because the
kernel closes the connections of the dead process. They close their own, at which further survivors fail. When all have
left, and the newcomers have imported their framework, all meet again. A death at any point starts the next generation.

Without newcomers, those survivors meet again that can go on alone, such as the complete replicas of a model, and are
numbered again. A process has its slot, its rank in generation 0, for its lifetime. The other survivors wait until the
generation has met, since a further death may need them, and are then ended.

On a platform whose processes join a job only once, all ranks are newcomers of the next generation. The parent holds
files in memory for them, in which their state outlives their processes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.exceptions import CapabilityError, LaunchError
from hp_dtensor.launch.local_ranks import (
    SILENT_STATES,
    STOPPED,
    LocalRanks,
    Process,
    interrupts_blocked,
)
from hp_dtensor.launch.rank_process import (
    HOST,
    Generation,
    Imported,
    Joined,
    Leave,
    Left,
    Lost,
    Meet,
    Run,
    Stay,
    free_address,
)
from hp_dtensor.platform.selection import get_platform

_POLL_SECONDS = 0.5
# Time in which the end of a rank is seen that made a collective of another one fail.
_VERDICT_SECONDS = 3.0
# Time for ranks to leave after others have waited for their full timeout.
_HUNG_SECONDS = 30.0
_FILES_OF_RANK = 2
_HANG = "a rank has waited for the full timeout of a collective"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Replacement:
    """Rules for the replacement of ranks that die.

    Attributes:
        most: number of deaths in a run after each of which the dead ranks are replaced; a lost machine counts as one
            death. After a further one fewer ranks go on, or all meet once more to save their state
            (`Generation.is_last`).
        stopped_seconds: time after which a rank that is stopped, as by SIGSTOP, is killed and replaced.
        report: called with messages for the user.
        spares: number of idle processes on each machine that have imported the program, so that they replace a dead
            rank at once. RANK and LOCAL_RANK are -1 in them until then. Where all ranks start again after a death, each
            takes one.
        node_seconds: time to wait for another machine in place of a lost one, and for the process that replaces a dead
            rank.
        remaining: `remaining(size, dead)` returns the ranks that go on without newcomers, in the order of their new
            ranks; empty: they cannot go on. The others are ended.
    """

    most: int
    stopped_seconds: float = 10.0
    report: Callable[[str], None] = print
    spares: int = 0
    node_seconds: float = 300.0
    remaining: Callable[[int, Collection[int]], Sequence[int]] = lambda size, dead: ()


@dataclass(slots=True)
class ReplacedRanks(LocalRanks):
    """Ranks of one job, of which those that die are replaced. After a failed collective they call `next_generation`."""

    replacement: Replacement = field(default_factory=lambda: Replacement(0))
    _generation: Generation = field(default_factory=Generation)
    _check: Callable[[], None] = lambda: None
    _close: Callable[[], None] = lambda: None
    _num_deaths: int = 0
    # The slot of each rank, and the number of slots of a machine.
    _slots: list[int] = field(default_factory=list)
    _slots_of_machine: int = 0
    # Ranks whose processes have not joined yet, and those that have died and were not replaced.
    _joining: set[int] = field(default_factory=set)
    _gone: set[int] = field(default_factory=set)
    # A newcomer has not come in time.
    _is_late: bool = False
    _spares: list[Process] = field(default_factory=list)
    _stopped_since: dict[int, float] = field(default_factory=dict)
    # Descriptors of the files in memory, those of one rank after the other; none if survivors keep their processes.
    _memory: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._slots = list(range(self.size))
        self._slots_of_machine = self.size // self.num_nodes

    @property
    def _local_size(self) -> int:
        return self._slots_of_machine

    def _start(self, check: Callable[[], None]) -> None:
        self._check = check
        if self.output.terminal:
            # A process without a terminal may have closed them.
            with contextlib.suppress(OSError):
                self._terminal = os.dup(1), os.dup(2)
        try:
            # Asked of the ranks: on such a platform this process needs no framework, which would also change the
            # variables that decide whether ranks can be forked.
            if any(each.joins_once for each in self._import_frameworks(check)):
                self._memory = self._make_memory()
            self._generation = self._next(0, range(self.size))
            self._invite(range(self.size))
            self._collect(self._processes, self.timeout_seconds)
        except BaseException:
            self.terminate()
            self._close()
            raise

    def run(self, target: str, args: tuple[Any, ...], timeout_seconds: float | None) -> list[Any]:
        """Run the function named `target` on every rank, replacing ranks that die, and return the results by rank."""
        request = Run(target, pickle.dumps(args))
        try:
            self._send_all(request)
            self._start_spares(request)
            return self._supervise(request)
        except BaseException:
            self.terminate()
            raise
        finally:
            self._close()

    def _supervise(self, request: Run) -> list[Any]:
        answers: dict[int, Any] = {}
        lost: dict[int, Lost] = {}
        lost_at = 0.0
        while len(answers) < self.size:
            # Before reading, so that a late parent has seen all deaths until then.
            is_decided = bool(lost) and time.monotonic() - lost_at > _VERDICT_SECONDS
            for process, message in self._messages(_POLL_SECONDS):
                if isinstance(message, Lost):
                    lost_at = lost_at if lost else time.monotonic()
                    lost[process.rank] = message
                elif not isinstance(message, Imported | Left | Joined):
                    answers[process.rank] = message
            self._kill_stopped()
            dead = self._dead()
            hung = any(each.hung for each in lost.values())
            # A rank that has returned cannot take part in a further generation.
            if (dead or hung) and answers:
                raise self._error()
            if is_decided and not hung and not dead:
                self._send_to(lost, Stay())
                lost.clear()
            if dead or hung:
                self._replace(dead, request, _HUNG_SECONDS if not dead else self.timeout_seconds)
                lost.clear()
        return [answers[rank] for rank in range(self.size)]

    def _replace(self, dead: list[Process], request: Run, seconds: float) -> None:
        """Form the next generation, with newcomers for the dead ranks and those that do not answer in time."""
        lost_at, newcomers, reasons, lacks_node = time.monotonic(), set[int](), list[str](), False
        last_met = self._generation.number
        # A hang counts as one death, that of the rank which is then killed.
        num_counted = 0 if dead else 1
        self._num_deaths += num_counted
        while True:
            # Ranks that a stop signal has ended are not replaced.
            self._check()
            self._count_deaths(dead, num_counted, last_met)
            num_counted = 0 if dead else num_counted
            self._close()
            reasons += [self._describe(process) for process in dead]
            members, lacks_node, is_last = self._choose_members(lacks_node)
            is_smaller = len(members) < self.size
            fresh = set(members) if self._memory else set(() if is_smaller else self._gone)
            self._report(dead, members, reasons)
            newcomers |= fresh
            self._joining |= fresh
            self._generation = self._next(
                self._generation.number + 1,
                members,
                newcomers=tuple(new for new, rank in enumerate(members) if rank in newcomers),
                lost_at=lost_at,
                reason="; ".join(reasons),
                is_last=is_last,
                lacks_node=lacks_node,
            )
            dead = self._meet(members, fresh, seconds)
            if not dead:
                break
        self._joining.clear()
        self._send_to(newcomers & set(members), request)
        if is_smaller:
            self._go_on_with(members)
        self._start_spares(request)

    def _count_deaths(self, dead: list[Process], num_counted: int, last_met: int) -> None:
        """Count the deaths but for `num_counted`, and raise if no generation after the one that met last is allowed."""
        num_uncounted = max(0, self._count(dead) - num_counted)
        self._num_deaths += num_uncounted
        self._gone |= {process.rank for process in dead}
        # Ranks that were killed because they hung do not end the generation that starts without them. Only now is it
        # known whether others can go on.
        can_go_on = self._generation.number > last_met and self._remaining()
        if self._generation.is_last and (num_uncounted or not dead) and not can_go_on:
            raise self._exhausted()

    def _choose_members(self, lacks_node: bool) -> tuple[Sequence[int], bool, bool]:
        """Return the next generation's ranks, whether a machine is missing, and whether it is the last generation."""
        is_over = self._num_deaths > self.replacement.most
        remaining = self._remaining() if is_over or lacks_node or self._is_late else ()
        # Once: a lost machine that was not replaced in time then shares the place of another one.
        if not remaining and not lacks_node and not self._find_nodes():
            lacks_node, remaining = True, self._remaining()
        self._is_late = False
        return remaining or range(self.size), lacks_node, (lacks_node or is_over) and not remaining

    def _meet(self, members: Sequence[int], fresh: set[int], seconds: float) -> list[Process]:
        """Let the members form the new generation, and return the ranks that have died meanwhile."""
        number = self._generation.number
        self._leave(number, fresh)
        # A stop signal may have come while no rank was there to get it.
        self._check()
        dead = self._await(number, Left, members, fresh, seconds)
        if not dead:
            self._invite(members)
            dead = self._await(number, Joined, members, (), seconds)
        return dead

    def _leave(self, number: int, fresh: set[int]) -> None:
        """Make all ranks leave the present generation, and start those of `fresh` again."""
        # All at once, before any is waited for.
        for rank in set(range(self.size)) - self._gone if self._memory else ():
            self._kill(self._processes[rank])
            self._gone.add(rank)
        # Before the newcomers are started, which takes a while.
        self._send_to((rank for rank in range(self.size) if rank not in fresh | self._gone), Leave(number))
        for rank in sorted(fresh):
            self._respawn(self._processes[rank])
        self._gone -= fresh

    def _next(self, number: int, members: Sequence[int], **options: Any) -> Generation:
        """Return a generation of some of the present ranks."""
        slots = tuple(self._slots[rank] for rank in members)
        return Generation(number, hosts=self._hosts(), slots=slots, local_size=self._local_size, **options)

    def _remaining(self) -> Sequence[int]:
        """Return the ranks that can go on without those that have died."""
        # A newcomer may depend on the state of ranks that would not go on.
        without = self._gone if self._memory else self._gone | self._joining
        return self.replacement.remaining(self.size, without) if without else ()

    def _report(self, dead: Sequence[Process], members: Sequence[int], reasons: list[str]) -> None:
        """Report the deaths and what follows to the user. A hang without deaths is added to `reasons`."""
        if self._memory and not dead:
            reasons.append(_HANG)
            self.replacement.report(f"{_HANG}; all ranks start again")
        what = "all ranks start again" if self._memory else "another process takes its place"
        if len(members) < self.size:
            what = f"{len(members)} of {self.size} ranks go on without it"
        for process in dead:
            self.replacement.report(f"{self._describe(process)}; {what}")

    def _go_on_with(self, remaining: Sequence[int]) -> None:
        """End all ranks but those that remain, and number these again."""
        for rank, process in enumerate(self._processes):
            if rank not in remaining:
                process.release()
        self._processes = [self._processes[rank] for rank in remaining]
        self._slots = [self._slots[rank] for rank in remaining]
        self.size = len(remaining)
        for rank, process in enumerate(self._processes):
            process.rank = rank
        self._gone.clear()
        self._stopped_since.clear()

    def _await(
        self,
        number: int,
        kind: type[Left | Joined],
        members: Collection[int],
        fresh: Collection[int],
        seconds: float,
    ) -> list[Process]:
        """Wait until the members of a generation have reported `kind` for it, or a rank dies; return the dead.

        Args:
            fresh: ranks that report `Imported` instead.
            seconds: time after which a rank is killed that is not about to import its framework.
        """
        started, missing = time.monotonic(), set(members)
        lost, lost_at = set[int](), 0.0
        while missing or lost:
            # Before reading, so that a late parent has seen all deaths until then.
            is_decided = bool(lost) and time.monotonic() - lost_at > _VERDICT_SECONDS
            for process, message in self._messages(_POLL_SECONDS):
                if isinstance(message, Imported):
                    missing -= {process.rank} & set(fresh)
                elif isinstance(message, kind) and message.generation == number:
                    missing.discard(process.rank)
                elif isinstance(message, Lost) and message.generation == number:
                    lost_at = lost_at if lost else time.monotonic()
                    lost.add(process.rank)
                elif not isinstance(message, Lost | Left | Joined):
                    # This rank takes part in no further generation.
                    cause = self._generation.reason or "ranks wait for each other"
                    raise LaunchError(f"{cause}; rank {process.rank} of {self.size} had returned before")
            self._kill_stopped()
            if dead := self._dead():
                return dead
            for rank in lost if is_decided else ():
                # No rank has died.
                self.replacement.report(f"rank {rank} of {self.size} could not join the others again; it is killed")
                self._kill(self._processes[rank])
            lost = set() if is_decided else lost
            for rank in missing:
                imports = rank in self._joining and kind is Left
                if time.monotonic() - started > (self.replacement.node_seconds if imports else seconds):
                    self._is_late |= imports
                    self.replacement.report(f"rank {rank} of {self.size} does not answer; it is killed")
                    self._kill(self._processes[rank])
        return []

    def _dead(self) -> list[Process]:
        """Return the ranks that have died and may be replaced. Another failure raises a LaunchError."""
        failed = [each for each in self._processes if each.failure and each.rank not in self._gone]
        for process in failed:
            assert process.failure is not None
            ended = process.has_ended and process.failure.signal not in _STOP_SIGNALS and not process.failure.kind
            # A newcomer may fail to start where another attempt succeeds.
            if not ended and process.rank not in self._joining:
                raise self._failed()
        return failed

    def _describe(self, process: Process) -> str:
        failure = process.failure
        assert failure is not None
        how = failure.headline if failure.signal is None else f"has died ({signal.Signals(failure.signal).name})"
        return f"rank {process.rank} of {self.size} {how}"

    def _count(self, dead: list[Process]) -> int:
        """Return the number of deaths that `dead` counts as."""
        return len(dead)

    def _find_nodes(self) -> bool:
        """Find machines for the ranks of lost ones; return False if no further death is survived for want of one."""
        return True

    def _hosts(self) -> tuple[str, ...]:
        """Return the address of each machine of the job."""
        return (HOST,)

    def _error(self) -> LaunchError:
        failed = any(process.failure for process in self._processes)
        return self._failed() if failed else LaunchError("ranks wait for each other")

    def _exhausted(self) -> LaunchError:
        error = self._error()
        what = f"{error}\nmore than {self.replacement.most} ranks have died; no further one is replaced"
        return LaunchError(what, error.rank, error.kind, error.signal)

    def _kill_stopped(self) -> None:
        now = time.monotonic()
        for process in self._processes:
            if process.has_ended or process.state() not in STOPPED:
                self._stopped_since.pop(process.rank, None)
            elif now - self._stopped_since.setdefault(process.rank, now) > self.replacement.stopped_seconds:
                self.replacement.report(
                    f"rank {process.rank} of {self.size} has been stopped for {self.replacement.stopped_seconds:g} s, "
                    "as by SIGSTOP; it is killed"
                )
                self._kill(process)

    def _kill(self, process: Process) -> None:
        process.signal(signal.SIGKILL)

    def _respawn(self, process: Process) -> None:
        """Replace the process of a rank by a new or spare one."""
        process.release()
        rank = process.rank
        self._processes[rank] = self._start_again(self._slots[rank])
        self._processes[rank].rank = rank

    def _start_again(self, slot: int) -> Process:
        """Return a process for a slot: a spare one, or a new one."""
        spare = self._take_spare()
        if spare is None:
            with interrupts_blocked():
                started = self._spawn(slot, again=True)
            self._set_up(started)
            return started
        spare.rank, spare.output = slot, self.output.file_of(slot, again=True)
        # Through this process, because the file may have no name.
        log = "" if spare.output is None else f"/proc/{os.getpid()}/fd/{spare.output.fileno()}"
        self._set_up(spare, log=log)
        return spare

    def _take_spare(self) -> Process | None:
        """Return a spare process that runs. The end of others is no death of a rank."""
        while self._spares:
            spare = self._spares.pop(0)
            if spare.state() not in SILENT_STATES:
                return spare
            self.replacement.report("a spare process has ended or is stopped; it is not used")
            spare.release()
        return None

    def _start_spares(self, request: Run) -> None:
        while len(self._spares) < self.replacement.spares:
            with interrupts_blocked():
                self._spares.append(self._spawn(-1))
            self._set_up(self._spares[-1], preload=request.target)

    # `LocalRanks` by name below, as dataclasses with slots break `super()`.

    def _clear(self) -> None:
        self._processes += self._spares
        self._spares = []
        LocalRanks._clear(self)
        for number in (*self._memory, *self._terminal):
            os.close(number)
        self._memory, self._terminal = [], ()

    def _set_up(self, process: Process, **options: Any) -> None:
        LocalRanks._set_up(self, process, replaces=True, terminal=self._terminal, **options)

    def _make_memory(self) -> list[int]:
        return _files_in_memory(_FILES_OF_RANK * self.size)

    def _invite(self, members: Iterable[int]) -> None:
        """Send the members of the next generation the address where they join it."""
        if not self._memory:
            address, self._close = get_platform(self.platform).serve_meeting_point(self._hosts()[0])
            self._send_to(members, Meet(self._generation, address))
            return
        address = free_address()
        # Through this process, because they have no names.
        files = [f"/proc/{os.getpid()}/fd/{number}" for number in self._memory]
        for rank in members:
            first = self._slots[rank] * _FILES_OF_RANK
            memory = tuple(files[first : first + _FILES_OF_RANK])
            self._send(self._processes[rank], Meet(self._generation, address, memory))

    def _send_to(self, ranks: Iterable[int], message: Any) -> None:
        for rank in ranks:
            self._send(self._processes[rank], message)


def _files_in_memory(count: int) -> list[int]:
    """Return descriptors of empty files that have no names, so that nothing is left of them when this process ends."""
    if not hasattr(os, "memfd_create"):
        raise CapabilityError(
            "ranks of this platform can only start again together after a death, from memory that outlives them, which "
            "needs Linux"
        )
    return [os.memfd_create("state of a rank") for _ in range(count)]
