"""A slow rank is named by the progress line, the metrics and the report; an undisturbed run names none."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
from running_commands import add_plugin
from training_runs import Lab

from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.testing import run_ranks
from hp_trainer._coordination import StopRequest
from hp_trainer.metrics import read_metrics
from hp_trainer.run import RunFolder
from hp_trainer.training import Trainer

SLOW = """\
import os
import statistics
import time

from hp_trainer.data import BatchReader
from hp_trainer.plugins import hookimpl
from hp_trainer.training.step import OptimizerStep

FIRST = 21
_step, _usual, _seconds = 0, [], 0.0


def wrap(owner, name):
    call = getattr(owner, name)

    def slow(*arguments, **named):
        if _step >= FIRST:
            time.sleep(_seconds)
        return call(*arguments, **named)

    setattr(owner, name, slow)


@hookimpl
def hp_after_step(record):
    global _step, _seconds
    # Of the next step.
    _step = record.step + 1
    if 10 < record.step < FIRST:
        _usual.append(record.seconds)
        _seconds = max(0.1, 2.5 * statistics.median(_usual))


if os.environ.get("RANK") == os.environ.get("SLOW_RANK"):
    if os.environ["SLOW_IN"] == "data":
        wrap(BatchReader, "read")
    else:
        wrap(OptimizerStep, "loss_sum")
"""
# Its steps sleep for times of the usual ones, which are long on a busy machine.
END_SECONDS = 600
SETTINGS = (
    "--launch.local_ranks=2",
    "--training.steps=50",
    "--training.eval_interval=null",
    "--checkpoint.interval=null",
    "--metrics.trackers=[jsonl,{name: progress, interval_seconds: 0}]",
    # A busy machine stops processes for longer than their steps take.
    "--metrics.straggler_factor=2",
)


@pytest.mark.real_ranks
@pytest.mark.parametrize(("rank", "work"), [(1, "forward"), (0, "data")])
def test_a_slow_rank_is_named_with_its_first_slow_step(
    hp_platform, folder, hp_train, monkeypatch, rank: int, work: str
) -> None:
    # Each takes 20 seconds, so one is chosen per platform.
    if (work == "forward") != (hp_platform.name == "torch") and "HP_ALL_CASES" not in os.environ:
        pytest.skip("all cases in the session `proof`")
    add_plugin(folder, "slow", SLOW, monkeypatch)
    monkeypatch.setenv("SLOW_RANK", str(rank))
    monkeypatch.setenv("SLOW_IN", work)
    code, out, err = hp_train("run", "run.yaml", "--run.folder=out", *SETTINGS).finish(END_SECONDS)
    assert code == 0, err
    named = set(re.findall(r"(rank \d+) [\d.]+x slower since step (\d+) \((\w+)\)", out))
    assert named == {(f"rank {rank}", "21", work)}
    steps = [event for event in read_metrics(folder / "out" / "metrics.jsonl") if event["event"] == "step"]
    assert [event["step"] for event in steps if event.get("stragglers")] == [50]
    assert [event["step"] for event in steps if event.get("rank_seconds")] == list(range(10, 51, 10))
    times, other = steps[-1]["rank_seconds"], 1 - rank
    assert times[work][rank] > 0.05 + times[work][other]
    # The others wait for it, and it does not wait for them.
    assert times["waiting"][other] > times["waiting"][rank]
    code, _, err = hp_train("report", "out").finish()
    assert code == 0, err
    report = (folder / "out" / "report.html").read_text()
    assert re.search(
        rf"Slow ranks.*<td>{rank}</td><td>21</td><td>50</td><td>[\d.]+</td><td>{work}</td>", report, re.DOTALL
    )


@pytest.mark.real_ranks
@pytest.mark.usefixtures("torch_suffices")
def test_an_undisturbed_run_names_no_rank(folder, hp_train) -> None:
    code, out, err = hp_train("run", "run.yaml", "--run.folder=out", *SETTINGS).finish(END_SECONDS)
    assert code == 0, err
    assert "slower" not in out
    steps = [event for event in read_metrics(folder / "out" / "metrics.jsonl") if event["event"] == "step"]
    assert not any("stragglers" in event for event in steps)


@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"pp": 2}], ids=["shards", "stages"])
def test_times_need_no_collective_and_change_no_loss(lab: Lab, degrees: dict[str, Any]) -> None:
    run = lab.start("run", degrees, training__steps=20, metrics__trackers="[]")
    found = {
        factor: run_ranks(train, 2, lab.platform, run, lab.platform, factor, timeout_seconds=900)
        for factor in (None, 1.5)
    }
    assert found[1.5] == found[None]


def train(run: RunFolder, platform: Any, factor: float | None) -> tuple[list[str], list[float | None]]:
    """Return the collectives and losses of eleven steps."""
    config = run.load_config().config
    config = replace(config, metrics=replace(config.metrics, straggler_factor=factor))
    trainer, losses = Trainer(run, config, platform), []
    with record_collectives() as log:
        for _ in range(11):
            trainer.train_step(StopRequest())
            losses.append(trainer._last.loss)
    assert bool(trainer._step.times._is_warm) == (factor is not None)
    return [record.name for record in log.records], losses
