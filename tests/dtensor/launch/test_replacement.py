"""Ranks that die or are stopped are replaced while the others keep their processes; other errors end the job."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import rank_programs
from running_commands import left_in_shared_memory

from hp_dtensor.exceptions import CapabilityError, LaunchError
from hp_dtensor.launch import Replacement, launch
from hp_dtensor.launch.local_ranks import LocalRanks
from hp_dtensor.launch.rank_process import Imported
from hp_dtensor.launch.replacement import ReplacedRanks

pytestmark = pytest.mark.real_ranks


@pytest.fixture
def platform(hp_platform):
    """The platform under test, if its ranks can meet again."""
    try:
        hp_platform.serve_meeting_point("127.0.0.1")[1]()
    except CapabilityError:
        pytest.skip("a process of this platform joins a job only once")
    return hp_platform


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("spares", [0, 3])
def test_all_ranks_start_again_with_what_they_have_written(hp_platform, monkeypatch, spares):
    def imported(ranks, check):
        # As on a platform whose processes join a job only once.
        return [Imported(joins_once=True) for _ in LocalRanks._import_frameworks(ranks, check)]

    monkeypatch.setattr(ReplacedRanks, "_import_frameworks", imported)
    lines = []
    # One rank dies, then two at once; one is stopped, and then killed.
    signals = {"0:0": signal.SIGKILL, "1:1": signal.SIGKILL, "1:2": signal.SIGKILL, "2:1": signal.SIGSTOP}
    rules = Replacement(5, stopped_seconds=0.3, report=lines.append, spares=spares)
    shared = set(os.listdir("/dev/shm"))
    found = launch(rank_programs.written_through_deaths, (hp_platform.name, signals), 3, hp_platform, replacement=rules)
    names = [f"rank {rank} in generation {number}" for rank in range(3) for number in range(4)]
    assert found == [[[6.0] * 3, *names[4 * rank : 4 * rank + 4]] for rank in range(3)]
    assert "rank 0 of 3 has died (SIGKILL); all ranks start again" in lines
    assert "rank 1 of 3 has been stopped for 0.3 s, as by SIGSTOP; it is killed" in lines
    assert left_in_shared_memory(shared) == []
    assert not [file for file in Path("/proc/self/fd").iterdir() if "state of a rank" in str(file.resolve())]


# Ranks that import the framework themselves are replaced in tests/trainer/launch/test_job_nodes.py.
@pytest.mark.usefixtures("forked_ranks")
def test_ranks_are_replaced(platform):
    lines = []
    # Rank 0 served no meeting point, so it may die too. Rank 1 dies when rank 2 has been stopped, in another pair.
    signals = {"0:0": signal.SIGKILL, "1:2": signal.SIGSTOP, "1:1": signal.SIGABRT}
    rules = Replacement(5, stopped_seconds=0.3, report=lines.append)
    found = launch(rank_programs.total_through_deaths, (platform.name, signals), 4, platform, replacement=rules)
    assert [result for result, _ in found] == [[10.0] * 3] * 4
    # Only rank 3 has been there from the start.
    assert [generations[0] for _, generations in found].count(0) == 1
    assert found[3][1][0] == 0
    assert "rank 0 of 4 has died (SIGKILL); another process takes its place" in lines
    assert "rank 1 of 4 has died (SIGABRT); another process takes its place" in lines
    assert "rank 2 of 4 has been stopped for 0.3 s, as by SIGSTOP; it is killed" in lines


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("number", "state"), [(signal.SIGKILL, "Z"), (signal.SIGSTOP, "T")])
def test_a_spare_that_has_ended_or_is_stopped_counts_as_no_death(platform, monkeypatch, number, state):
    lines, respawn = [], ReplacedRanks._respawn

    def signal_spare_first(ranks, process):
        (spare,) = ranks._spares
        spare.signal(number)
        while spare.state() != state:
            time.sleep(0.01)
        respawn(ranks, process)

    monkeypatch.setattr(ReplacedRanks, "_respawn", signal_spare_first)
    rules = Replacement(1, report=lines.append, spares=1)
    signals = {"0:0": signal.SIGKILL}
    found = launch(rank_programs.total_through_deaths, (platform.name, signals), 2, platform, replacement=rules)
    assert [generations for _, generations in found] == [[1], [0, 1]]
    assert lines == [
        "rank 0 of 2 has died (SIGKILL); another process takes its place",
        "a spare process has ended or is stopped; it is not used",
    ]


@pytest.mark.usefixtures("forked_ranks")
def test_deaths_are_counted_and_other_errors_are_not_survived(platform):
    signals = {"0:1": signal.SIGKILL, "1:0": signal.SIGKILL}
    with pytest.raises(LaunchError, match=r"^rank 0 of 2 was killed by SIGKILL.*\nmore than 0 ranks have died; no f"):
        launch(rank_programs.total_through_deaths, (platform.name, signals), 2, platform, replacement=Replacement(0))
    with pytest.raises(LaunchError, match=r"^rank 1 of 2 failed: RuntimeError: the loss is no number"):
        launch(rank_programs.fail_alone, (platform.name,), 2, platform, replacement=Replacement(3))
