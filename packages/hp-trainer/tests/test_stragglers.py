"""Stragglers: which ranks are named, since when, and which are not."""

from __future__ import annotations

import numpy as np
import pytest

from hp_trainer.records import Straggler
from hp_trainer.report import MOST_RANKS, rank_seconds, slow_ranks
from hp_trainer.training.speed import INTERVAL, PERSISTENCE, WORK, _Detector

FORWARD, DATA = WORK.index("forward"), WORK.index("data")


def seconds(world_size: int, **slow: float) -> np.ndarray:
    """Times of ranks that all take 0.1 s of forward, and a rank `r3=0.2` so much more data or `f3` forward."""
    table = np.zeros((world_size, len(WORK)))
    table[:, FORWARD] = 0.1
    for name, more in slow.items():
        table[int(name[1:]), DATA if name[0] == "r" else FORWARD] += more
    return table


def detect(*tables: np.ndarray, factor: float = 1.5) -> tuple[Straggler, ...]:
    detector, found = _Detector(len(tables[0])), ()
    for number, table in enumerate(tables, 1):
        found = detector.update(number * INTERVAL, table, (tuple(range(len(table))),), factor)
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4, 9])
def test_a_slow_rank_is_named_with_its_first_slow_step_and_its_work(world_size: int) -> None:
    found = detect(seconds(world_size), *[seconds(world_size, f1=0.1)] * PERSISTENCE)
    assert found == (Straggler(ranks=(1,), node=None, since=INTERVAL + 1, factor=2.0, work="forward"),)
    (found,) = detect(*[seconds(world_size, r0=0.3)] * PERSISTENCE)
    assert str(found) == "rank 0 4.0x slower since step 1 (data)"


def test_ranks_that_are_slow_now_and_then_are_not_named() -> None:
    slow, usual = seconds(4, f2=0.5), seconds(4)
    assert detect(*[slow, slow, usual] * 5) == ()
    assert detect(*[seconds(4, f0=0.5), seconds(4, f1=0.5), seconds(4, f2=0.5)] * 5) == ()
    assert detect(*[slow] * 9, usual) == (), "it is no longer slow"


def test_ranks_below_the_factor_or_of_tiny_steps_are_not_named() -> None:
    assert detect(*[seconds(4, f2=0.04)] * 9) == ()
    assert detect(*[seconds(4, f2=0.04)] * 9, factor=1.2) != ()
    assert detect(*[seconds(4, f2=0.04) / 1000] * 9, factor=1.2) == ()


def test_a_minority_of_slow_ranks_is_named() -> None:
    assert [each.ranks for each in detect(*[seconds(5, f1=0.1, f4=0.1)] * 3)] == [(1,), (4,)]


def test_ranks_of_a_pipeline_are_compared_within_their_stage() -> None:
    detector, found, table = _Detector(4), (), seconds(4, f2=0.2, f3=0.2)
    for step in range(INTERVAL, INTERVAL * 9, INTERVAL):
        found = detector.update(step, table, ((0, 1), (2, 3)), 1.5)
    assert found == ()


def test_a_node_is_named_if_all_of_its_ranks_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    (node,) = detect(*[seconds(6, f2=0.1, f3=0.1)] * PERSISTENCE)
    assert str(node) == "node 1 (ranks 2-3) 2.0x slower since step 1 (forward)"
    (rank,) = detect(*[seconds(6, f3=0.1)] * PERSISTENCE)
    assert str(rank) == "rank 3 2.0x slower since step 1 (forward)"


def test_a_report_says_until_which_measured_step_a_rank_was_slow() -> None:
    """Steps 31 to 39 still name it, and the times of steps 31 to 40 do not."""
    named = {"ranks": [1], "node": None, "since": 1, "factor": 2.04, "work": "data"}
    events = [{"step": 30, "stragglers": [named], "rank_seconds": {"data": [1.0, 2.0]}}]
    events += [{"step": step, "stragglers": [named]} for step in range(31, 40)]
    events += [{"step": 40, "rank_seconds": {"data": [1.0, 1.0]}}]
    assert slow_ranks(events) == [["1", "1", "30", "2.0", "data"]]


def test_a_report_of_many_ranks_shows_the_slowest() -> None:
    number = 2 * MOST_RANKS
    times = {"data": [0.1] * number, "forward": [1.0 + rank / 1000 for rank in range(number)]}
    # Time in collectives is not a rank's own.
    times["waiting"] = [9.0] + [0.0] * (number - 1)
    text = rank_seconds([{"rank_seconds": times}])
    assert "<td>127</td><td>0.1000</td><td>1.1270</td>" in text
    assert "<td>0</td>" not in text
    assert f"The {MOST_RANKS} of {number} ranks" in text
    few = rank_seconds([{"rank_seconds": {kind: each[:3] for kind, each in times.items()}}])
    assert few.index("<td>0</td>") < few.index("<td>2</td>")
