"""Ranks die, and the others go on with newcomers: weights, losses and counters are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from running_commands import add_plugin, left_in_shared_memory, losses_of, steps_of

from hp_trainer.checkpoint import Checkpoint, LocalStorage, list_checkpoints
from hp_trainer.metrics import read_metrics
from hp_trainer.report import report_run

pytestmark = pytest.mark.real_ranks

# Without a checkpoint before the last step: it might be newer than the copies.
SETTINGS = (
    "--checkpoint.interval=null",
    "--training.steps=10",
    "--lr_schedule.kind=constant",
    "--training.clip_norm=null",
    "--checkpoint.keep=1",
)
OPTIONS = {
    "training__steps": 10,
    "lr_schedule__kind": "constant",
    "training__clip_norm": None,
    "training__eval_interval": 4,
}


def training_with_deaths(folder, hp_train, monkeypatch):
    """Return a function that trains while ranks are killed, and returns the output of the command."""
    add_plugin(folder, "deaths", Path(__file__).with_name("deaths.py").read_text(), monkeypatch)

    def train(kills: tuple[str, ...], *settings: str, expected: int = 0) -> str:
        shared = set(os.listdir("/dev/shm"))
        monkeypatch.setenv("KILLS", json.dumps(dict.fromkeys(kills, signal.SIGKILL)))
        arguments = (*SETTINGS, "--training.eval_interval=4", "--fault_tolerance.interval=2", *settings)
        code, out, err = hp_train("run", "run.yaml", "--run.folder=out", *arguments).finish()
        assert code == expected, err
        assert sorted(path.name for path in folder.glob("*:*:*")) == sorted(kills), "every rank has died"
        assert left_in_shared_memory(shared) == []
        return out + err

    return train


@pytest.fixture
def dying(folder, hp_train, monkeypatch):
    return training_with_deaths(folder, hp_train, monkeypatch)


def expect_same(run: Path, undisturbed: Path) -> None:
    """The newest checkpoints have the same bits and counters, no step is lost or repeated, and no file is half."""
    (name,) = os.listdir(run / "checkpoints")
    found, expected = (open_newest(path) for path in (run, undisturbed))
    assert name == found.folder
    assert found.index.tensors.keys() == expected.index.tensors.keys()
    for tensor in expected.index.tensors:
        assert found.read(tensor).tobytes() == expected.read(tensor).tobytes(), tensor
    for counter in ("samples", "optimizer_steps", "guard", "loss_scaling"):
        assert found.state[counter] == expected.state[counter]
    assert steps_of(run) == steps_of(undisturbed)


def expect_close(run: Path, undisturbed: Path) -> None:
    """As `expect_same`, but sums over the samples of a step may have another order."""
    found, expected = (open_newest(path) for path in (run, undisturbed))
    assert found.folder == expected.folder
    assert found.index.tensors.keys() == expected.index.tensors.keys()
    for tensor in expected.index.tensors:
        # Second moments of gradients are small.
        np.testing.assert_allclose(found.read(tensor), expected.read(tensor), rtol=1e-3, atol=1e-6, err_msg=tensor)
    for counter in ("samples", "optimizer_steps"):
        assert found.state[counter] == expected.state[counter]
    assert steps_of(run) == steps_of(undisturbed)
    np.testing.assert_allclose(losses_of(run), losses_of(undisturbed), rtol=1e-5)


def open_newest(run: Path) -> Checkpoint:
    storage = LocalStorage(run / "checkpoints")
    return Checkpoint(storage, list_checkpoints(storage)[0])


def test_ranks_die_everywhere_in_a_step_and_their_state_is_in_memory(lab, folder, hp_platform, dying):
    # Sums over two ranks have one order, so simulated ranks have the same bits.
    undisturbed = lab.run("undisturbed", {"dp_shard": 2, "ep": 2}, 2, **OPTIONS)
    # Evaluations, checkpoints and stopped ranks: `nox -s chaos -- --only deaths`.
    kills = ("3:1:forward", "new:1:restore", "5:0:backward", "7:1:optimizer", "8:0:snapshot")
    settings = ("--launch.local_ranks=2", "--parallel.dp_shard=2", "--parallel.ep=2")
    err = dying(kills, *settings, "--fault_tolerance.copies=1", "--fault_tolerance.spares=1")
    # Where all ranks start again, none knows the step; on a busy machine the copy of step 4 may not have arrived.
    lost = "" if hp_platform.name == "mindspore" else " in step 5"
    assert re.search(rf"rank 0 of 2 has died \(SIGKILL\){lost}; training goes on from step [0-4] after ", err)
    assert "without copies" not in err
    expect_same(folder / "out", undisturbed.path)
    assert losses_of(folder / "out") == losses_of(undisturbed.path)


@pytest.mark.usefixtures("torch_suffices")  # elsewhere all ranks start again, as in the test before
def test_two_ranks_die_at_once_and_their_replicas_have_their_state(lab, folder, dying):
    undisturbed = lab.run("undisturbed", {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, 4, **OPTIONS)
    kills = ("3:0:backward", "3:3:backward", "new:3:set-up")
    settings = ("--launch.local_ranks=4", "--parallel.dp_replicate=2", "--parallel.dp_shard=2", "--parallel.ep=2")
    err = dying(kills, *settings, "--fault_tolerance.copies=0")
    assert "without copies" not in err
    expect_same(folder / "out", undisturbed.path)


def test_a_job_in_which_too_many_ranks_have_died_saves_its_state_and_ends(lab, folder, dying):
    settings = ("--launch.local_ranks=2", "--parallel.dp_shard=2", "--parallel.ep=2")
    limits = ("--fault_tolerance.copies=1", "--fault_tolerance.max_deaths=0")
    err = dying(("5:0:backward",), *settings, *limits, expected=1)
    assert "more ranks have died than fault_tolerance.max_deaths = 0, and this state has been saved" in err
    saved = re.search(r"The newest checkpoint is of step ([24]) of 10; continue with `hp-train resume out`", err)
    assert saved, err
    undisturbed = lab.run("undisturbed", {"dp_shard": 2, "ep": 2}, 2, **OPTIONS | {"training__steps": int(saved[1])})
    expect_same(folder / "out", undisturbed.path)


def test_the_complete_replicas_go_on_where_no_rank_is_replaced(lab, folder, dying):
    undisturbed = lab.run("undisturbed", {"dp_replicate": 2}, 2, **OPTIONS)
    settings = ("--launch.local_ranks=2", "--parallel.dp_replicate=2", "--fault_tolerance.max_deaths=0")
    output = dying(("5:0:backward",), *settings, "--fault_tolerance.copies=0", "--metrics.trackers=[jsonl, progress]")
    went_on = r"; training goes on from step [24] after .* s, with 1 of 2 replicas and the same global batch\n"
    assert re.search(r"rank 0 of 2 has died \(SIGKILL\)( in step 5)?" + went_on, output), output
    # By the rank that has become rank 0, on the terminal.
    assert re.search(r"\nstep 10/10 .* 1 of 2 replicas ", output), output
    expect_close(folder / "out", undisturbed.path)
    starts = [event for event in read_metrics(folder / "out" / "metrics.jsonl") if event["event"] == "start"]
    assert [(each["world_size"], each.get("lost_replicas")) for each in starts] == [(2, None), (1, 1)]
    page = report_run(folder / "out").read_text()
    assert "lost replicas" in page
    assert "unknown: " not in page
