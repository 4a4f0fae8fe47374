"""Checkpoints written while training goes on: the same ones, and training waits for the copy alone."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from long_runs import assert_constant, train
from training_runs import FOUR_RANKS, events, losses, newest, train_rank

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.testing import run_ranks
from hp_trainer.checkpoint import Checkpoint, LocalStorage, list_checkpoints
from hp_trainer.metrics import read_metrics
from hp_trainer.plugins import hookimpl
from hp_trainer.run import checkpoint_storage

SETTINGS = {"checkpoint__interval": 1, "training__steps": 4}
PATIENCE = 300.0  # for what takes milliseconds on an idle machine


class SlowStorage(LocalStorage):
    """A disk on which a shard takes its time."""

    seconds = 0.0
    failing = False
    writing = 0
    until: threading.Event | None = None

    def write_file(self, folder, file, parts):
        if file.startswith("shard"):
            type(self).writing += 1
            time.sleep(self.seconds)
            if self.until is not None and not self.until.wait(PATIENCE):
                raise OSError("training does not go on")
            if self.failing:
                raise OSError(28, "No space left on device")
        return super().write_file(folder, file, parts)


@pytest.fixture
def slow(monkeypatch):
    def storage(run, config):
        return SlowStorage(run.checkpoints)

    monkeypatch.setattr("hp_trainer.training.trainer.checkpoint_storage", storage)
    yield SlowStorage
    SlowStorage.seconds, SlowStorage.failing, SlowStorage.writing, SlowStorage.until = 0.0, False, 0, None


@pytest.mark.parametrize(("degrees", "size"), [({}, 1), (FOUR_RANKS["folded"], 4)], ids=["1 rank", "4 ranks"])
def test_every_checkpoint_is_that_of_its_step(torch_or, lab, slow, degrees, size):
    torch_or(size == 4)
    plain = lab.run("plain", degrees, size, **SETTINGS)
    slow.seconds = 0.3
    run = lab.run("background", degrees, size, **SETTINGS, checkpoint__background=True)
    assert losses(run) == losses(plain)
    for name in list_checkpoints(LocalStorage(plain.checkpoints)):
        expected, got = (Checkpoint(LocalStorage(each.checkpoints), name) for each in (plain, run))
        got.verify()
        assert got.index.tensors.keys() == expected.index.tensors.keys()
        assert all(np.array_equal(got.read(key), expected.read(key)) for key in expected.index.tensors), name
    assert [event["step"] for event in events(run, "checkpoint")] == [1, 2, 3, 4]


@pytest.mark.usefixtures("torch_suffices")
def test_training_waits_for_the_copy_alone(lab, slow, plugged):
    slow.until = threading.Event()

    class Later:
        @hookimpl
        def hp_before_step(self, record) -> None:
            if record.step == 6:
                slow.until.set()

    plugged(Later())
    settings = {"checkpoint__interval": 3, "training__steps": 9}
    run = lab.start("run", {}, **settings, checkpoint__background=True, checkpoint__keep=3)
    lab.train(run, 1)
    first = events(run, "checkpoint")[0]
    assert 0 < first["waited_seconds"] < first["seconds"]
    # The first one could not be written before the sixth step began.
    assert [event["event"] for event in events_in_order(run)][:5] == ["step"] * 5
    assert [event["step"] for event in events(run, "checkpoint")] == [3, 6, 9]
    assert newest(run).step == 9


def events_in_order(run):
    return [event for event in read_metrics(run.metrics_file) if event["event"] in ("step", "checkpoint")]


def test_a_failed_write_ends_the_run_and_leaves_the_checkpoint_before(lab, slow):
    run = lab.run("run", {"dp_shard": 2}, 2, training__steps=2)
    slow.failing = True
    run.write_config(
        lab.config({"dp_shard": 2}, training__steps=6, checkpoint__interval=1, checkpoint__background=True)
    )
    with pytest.raises(LaunchError, match=r"writing a checkpoint failed; rank \d: .*the disk is full"):
        run_ranks(train_rank, 2, lab.platform, run, lab.platform, newest(run).folder)
    slow.failing = False
    assert list_checkpoints(LocalStorage(run.checkpoints)) == ["step-00000002"]


def test_a_crash_while_it_is_written_leaves_the_one_before(lab, slow, plugged):
    class Crash:
        @hookimpl
        def hp_before_step(self, record) -> None:
            if record.step == 3:
                raise RuntimeError("crash")

    run = lab.start("run", {}, training__steps=6, checkpoint__interval=1, checkpoint__background=True)
    plugged(Crash())
    slow.seconds = 0.5
    with pytest.raises((RuntimeError, LaunchError), match="crash"):
        lab.train(run, 1)
    assert newest(run).step == 1
    deadline = time.monotonic() + PATIENCE
    while any(thread.name == "checkpoint" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    storage = checkpoint_storage(run, run.load_config().config)
    assert list_checkpoints(storage) == ["step-00000001"]
    assert not any(".incomplete-" in name for name in storage.list_folders()), "a run that fails deletes its own"


def test_the_best_checkpoints_stay_beside_the_newest(lab):
    settings = {"training__steps": 6, "training__eval_interval": 2, "checkpoint__interval": 1, "optimizer__lr": 0.5}
    run = lab.run("run", {}, **settings, checkpoint__keep=1, checkpoint__keep_best=2)
    evaluated = {event["step"]: event["loss"] for event in events(run, "evaluation")}
    best = sorted((step for step in evaluated if step != 6), key=lambda step: evaluated[step])[:2]
    storage = LocalStorage(run.checkpoints)
    retained = [Checkpoint(storage, name).step for name in list_checkpoints(storage)]
    assert retained == sorted({6, *best}, reverse=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_run_with_its_checkpoints_in_an_object_store_goes_on(torch_or, lab, background):
    torch_or(background)
    where = f"{{name: object_store, url: 'memory://{lab.folder}'}}"
    settings = {"checkpoint__storage": where, "checkpoint__background": background}
    plain = lab.run("plain", {"dp_shard": 2}, 2, training__steps=4)
    run = lab.run("run", {"dp_shard": 2}, 2, training__steps=4, **settings)
    assert list(run.checkpoints.iterdir()) == []
    assert newest(run).step == 4
    lab.resume(run, {"dp_shard": 2}, 2, training__steps=6, **settings)
    assert losses(run)[:4] == losses(plain)
    assert newest(run).step == 6


@pytest.mark.usefixtures("torch_suffices")
def test_a_run_holds_no_more_after_many_checkpoints(lab, plugged):
    # The full length, not in the background too, is in proof_long_runs.py.
    assert_constant(train(lab, plugged, checkpoints=12, steps_each=1, background=True), memory=64 << 20)
