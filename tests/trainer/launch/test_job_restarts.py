"""A failed run starts again from the newest checkpoint; the loss curve is that of a run without any."""

from __future__ import annotations

import shutil
import signal

import numpy as np
import pytest
from running_commands import TWO_RANKS, add_plugin, losses_of, newest_step, steps_of
from training_runs import skip_unless_torch_or

from hp_trainer.checkpoint import Checkpoint, LocalStorage, list_checkpoints
from hp_trainer.run import RunFolder

pytestmark = pytest.mark.real_ranks


# A run may be over before a test that watches it kills anything: it does so itself, once for each file.
KILLER = """\
import os, signal, time
from pathlib import Path

from hp_trainer.plugins import hookimpl


@hookimpl
def hp_before_step(record):
    rank, parent, own = os.environ["RANK"], Path("kill-launcher"), Path("kill-rank-1")
    if rank == "0" and record.step == 2 and parent.exists():
        parent.unlink()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    if rank == "1" and record.step == 7 and own.exists():
        own.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_that_are_killed_start_again_and_train_the_same_curve(folder, lab, hp_train, hp_platform, monkeypatch):
    # Ranks that are killed, and runs that go on, are tested elsewhere on every platform.
    skip_unless_torch_or(hp_platform, False)
    settings = ("--training.steps=24", "--lr_schedule.kind=constant", "--checkpoint.interval=4", *TWO_RANKS)
    options = {"training__steps": 24, "lr_schedule__kind": "constant", "checkpoint__interval": 4}
    # Sums over two ranks have one order, so simulated ranks have the same bits.
    undisturbed = lab.run("undisturbed", {"dp_shard": 2, "ep": 2}, 2, **options)

    add_plugin(folder, "killer", KILLER, monkeypatch)
    # Killed before its first checkpoint: the same command starts it again.
    run = folder / "out"
    (folder / "kill-launcher").touch()
    first = hp_train("run", "run.yaml", "--run.folder=out", *settings, "--checkpoint.interval=1000")
    assert first.finish()[0] == -signal.SIGKILL
    assert steps_of(run) == [1]
    assert list_checkpoints(LocalStorage(run / "checkpoints")) == []

    (folder / "kill-rank-1").touch()
    command = hp_train("run", "run.yaml", "--run.folder=out", *settings, "--launch.max_restarts=1")
    code, _, err = command.finish()
    assert code == 0, err
    assert "rank 1 of 2 was killed by SIGKILL" in err
    assert "restarting the ranks from step " in err
    assert (run / "logs" / "rank1.failed-1.log").is_file()
    assert steps_of(run) == list(range(1, 25))
    assert losses_of(run) == losses_of(undisturbed.path)

    # Once done it stays done, whatever calls it again.
    code, out, err = hp_train("run", "run.yaml", "--run.folder=out", *settings).finish()
    assert (code, steps_of(run)) == (0, list(range(1, 25))), err
    assert out.endswith("run folder: out\n")


@pytest.mark.usefixtures("torch_suffices")
def test_a_rank_that_cannot_go_on_is_not_started_again_and_again(folder, hp_train):
    settings = ("--optimizer.lr=1e12", "--training.clip_norm=null", "--training.steps=40", "--checkpoint.interval=1")
    command = hp_train("run", "run.yaml", "--run.folder=out", *settings, "--launch.max_restarts=5")
    code, _, err = command.finish()
    assert code == 1
    assert "restarting the ranks" not in err
    # Either the numbers that the step has made are found when they are saved, or by the next step's loss.
    assert "not finite" in err or " is nan; this step changed nothing" in err or " is inf; this step" in err
    # What was saved before can be resumed.
    for name in list_checkpoints(LocalStorage(folder / "out" / "checkpoints")):
        weights = RunFolder(folder / "out").checkpoints / name
        assert all(np.isfinite(array).all() for array in read_all(weights)), name


def read_all(folder):
    checkpoint = Checkpoint(LocalStorage(folder.parent), folder.name)
    return [checkpoint.read(name) for name in checkpoint.index.tensors]


def test_a_run_goes_back_to_an_earlier_step(folder, lab, hp_train, hp_platform):
    skip_unless_torch_or(hp_platform, False)
    lab.run("out", training__steps=6, checkpoint__interval=2)
    before = losses_of(folder / "out")
    shutil.copytree(folder / "out", folder / "copy")
    code, _, err = hp_train("resume", "out", "--from-step", "2").finish()
    assert code == 0, err
    assert losses_of(folder / "out") == before
    assert newest_step(folder / "out") == 6
    code, _, err = hp_train("resume", "copy", "--from-step=2", "--optimizer.lr=1e-4").finish()
    assert code == 0, err
    assert losses_of(folder / "copy")[:3] == before[:3], "the rate acts from the third step's update on"
    assert losses_of(folder / "copy")[3:] != before[3:]
    code, out, _ = hp_train("checkpoints", "out").finish()
    assert code == 0
    assert out.count("valid") == 5
    assert f"{before[5]:.4f}" in out
