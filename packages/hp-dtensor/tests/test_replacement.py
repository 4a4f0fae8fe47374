"""The parent's decisions on ranks that die, hang or fail, on messages of ranks that are written here."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hp_dtensor.exceptions import CapabilityError, LaunchError
from hp_dtensor.launch import Replacement, local_ranks, rank_process, replacement
from hp_dtensor.launch.local_ranks import Failure, Process, failure_of_end
from hp_dtensor.launch.rank_process import Imported, Joined, Leave, Left, Lost, Meet, Returned, Run
from hp_dtensor.launch.replacement import ReplacedRanks

# A message of a rank; an exit code, negative for a signal; or the failure that it has reported.
Event = tuple[int, Any]
DIES, RAISES = -signal.SIGKILL, Failure("failed: ValueError: no", "", 0.0, kind="ValueError")
END = [(0, Returned(0)), (1, Returned(1))]


class NoProcess(Process):
    """The process of a rank that is written here."""

    __slots__ = ()

    def release(self) -> None:
        pass


@dataclass(slots=True)
class WrittenRanks(ReplacedRanks):
    """Ranks whose messages come in batches from a list, and that do nothing else."""

    batches: Iterator[Iterable[Event]] = field(default_factory=lambda: iter(()))
    sent: list[Event] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)

    def _spawn(self, rank: int, *, again: bool = False) -> Process:
        # No process has this number.
        return NoProcess(rank, cast(Any, SimpleNamespace(pid=2**30)), cast(Any, None), None)

    def _messages(self, timeout_seconds: float | None) -> Iterator[tuple[Process, Any]]:
        for rank, event in next(self.batches):
            process = self._processes[rank]
            if isinstance(event, int):
                process.has_ended, process.failure = True, failure_of_end(event, "")
            elif isinstance(event, Failure):
                process.failure = event
            else:
                yield process, event

    def _send(self, process: Process, message: Any) -> None:
        self.sent.append((process.rank, message))

    def _kill(self, process: Process) -> None:
        self.killed.append(process.rank)

    def terminate(self) -> None:
        pass


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> WrittenRanks:
    monkeypatch.setattr(local_ranks, "_OTHERS_SECONDS", 0.0)
    platform = SimpleNamespace(serve_meeting_point=lambda host: ("", lambda: None))
    monkeypatch.setattr(replacement, "get_platform", lambda name: platform)
    found = WrittenRanks("array", 2, replacement=Replacement(1, report=lambda text: None))
    found._processes = [found._spawn(rank) for rank in range(2)]
    return found


def run(ranks: WrittenRanks, *batches: Iterable[Event]) -> list[Any]:
    ranks.batches = iter(batches)
    return ranks._supervise(Run("module:function", b""))


def generation(number: int) -> list[list[Event]]:
    """The messages of a generation in which rank 1 is a newcomer."""
    return [[(0, Left(number)), (1, Imported())], [(0, Joined(number)), (1, Joined(number))]]


@pytest.mark.parametrize("most", [1, 0])
def test_a_hang_counts_once(ranks: WrittenRanks, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(replacement, "_HUNG_SECONDS", -1.0)
    ranks.replacement = Replacement(most, report=lambda text: None)
    hang = [[(0, Lost(0, hung=True))], [(0, Left(1))], [(1, DIES)], *generation(2)]
    run(ranks, *hang, END)
    assert ranks.killed == [1]
    assert ranks._generation.is_last == (most == 0)
    if most:
        run(ranks, [(1, DIES)], *generation(3), END)
    assert ranks._generation.is_last
    for end in ((1, DIES), (0, Lost(ranks._generation.number, hung=True))):
        with pytest.raises(LaunchError, match=rf"more than {most} ranks have died; no further one is replaced$"):
            run(ranks, [end])


@pytest.mark.parametrize("failure", [RAISES, 1, DIES])
def test_a_newcomer_that_fails_is_replaced(ranks: WrittenRanks, failure: Any) -> None:
    ranks.replacement = Replacement(3, report=lambda text: None)
    # While it imports, and while it joins.
    run(ranks, [(1, DIES)], [(1, failure)], generation(2)[0], [(1, failure)], *generation(3), END)
    assert [message.generation for rank, message in ranks.sent if rank == 0 and isinstance(message, Leave)] == [1, 2, 3]


@pytest.mark.parametrize("failure", [RAISES, -signal.SIGTERM])
def test_an_error_of_a_former_newcomer_ends_the_job(ranks: WrittenRanks, failure: Any) -> None:
    ranks.replacement = Replacement(5, report=lambda text: None)
    with pytest.raises(LaunchError, match=r"^rank 1 of 2 (failed: ValueError|was killed by SIGTERM)"):
        run(ranks, [(1, DIES)], *generation(1), [(1, failure)])


def test_survivors_that_cannot_join_because_of_a_death_are_not_killed(ranks: WrittenRanks) -> None:
    ranks.replacement = Replacement(2, report=lambda text: None)
    forming = [[(1, DIES)], generation(1)[0]]
    # In one batch, as a late parent reads them; or the death a moment later.
    run(ranks, *forming, [(0, Lost(1)), (1, DIES)], *generation(2), END)
    ranks._num_deaths = 0
    number = ranks._generation.number
    later = [[(1, DIES)], generation(number + 1)[0], [(0, Lost(number + 1))], [], [(1, DIES)]]
    run(ranks, *later, *generation(number + 2), END)
    assert ranks.killed == []


def test_a_rank_that_cannot_join_without_a_death_is_killed(
    ranks: WrittenRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacement, "_VERDICT_SECONDS", -1.0)
    ranks.replacement = Replacement(2, report=lambda text: None)
    again = [[(0, Imported()), (1, Left(2))], [(0, Joined(2)), (1, Joined(2))]]
    run(ranks, [(1, DIES)], generation(1)[0], [(0, Lost(1))], [], [(0, DIES)], *again, END)
    assert ranks.killed == [0]
    meetings = [message.generation for rank, message in ranks.sent if rank == 0 and isinstance(message, Meet)]
    assert [each.newcomers for each in meetings] == [(1,), (0, 1)]


def pairs(size: int, dead: Collection[int]) -> list[int]:
    """The ranks of the pairs that are complete."""
    return [rank for rank in range(size) if not {rank, rank ^ 1} & set(dead)]


@pytest.fixture
def four(ranks: WrittenRanks) -> WrittenRanks:
    """Two pairs of ranks, which go on alone where no newcomer comes."""
    found = WrittenRanks("array", 4, replacement=Replacement(0, report=lambda text: None, remaining=pairs))
    found._processes = [found._spawn(rank) for rank in range(4)]
    return found


def reports(kind: Callable[[int], Any], number: int, *ranks: int) -> list[Event]:
    return [(rank, kind(number)) for rank in ranks]


def test_a_complete_pair_goes_on_and_is_numbered_again(four: WrittenRanks) -> None:
    four.replacement = Replacement(1, report=lambda text: None, remaining=pairs)
    first, second = four._processes[2:]
    # The first death is survived by a newcomer.
    newcomer = [[*reports(Left, 1, 0, 2, 3), (1, Imported())], reports(Joined, 1, 0, 1, 2, 3)]
    # The processes have the ranks 0 and 1 when the generation has met.
    end = [(0, "a"), (1, "b")]
    lost = [[(1, DIES)], reports(Left, 2, 2, 3), reports(Joined, 2, 2, 3)]
    assert run(four, [(1, DIES)], *newcomer, *lost, end) == ["a", "b"]
    assert four._processes == [first, second]
    meets = [(rank, each.generation.slots) for rank, each in four.sent if isinstance(each, Meet)]
    assert meets[-2:] == [(2, (2, 3)), (3, (2, 3))]
    assert not four._generation.is_last
    # Rank 0, which waits, too, until it is known that it is not needed.
    assert {rank for rank, each in four.sent if each == Leave(2)} == {0, 2, 3}
    # No pair is left.
    last = [[(0, Imported()), (1, Left(3))], reports(Joined, 3, 0, 1)]
    run(four, [(0, DIES)], *last, end)
    assert (four._generation.is_last, four._generation.newcomers, four._generation.slots) == (True, (0,), (2, 3))


def test_ranks_that_would_end_are_there_until_the_others_have_met(four: WrittenRanks) -> None:
    first = [[(0, DIES)], reports(Left, 1, 2, 3), [(3, DIES)]]
    second = [[(0, Imported()), *reports(Left, 2, 1, 2), (3, Imported())], reports(Joined, 2, 0, 1, 2, 3)]
    end = list(enumerate("abcd"))
    assert run(four, *first, *second, end) == [*"abcd"]
    assert (four._generation.is_last, four._generation.newcomers) == (True, (0, 3))


def test_a_job_without_a_machine_saves_its_state_when_no_pair_is_left(
    four: WrittenRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After the first search other machines share the places of the lost one, and none is missing.
    searches = iter([False, True])
    monkeypatch.setattr(WrittenRanks, "_find_nodes", lambda ranks: next(searches))
    four.replacement = Replacement(5, report=lambda text: None, remaining=pairs)
    first = [[(0, DIES)], reports(Left, 1, 2, 3), [(3, DIES)]]
    second = [[(0, Imported()), *reports(Left, 2, 1, 2), (3, Imported())], reports(Joined, 2, 0, 1, 2, 3)]
    run(four, *first, *second, list(enumerate("abcd")))
    assert (four._generation.is_last, four._generation.lacks_node, four._generation.newcomers) == (True, True, (0, 3))


def test_a_newcomer_that_does_not_come_in_time_is_not_waited_for(four: WrittenRanks) -> None:
    four.replacement = Replacement(5, report=lambda text: None, node_seconds=-1.0, remaining=pairs)
    late = [[(0, DIES)], reports(Left, 1, 1, 2, 3), [(0, DIES)]]
    run(four, *late, reports(Left, 2, 2, 3), reports(Joined, 2, 2, 3), END)
    assert (four.killed, four._generation.slots) == ([0], (2, 3))
    # One that dies by itself is replaced.
    newcomer = [[(0, Left(4)), (1, Imported())], reports(Joined, 4, 0, 1)]
    four.replacement = Replacement(5, report=lambda text: None, remaining=pairs)
    run(four, [(1, DIES)], [(1, DIES)], *newcomer, END)
    assert (four._generation.newcomers, four._generation.slots) == ((1,), (2, 3))


def test_a_pair_with_a_rank_that_has_hung_does_not_go_on(four: WrittenRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "_HUNG_SECONDS", -1.0)
    hang = [[(0, Lost(0, hung=True))], reports(Left, 1, 0, 2, 3), [(1, DIES)]]
    run(four, *hang, reports(Left, 2, 2, 3), reports(Joined, 2, 2, 3), END)
    assert (four.killed, four._generation.slots, four._generation.is_last) == ([1], (2, 3), False)


def test_a_pair_goes_on_where_both_ranks_of_the_other_one_have_hung(
    four: WrittenRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacement, "_HUNG_SECONDS", -1.0)
    hang = [[(2, Lost(0, hung=True))], reports(Left, 1, 2, 3), [(0, DIES), (1, DIES)]]
    run(four, *hang, reports(Left, 2, 2, 3), reports(Joined, 2, 2, 3), END)
    assert (four.killed, four._generation.slots, four._generation.is_last) == ([0, 1], (2, 3), False)
    # Then the other pair hangs, and none is left.
    with pytest.raises(LaunchError, match=r"no further one is replaced$"):
        run(four, [(0, Lost(2, hung=True))], [], [(0, DIES), (1, DIES)])


def test_a_pair_goes_on_in_new_processes_where_they_join_only_once(four: WrittenRanks) -> None:
    four._memory = [-1] * 8
    run(four, [(1, DIES)], [(2, Imported()), (3, Imported())], reports(Joined, 1, 2, 3), END)
    assert (four.killed, four._generation.newcomers, four._generation.slots) == ([0, 2, 3], (0, 1), (2, 3))
    assert not any(isinstance(message, Leave) for _, message in four.sent)


def test_all_ranks_start_again_where_processes_join_only_once(ranks: WrittenRanks) -> None:
    ranks._memory = [-1] * 4
    lines: list[str] = []
    ranks.replacement = Replacement(3, report=lines.append)
    imported: list[Event] = [(0, Imported()), (1, Imported())]
    joined: list[list[Event]] = [[(0, Joined(number)), (1, Joined(number))] for number in range(6)]
    run(ranks, [(1, DIES)], imported, joined[1], END)
    assert ranks.killed == [0]
    # A newcomer dies while the others import, both die at once, and ranks hang.
    run(ranks, [(0, DIES)], [(0, Imported()), (1, DIES)], imported, joined[3], END)
    assert ranks.killed == [0, 1, 0]
    ranks._num_deaths = 0
    run(ranks, [(0, DIES), (1, DIES)], imported, joined[4], END)
    assert (ranks.killed, ranks._num_deaths) == ([0, 1, 0], 2)
    run(ranks, [(0, Lost(4, hung=True))], imported, joined[5], END)
    assert (ranks.killed, ranks._num_deaths) == ([0, 1, 0, 0, 1], 3)
    assert lines[-1] == "a rank has waited for the full timeout of a collective; all ranks start again"
    meetings = [message for _, message in ranks.sent if isinstance(message, Meet)]
    assert {each.generation.newcomers for each in meetings} == {(0, 1)}
    assert all(len(each.memory) == 2 for each in meetings)
    assert not any(isinstance(message, Leave) for _, message in ranks.sent)


def test_files_in_memory_need_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(WrittenRanks, "_import_frameworks", lambda ranks, check: [Imported(joins_once=True)] * 2)
    with pytest.raises(CapabilityError, match=r"^ranks of this platform can only start again together .* needs Linux$"):
        WrittenRanks("array", 2).start()


def test_a_rank_that_has_returned_cannot_go_on(ranks: WrittenRanks) -> None:
    with pytest.raises(LaunchError, match=r"^rank 1 of 2 has died \(SIGKILL\); rank 0 of 2 had returned before$"):
        run(ranks, [(1, DIES)], [(0, Returned(0))])
    with pytest.raises(LaunchError, match=r"^ranks wait for each other$"):
        run(ranks, [(0, Returned(0))], [(1, Lost(0, hung=True))])


def test_a_newcomer_that_has_joined_leaves_before_its_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    member = SimpleNamespace(leave=calls.append, meet=lambda: calls.append("meet"))
    monkeypatch.setattr(rank_process, "_member", member)
    requests = iter([Leave(2), Run("os:getpid", pickle.dumps(())), Leave(3), None])
    link = SimpleNamespace(receive=lambda: next(requests), send=lambda message: calls.append(type(message)))
    assert rank_process._serve(cast(Any, link))
    # After it has returned, it leaves no more.
    assert calls == [Leave(2), "meet", Returned]


def test_without_replacement_there_is_no_next_generation() -> None:
    with pytest.raises(LaunchError, match="dead ranks of this job are not replaced"):
        rank_process.next_generation()
