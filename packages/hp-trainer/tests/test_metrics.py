"""Trackers: JSON lines that survive a crash, progress with and without a terminal, the loss curve."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import matplotlib.figure
import pytest

from hp_trainer.config import parse_config
from hp_trainer.metrics import (
    JsonLinesTracker,
    PictureTracker,
    ProgressTracker,
    draw_loss_curve,
    keep_steps,
    read_metrics,
)
from hp_trainer.metrics.pictures import draw_losses, running_means
from hp_trainer.metrics.tracker import format_seconds
from hp_trainer.records import CheckpointRecord, EvaluationRecord, RunRecord, StepRecord
from hp_trainer.registries import Registries


@pytest.fixture
def run(tmp_path: Path, registered: Registries):
    config = parse_config("model: {name: tiny}\ntraining: {steps: 4}\n", registered=registered).config

    def run(first_step: int = 0) -> RunRecord:
        return RunRecord(
            folder=tmp_path,
            config=config,
            platform="torch",
            rank=0,
            world_size=2,
            first_step=first_step,
            num_parameters=1234567,
        )

    return run


def step(number: int, loss: float = 1.5) -> StepRecord:
    return StepRecord(step=number, learning_rate=1e-3, tokens=100, samples=8 * number, loss=loss, seconds=0.5)


def test_each_step_is_on_disk_when_it_is_done(tmp_path: Path, run) -> None:
    tracker = JsonLinesTracker(tmp_path / "metrics.jsonl")
    tracker.start(run())
    tracker.step(step(1))
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "step"]
    assert (events[1]["step"], events[1]["loss"], events[1]["tokens_per_second"]) == (1, 1.5, 200.0)
    tracker.finish()


def test_progress_shows_memory_and_speed(run) -> None:
    out = io.StringIO()
    tracker = ProgressTracker(stream=out)
    tracker.start(run())
    tracker.step(replace(step(1), peak_memory_gib=1.25, model_flops_per_second=3.87e14, utilization=0.391))
    tracker.step(step(4))
    lines = out.getvalue().splitlines()
    assert "1.2 GiB  387 TFLOP/s  39% of peak" in lines[1]
    assert "GiB" not in lines[2]


def test_what_json_cannot_hold_becomes_text(tmp_path: Path, run) -> None:
    tracker = JsonLinesTracker(tmp_path / "metrics.jsonl")
    tracker.start(run())
    tracker.step(step(1, float("nan")))
    tracker.finish()
    assert [event.get("loss") for event in read_metrics(tmp_path / "metrics.jsonl")] == [None, "nan"]


def test_a_resumed_run_has_each_step_once(tmp_path: Path, run) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLinesTracker(path)
    first.start(run())
    for number in (1, 2, 3):
        first.step(step(number))
    first.finish()
    path.write_text(path.read_text() + '{"event": "step", "st')  # killed in the middle of a line
    second = JsonLinesTracker(path)
    second.start(run(first_step=2))
    second.step(step(3, 0.5))
    second.evaluation(EvaluationRecord(step=3, loss=2.0, tokens=10, seconds=0.1))
    second.checkpoint(CheckpointRecord(step=3, folder="step-00000003", seconds=0.1))
    second.finish()
    events = list(read_metrics(path))
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]
    assert [event["loss"] for event in events if event["event"] == "step"] == [1.5, 1.5, 0.5]
    assert [event["event"] for event in events][-3:] == ["step", "evaluation", "checkpoint"]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (b"not json", "Invalid JSON: expected ident at line 1 column 2"),
        (b"[" * 100_000, "Invalid JSON: recursion limit exceeded at line 1 column "),
        (b"\xff\xfe", "Invalid JSON: expected value at line 1 column 1"),
        (b"3", "expected an object, got 3"),
        (b'{"step": 2}', "event: missing"),
        (b'{"event": "step", "step": "2"}', "step: expected a valid integer, got '2'"),
        (b'{"event": "step"}', "step: missing"),
        (b'{"event": "step", "step": -1}', "step: expected greater than or equal to 0, got -1"),
        (b'{"event": "step", "step": 2, "tokens": "many"}', "tokens: expected a valid integer, got 'many'"),
        (b'{"event": "step", "step": 2, "metrics": [1]}', "metrics: expected an object, got [1]"),
        (
            b'{"event": "step", "step": 2, "stragglers": [{"ranks": 3}]}',
            "stragglers.0.ranks: expected a valid array, got 3",
        ),
        (
            b'{"event": "start", "platform": "torch", "world_size": 0}',
            "world_size: expected greater than or equal to 1, got 0",
        ),
        (b'{"event": "evaluation", "loss": 2}', "step: missing"),
        (
            b'{"event": "checkpoint", "step": 1, "folder": "a", "seconds": null}',
            "seconds: expected a valid number, got None",
        ),
        (b"\0\0", "Invalid JSON: expected value at line 1 column 1"),
    ],
)
def test_a_damaged_line_is_reported_and_skipped(tmp_path: Path, run, capsys, damage: bytes, problem: str) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"event": "step", "step": number}).encode() for number in (1, 2, 3)]
    path.write_bytes(b"\n".join([lines[0], damage, lines[2], b""]))
    assert [event["step"] for event in read_metrics(path)] == [1, 3]
    tracker = JsonLinesTracker(path)
    tracker.start(run(first_step=3))
    tracker.finish()
    assert capsys.readouterr().err.startswith(f"hp-train: {path}, line 2 is damaged and is skipped: {problem}")
    assert [event["event"] for event in read_metrics(path)] == ["step", "step", "start"]


def test_a_resumed_run_retains_events_with_fields_of_other_types(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    given = [{"event": "mine", "loss": "low"}, {"event": "step", "step": 2, "metrics": [1]}, {"event": "st", "step": 4}]
    path.write_text("".join(json.dumps(event) + "\n" for event in given) + '{"event": "st')
    keep_steps(path, 3)
    assert [json.loads(line) for line in path.read_text().splitlines()] == given[:2]
    assert list(read_metrics(path)) == []


def test_progress_without_a_terminal_is_plain_lines(run) -> None:
    stream = io.StringIO()
    tracker = ProgressTracker(interval_seconds=3600, stream=stream)
    tracker.start(run())
    for number in range(1, 5):
        tracker.step(step(number))
    tracker.evaluation(EvaluationRecord(step=4, loss=2.0, tokens=10, seconds=0.1))
    tracker.finish()
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("tiny: 1,234,567 parameters, 2 ranks on torch, run folder ")
    assert lines[1].startswith("step 1/4  loss 1.5000  200 tokens/s  lr 1.00e-03  left 0:0")
    assert lines[2].startswith("step 4/4")  # the first and the last step, and none within the interval
    assert lines[3:] == ["step 4: evaluation loss 2.0000, perplexity 7.389"]
    assert "\x1b" not in stream.getvalue()


def test_progress_on_a_terminal_is_live(run) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    tracker = ProgressTracker(stream=stream)
    tracker.start(run(first_step=1))
    tracker.step(step(2))
    tracker.checkpoint(CheckpointRecord(step=2, folder="step-00000002", seconds=0.1))
    tracker.finish()
    tracker.finish()
    assert "2/4" in stream.getvalue()
    assert "loss 1.5000" in stream.getvalue()
    assert "step 2: checkpoint step-00000002" in stream.getvalue()


def test_seconds_read_as_a_clock() -> None:
    assert [format_seconds(s) for s in (5, 754, 3723)] == ["0:05", "12:34", "1:02:03"]


def test_the_loss_curve_is_a_picture_of_the_whole_run(tmp_path: Path, run) -> None:
    lines = JsonLinesTracker(tmp_path / "metrics.jsonl")
    lines.start(run())
    lines.step(step(1))
    lines.step(step(2, float("inf")))
    lines.evaluation(EvaluationRecord(step=2, loss=2.0, tokens=10, seconds=0.1))
    lines.finish()
    PictureTracker(tmp_path / "metrics.jsonl", tmp_path / "loss.png", draw_loss_curve).finish()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_curve_has_whole_steps_and_its_last_value_in_the_legend() -> None:
    figure = matplotlib.figure.Figure()
    axes = figure.add_subplot()
    draw_losses(axes, [(1, 3.0), (2, 2.0)], [(2, 2.5)])
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["training", "evaluation, last 2.500"]
    assert not axes.texts, "nothing covers the curves"


def test_the_curve_is_smoothed_over_the_steps_before() -> None:
    points = [(3, 4.0), (4, 2.0), (6, 0.0), (7, 1.0)]
    assert running_means(points, 1) == points
    assert running_means(points, 3) == [(3, 4.0), (4, 3.0), (6, 2.0), (7, 1.0)]


def test_no_step_draws_no_picture(tmp_path: Path) -> None:
    draw_loss_curve([], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()
