"""Trackers with libraries of their own: a run and its resume are one run there, with every step's numbers."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import io
import math
import shutil
import socket
import struct
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hp_trainer.config import parse_config
from hp_trainer.exceptions import ConfigError, TrainingError
from hp_trainer.metrics import BackgroundTracker, Tracker
from hp_trainer.metrics.libraries import (
    MlflowConfig,
    MlflowTracker,
    TensorBoardConfig,
    TensorBoardTracker,
    WandbConfig,
    WandbTracker,
)
from hp_trainer.metrics.tracker import JsonLinesTracker, evaluation_scalars, read_metrics, step_scalars
from hp_trainer.records import EvaluationRecord, RunRecord, StepRecord
from hp_trainer.registries import Registries

RUN_ID = "0123456789ab"


@pytest.fixture
def started(tmp_path: Path, registered: Registries) -> Callable[[int], RunRecord]:
    config = parse_config("model: {name: tiny}\ntraining: {steps: 4}\n", registered=registered).config

    def started(first_step: int) -> RunRecord:
        return RunRecord(
            folder=tmp_path, config=config, platform="torch", rank=0, world_size=2, first_step=first_step,
            num_parameters=1234,
        )  # fmt: skip

    return started


def step(number: int, loss: float) -> StepRecord:
    return StepRecord(
        step=number, learning_rate=1e-3, tokens=100, samples=8 * number, loss=loss, seconds=0.5,
        metrics={"load_variation": 0.25},
    )  # fmt: skip


def run_and_resume(make: Callable[[], Tracker], started: Callable[[int], RunRecord]) -> None:
    """Steps 1 to 3, then a resume from step 2 to the end; step 3 is done twice."""
    first = make()
    first.start(started(0))
    for number in (1, 2, 3):
        first.step(step(number, 4.0 - number))
    first.finish()
    second = make()
    second.start(started(2))
    for number in (3, 4):
        second.step(step(number, 0.5 * number))
    second.evaluation(EvaluationRecord(step=4, loss=2.0, tokens=10, seconds=0.1))
    second.finish()


def test_numbers_that_were_not_taken_are_left_out() -> None:
    assert step_scalars(step(2, 1.5)) == {
        "train/loss": 1.5,
        "train/learning_rate": 1e-3,
        "train/tokens_per_second": 200.0,
        "train/samples": 16.0,
        "train/load_variation": 0.25,
    }


def test_perplexity_of_a_loss_that_overflows_is_finite() -> None:
    record = EvaluationRecord(step=1, loss=1000.0, tokens=1, seconds=0.1)
    assert math.isfinite(evaluation_scalars(record)["evaluation/perplexity"])


def test_tensorboard_has_each_number_and_hides_repeated_steps(tmp_path: Path, started) -> None:
    run_and_resume(lambda: TensorBoardTracker(tmp_path / "events"), started)
    events = [event for path in sorted((tmp_path / "events").iterdir()) for event in read_events(path)]
    losses = [
        (event.step, value.simple_value)
        for event in events
        for value in event.summary.value
        if value.tag == "train/loss"
    ]
    assert sorted(losses) == [(1, 3.0), (2, 2.0), (3, 1.0), (3, 1.5), (4, 2.0)]
    purges = [event.step for event in events if event.session_log.status == event.session_log.START]
    assert 3 in purges  # TensorBoard drops what it read before of steps from 3 on
    assert any("name: tiny" in str(value.tensor) for event in events for value in event.summary.value)


def read_events(path: Path) -> Iterator:
    """The records of an event file: a length, its checksum, the event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


@pytest.fixture(scope="module")
def empty_mlflow_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of MLflow without runs, whose tables take five seconds to create."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def mlflow_store(empty_mlflow_store: Path, tmp_path: Path) -> None:
    """A store of MLflow in the folder of the run."""
    shutil.copy(empty_mlflow_store, tmp_path)


@pytest.mark.usefixtures("mlflow_store")
def test_mlflow_has_one_run_with_every_step(tmp_path: Path, started) -> None:
    from mlflow.tracking import MlflowClient

    run_and_resume(lambda: MlflowTracker(MlflowConfig(), RUN_ID, tmp_path), started)
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("hp-train").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["training.steps"] == "4"
    history = sorted((each.step, each.value) for each in client.get_metric_history(run.info.run_id, "train/loss"))
    assert history == [(1, 3.0), (2, 2.0), (3, 1.0), (3, 1.5), (4, 2.0)]
    assert run.data.metrics["evaluation/loss"] == 2.0


@pytest.mark.usefixtures("mlflow_store")
def test_mlflow_store_that_fails_does_not_end_the_training(tmp_path: Path, started, capsys) -> None:
    tracker = MlflowTracker(MlflowConfig(), RUN_ID, tmp_path)
    tracker.start(started(0))
    tracker._run = "no such run"
    tracker.step(step(1, 1.0))
    tracker.step(step(2, 1.0))
    tracker.finish()
    assert capsys.readouterr().err.count("MLflow does not accept metrics") == 1


class Blocking(Tracker):
    """Notes what it is told; one of its methods waits until the test ends."""

    def __init__(self, where: str, told: list[object]) -> None:
        self._where, self._told, self.free = where, told, threading.Event()

    def _note(self, where: str, what: object) -> None:
        if where == self._where:
            self.free.wait()
        self._told.append(what)

    def start(self, run: RunRecord) -> None:
        self._note("start", "start")

    def step(self, record: StepRecord) -> None:
        self._note("step", record.step)

    def finish(self) -> None:
        self._note("finish", "finish")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nowhere", None),
        ("start", "does not answer since 0.2 s"),
        ("step", "is behind by 2 records, and further ones are dropped"),
        ("finish", "has not taken all metrics within 0.2 s"),
    ],
)
def test_a_tracker_that_blocks_does_not_block_training(
    started, capsys, monkeypatch: pytest.MonkeyPatch, where: str, message: str | None
) -> None:
    told: list[object] = []
    inner = Blocking(where, told)
    tracker = BackgroundTracker(inner, "slow")
    if message is not None:
        for name, value in (("START_SECONDS", 0.2), ("FINISH_SECONDS", 0.2), ("MOST_PENDING", 2)):
            monkeypatch.setattr(BackgroundTracker, name, value)
    tracker.start(started(0))
    for number in range(1, 6 if where != "finish" else 2):
        tracker.step(step(number, 1.0))
    tracker.finish()
    err = capsys.readouterr().err
    if message is None:
        assert (told, err) == (["start", 1, 2, 3, 4, 5, "finish"], "")
    else:
        assert err == f"hp-train: tracker slow {message}; training continues\n"
    inner.free.set()


def test_a_tracker_that_starts_after_the_end_of_training_is_finished(started, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    inner = Blocking("start", told)
    tracker = BackgroundTracker(inner, "late")
    monkeypatch.setattr(BackgroundTracker, "START_SECONDS", 0.05)
    tracker.start(started(0))
    tracker.step(step(1, 1.0))
    thread = tracker._thread
    tracker.finish()
    inner.free.set()
    thread.join(10)
    assert (told, thread.is_alive()) == (["start", 1, "finish"], False)


def test_a_failure_after_a_delay_is_named(started, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowThenFailing(Blocking):
        def step(self, record: StepRecord) -> None:
            self.free.wait()
            raise OSError("no route to host")

    inner = SlowThenFailing("nowhere", [])
    monkeypatch.setattr(BackgroundTracker, "MOST_PENDING", 1)
    tracker = BackgroundTracker(inner, "far")
    tracker.start(started(0))
    for number in range(4):
        tracker.step(step(number, 1.0))
    thread = tracker._thread
    inner.free.set()
    thread.join(10)
    first, second = capsys.readouterr().err.splitlines()
    assert "is behind by 1 records" in first
    assert "has failed: OSError: no route to host" in second


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_training_goes_on_if_a_warning_cannot_be_printed(
    started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text("damaged\n")
    monkeypatch.setattr(BackgroundTracker, "MOST_PENDING", 1)
    monkeypatch.setattr(BackgroundTracker, "FINISH_SECONDS", 0.2)
    lines, slow = (
        JsonLinesTracker(tmp_path / "metrics.jsonl"),
        BackgroundTracker(blocking := Blocking("step", []), "slow"),
    )
    monkeypatch.setattr("sys.stderr", Full())
    for tracker in (lines, slow):
        tracker.start(started(0))
        for number in range(1, 5):
            tracker.step(step(number, 1.0))
        tracker.finish()
    blocking.free.set()
    events = read_metrics(tmp_path / "metrics.jsonl")
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4]


def test_a_tracker_that_fails_is_named(started, capsys) -> None:
    class Failing(Tracker):
        def step(self, record: StepRecord) -> None:
            raise OSError("no route to host\nin two lines")

    tracker = BackgroundTracker(Failing(), "far")
    for _ in range(2):  # as after a rollback
        tracker.start(started(0))
        tracker.step(step(1, 1.0))
        tracker.step(step(2, 1.0))
        tracker.finish()
    (line,) = set(capsys.readouterr().err.splitlines())
    assert line == "hp-train: tracker far has failed: OSError: no route to host; training continues"


def test_a_tracker_that_cannot_start_ends_the_run_before_its_first_step(started) -> None:
    class Refused(Tracker):
        def start(self, run: RunRecord) -> None:
            raise ConnectionRefusedError("connection refused")

    expected = (
        r"^tracker far cannot start: ConnectionRefusedError: connection refused; repair it, or leave it out of "
        r"metrics\.trackers$"
    )
    tracker = BackgroundTracker(Refused(), "far")
    with pytest.raises(TrainingError, match=expected):
        tracker.start(started(0))
    tracker.finish()


def test_a_silent_mlflow_server_is_named(
    registered: Registries, started, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BackgroundTracker, "START_SECONDS", 0.5)
    run = types.SimpleNamespace(run_id=RUN_ID, path=tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        tracker = registered.trackers.get("mlflow").build(MlflowConfig(tracking_uri=uri), run)
        tracker.start(started(0))
        tracker.step(step(1, 1.0))
        tracker.finish()
    assert "hp-train: tracker mlflow does not answer since 0.5 s; training continues" in capsys.readouterr().err


def test_wandb_writes_its_files_offline(tmp_path: Path, started, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    # Once: wandb names a folder by the second of its making, and a resume within a second would take the same.
    tracker = WandbTracker(WandbConfig(mode="offline"), RUN_ID)
    tracker.start(started(0))
    tracker.step(step(1, 3.0))
    tracker.evaluation(EvaluationRecord(step=1, loss=2.0, tokens=10, seconds=0.1))
    tracker.finish()
    importlib.import_module("wandb").teardown()  # as at the end of a process: its writer has written everything
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{RUN_ID}/run-{RUN_ID}.wandb"))
    assert files
    content = b"".join(path.read_bytes() for path in files)
    for name in (b"train/loss", b"evaluation/loss", b"learning_rate"):
        assert name in content


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("mlflow", "mlflow")]
)
def test_tracker_without_its_library_is_refused_before_the_run(
    name: str, module: str, registered: Registries, monkeypatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda each: None if each == module else found(each))
    with pytest.raises(ConfigError, match=rf"metrics.trackers\[0\].*{module}") as refused:
        parse_config(
            f"model: {{name: tiny}}\ntraining: {{steps: 4}}\nmetrics: {{trackers: [{name}]}}\n", registered=registered
        )
    assert f"hp-trainer[{name}]" in str(refused.value)


def test_options_of_trackers(registered: Registries) -> None:
    text = "metrics: {trackers: [{name: tensorboard, folder: events}, {name: wandb, mode: offline}]}"
    config = parse_config(f"model: {{name: tiny}}\ntraining: {{steps: 4}}\n{text}\n", registered=registered).config
    first, second = config.metrics.trackers
    assert (first.options, second.options.mode) == (TensorBoardConfig(folder="events"), "offline")
