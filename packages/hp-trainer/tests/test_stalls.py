"""Reports of ranks when nothing goes on: early, and about the right one."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest

from hp_trainer.exceptions import CheckpointError, HangError, TrainingError
from hp_trainer.pipeline import Action
from hp_trainer.training import stalls
from hp_trainer.training.stalls import (
    StallReport,
    StallWatch,
    describe_stall,
    frames_of_error,
    frames_of_thread,
    module_of_frames,
    read_reports,
    report_file,
    watched_set_up,
)


@pytest.fixture(autouse=True)
def a_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of the frameworks of installed platforms are skipped."""
    monkeypatch.setattr(stalls, "platform_plugins", lambda: ["torch"])


def report(
    rank: int, calls: dict[str, tuple[int, str]], where: str = "loop.py:3 in wait", step: int = 7
) -> StallReport:
    stack = [f"/x/hp_trainer/{where}", "/x/hp_dtensor/comm/group.py:9 in all_reduce", "/x/torch/c10d.py:1 in wait"]
    return StallReport(rank=rank, phase="step", step=step, seconds=31.0, calls=calls, stack=stack)


def world(rank: int = 0, size: int = 2, calls: int = 3) -> SimpleNamespace:
    group = SimpleNamespace(ranks=tuple(range(size)), num_calls=calls, last_call="all_reduce")
    return SimpleNamespace(rank=rank, size=size, groups=lambda: [group])


def test_a_rank_that_says_nothing_is_named() -> None:
    reports = {rank: report(rank, {"0-3": (9, "all_reduce")}) for rank in (0, 1, 3)}
    assert describe_stall(reports, 4) == (
        "step 7: rank 2 of 4 has not answered: stopped, killed, or unreachable; rank 0, 1, 3 waits after "
        "starting all_reduce, at /x/hp_trainer/loop.py:3 in wait"
    )


def test_a_rank_in_a_loop_of_its_own_is_named_with_its_place() -> None:
    waiting = {rank: report(rank, {"0-2": (9, "all_gather")}) for rank in (0, 2)}
    stuck = report(1, {"0-2": (8, "all_reduce")}, "data.py:40 in read")
    message = describe_stall({**waiting, 1: stuck}, 3)
    assert "rank 1 of 3 has not answered: it has not started all_gather (call 9 among ranks 0-2), at " in message
    assert "at /x/hp_trainer/data.py:40 in read; rank 0, 2 waits after starting all_gather" in message


class Module:
    def __init__(self, inner: Module | None = None) -> None:
        self.inner = inner

    def forward(self) -> list[FrameType]:
        return frames_of_thread(threading.get_ident()) if self.inner is None else self.inner.forward()

    def fail(self) -> None:
        if self.inner is not None:
            self.inner.fail()
        raise RuntimeError


def test_the_innermost_module_and_the_action_of_a_pipeline_are_found_on_the_stack() -> None:
    inner = Module()
    model = Module(inner)
    names = {id(model): "", id(inner): "layers.1.attention"}

    def run(action: Action) -> list[FrameType]:
        return model.forward()

    assert module_of_frames(model.forward(), names) == "module layers.1.attention"
    found = module_of_frames(run(Action.parse("2F1")), names)
    assert found == "module layers.1.attention, action 2F1 of the pipeline (stage 2)"
    assert module_of_frames(model.forward(), {id(model): ""}) == "module the full model"
    assert module_of_frames(model.forward(), {}) == module_of_frames([], names) == ""
    with pytest.raises(RuntimeError) as failed:
        model.fail()
    assert module_of_frames(frames_of_error(failed.value), names) == "module layers.1.attention"
    message = describe_stall(
        {0: dataclasses.replace(report(0, {"0,1": (9, "all_gather")}), module="module layers.1")}, 2
    )
    assert "rank 0 waits after starting all_gather, in module layers.1, at /x/hp_trainer/loop.py:3 in wait" in message


def test_who_waits_for_another_group_is_not_blamed() -> None:
    # Ranks 0 and 1 wait for rank 3 over different groups; rank 2 waits for rank 0, which waits itself.
    reports = {
        0: report(0, {"0,1": (5, "all_gather"), "0,2": (7, "all_reduce")}),
        1: report(1, {"0,1": (5, "all_gather"), "1,3": (8, "all_reduce")}),
        2: report(2, {"2,3": (5, "all_gather"), "0,2": (7, "all_reduce")}),
        3: report(3, {"2,3": (4, "all_gather"), "1,3": (6, "all_reduce")}),
    }
    assert "rank 3 of 4 has not answered: " in describe_stall(reports, 4)


def test_equal_ranks_wait_for_each_other() -> None:
    reports = {rank: report(rank, {"0,1": (5, "send")}) for rank in range(2)}
    assert "all 2 ranks wait for each other; rank 0, 1 waits after starting send" in describe_stall(reports, 2)
    assert describe_stall({}, 2) == "none of 2 ranks has a report"


def test_damaged_reports_are_left_out(tmp_path: Path) -> None:
    for rank, text in enumerate(["{", "[]", "{}", '{"calls": {"0": 3}}', json.dumps(asdict(report(4, {})))]):
        report_file(tmp_path, rank).write_text(text)
    assert sorted(read_reports(tmp_path)) == [4]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "_CHECK_SECONDS", 0.02)
    monkeypatch.setattr(stalls, "_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(stalls, "_LEAST_SECONDS", 1.0)


class Clock:
    """The time of a watch, which goes on only when a test says so: a busy machine makes no step late."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(stalls, "time", found)
    return found


def wait_until(condition, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("quick")
def test_a_step_that_takes_many_times_its_usual_is_told_early_once(tmp_path: Path, clock: Clock) -> None:
    messages: list[str] = []
    with StallWatch(tmp_path, world(), timeout_seconds=600, report=messages.append) as watch:
        for step in range(5):
            watch.start_phase("step", step)
            clock.sleep(0.01)
        assert messages == []
        watch.start_phase("step", 5)
        report_file(tmp_path, 1).write_text(json.dumps(asdict(report(1, {"0,1": (2, "all_gather")}, step=5))))
        clock.sleep(1.5)
        wait_until(lambda: messages)
        assert messages[0].startswith("step 5: rank 1 of 2 has not answered: it has not started all_reduce (call 3 ")
        assert f"stacks in {tmp_path}" in messages[0]
        mine = read_reports(tmp_path)[0]
        assert any("test_stalls.py" in line for line in mine.stack)
        clock.sleep(1.0)
        time.sleep(0.2)
        assert len(messages) == 1
        watch.start_phase("step", 6)
        assert "rank 0: the late step has ended after " in messages[-1]
        assert 0 not in read_reports(tmp_path)


@pytest.mark.usefixtures("quick")
def test_only_the_lowest_rank_that_answers_tells(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: dict[int, list[str]] = {1: [], 2: []}
    started, reported, done = threading.Barrier(3), threading.Barrier(2), threading.Event()
    asked: list[bool] = []
    write, speaks = StallWatch._write_report, StallWatch._prints_summary

    def write_with_the_other(watch: StallWatch, waited: float, frames: list[FrameType]) -> None:
        write(watch, waited, frames)
        reported.wait(300)  # on a busy machine one of them may report long after the other

    def noted(watch: StallWatch) -> bool:
        asked.append(speaks(watch))
        return asked[-1]

    monkeypatch.setattr(StallWatch, "_write_report", write_with_the_other)
    monkeypatch.setattr(StallWatch, "_prints_summary", noted)

    def rank(number: int) -> None:
        watch = StallWatch(tmp_path, world(number, 3), timeout_seconds=0.8, report=messages[number].append)
        with watch:
            watch.start_phase("step", 1)
            started.wait(300)
            done.wait(300)

    threads = [threading.Thread(target=rank, args=(number,)) for number in messages]
    for thread in threads:
        thread.start()
    started.wait(300)
    clock.sleep(0.5)
    wait_until(lambda: len(asked) == 2 and messages[1])
    done.set()
    for thread in threads:
        thread.join()
    assert messages[1][0].startswith("step 1: rank 0 of 3 has not answered: stopped, killed")
    assert (sorted(asked), messages[2]) == ([False, True], [])


@pytest.mark.usefixtures("quick")
def test_a_failed_collective_is_explained_only_after_the_timeout(tmp_path: Path, clock: Clock) -> None:
    error = RuntimeError("a timeout")
    with StallWatch(tmp_path, world(), timeout_seconds=0.5, report=lambda line: None) as watch:
        watch.start_phase("step", 3)
        assert watch.explain(error) is None, "a peer has died, say"
        clock.sleep(0.5)
        assert watch.explain(error) == (
            "step 3: rank 1 of 2 has not answered: stopped, killed, or unreachable; rank 0 waits after "
            f"starting all_reduce, {read_reports(tmp_path)[0].place}; waited 0.5 s (launch.timeout_seconds)"
        )


@pytest.mark.usefixtures("quick")
def test_an_error_of_no_collective_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    with StallWatch(tmp_path, world(), timeout_seconds=0.2, report=lambda line: None) as watch:
        watch.start_phase("step", 3)
        time.sleep(0.2)
        for error in (ValueError("of a user's code"), OSError(28, "full"), CheckpointError("damaged")):
            assert watch.explain(error) is None


def test_a_rank_without_the_group_in_which_others_wait_is_behind() -> None:
    stuck = dataclasses.replace(report(1, {}, "own.py:5 in parallelize", step=0), phase="set-up")
    for group, size in (("0,1", 2), ("0-2", 3)):
        waits = {rank: report(rank, {group: (1, "all_gather_bytes")}, step=0) for rank in range(size) if rank != 1}
        message = describe_stall(
            {1: stuck} | {r: dataclasses.replace(w, phase="set-up") for r, w in waits.items()}, size
        )
        assert message.startswith(
            f"set-up: rank 1 of {size} has not answered: it has not started all_gather_bytes (call 1 "
        )
        assert "own.py:5 in parallelize; rank 0" in message
    # A shortened name does not say which ranks are in it.
    assert "all 2 ranks wait" in describe_stall({0: report(0, {"0,2,... (9 ranks)": (1, "send")}), 1: report(1, {})}, 2)


@pytest.mark.usefixtures("quick")
def test_whoever_keeps_others_waiting_in_its_set_up_is_named(tmp_path: Path) -> None:
    stuck = dataclasses.replace(report(1, {}, "own.py:5 in parallelize", step=0), phase="set-up")

    def set_up() -> None:
        with watched_set_up(tmp_path, world(calls=1), 0.2):
            report_file(tmp_path, 1).write_text(json.dumps(asdict(stuck)))
            time.sleep(0.2)
            raise RuntimeError("wait timeout after 200ms")

    with pytest.raises(HangError, match=r"set-up: rank 1 of 2 has not answered: .*own.py:5 in parallelize; .* 0.2 s"):
        set_up()


@pytest.mark.parametrize("size", [1, 2])
def test_a_set_up_that_calls_sys_exit_has_failed_and_its_line_is_named(tmp_path: Path, size: int) -> None:
    message = rf"rank 0 has left with SystemExit\(0\) in its set-up, called at {__file__}:\d+; raise an error"
    with pytest.raises(TrainingError, match=message), watched_set_up(tmp_path, world(size=size), 600):
        sys.exit(0)
