"""Steps that the guard gives up change nothing, on any number of ranks, and the run goes on."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from training_runs import FOUR_RANKS, events, losses, newest, tensors

from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import LaunchError
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing import run_ranks
from hp_moe import TokenChoiceTopKRouter
from hp_trainer.exceptions import SilentCorruptionError, TrainingError
from hp_trainer.training import Trainer
from hp_trainer.training.health import odd_ranks
from hp_trainer.training.step import OptimizerStep

CLOSE = {"rtol": 2e-5, "atol": 0}


@pytest.fixture
def spoilt(monkeypatch):
    """Multiplies the losses of some steps, by how many a rank has done before."""
    positions: dict[int, float] = {}
    accumulate, agree = OptimizerStep.accumulate_gradients, OptimizerStep.agree

    def accumulate_noted(self, batch):
        self.spoilt_by = positions.get(self.calls, 1.0)
        self.calls += 1
        return accumulate(self, batch)

    def agree_spoilt(self, loss, *flags, **others):
        found, *rest = agree(self, loss, *flags, **others)
        factor, self.spoilt_by = self.spoilt_by, 1.0
        return found * factor, *rest

    monkeypatch.setattr(OptimizerStep, "accumulate_gradients", accumulate_noted)
    monkeypatch.setattr(OptimizerStep, "agree", agree_spoilt)
    monkeypatch.setattr(OptimizerStep, "calls", 0, raising=False)
    monkeypatch.setattr(OptimizerStep, "spoilt_by", 1.0, raising=False)
    return positions


@pytest.mark.parametrize(("degrees", "world_size"), [({}, 1), (FOUR_RANKS["folded"], 4)], ids=["1", "4"])
def test_a_skipped_step_changes_nothing_but_the_position(torch_or, lab, spoilt, degrees, world_size):
    torch_or(world_size == 1)
    spoilt[2] = math.nan
    settings = {"training__guard__on_nonfinite": "skip", "model__load_balance_coeff": None, "training__steps": 4}
    run = lab.run("run", degrees, world_size, **settings)
    steps = events(run, "step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[2]["loss"] == "nan"
    assert [step["metrics"].get("discarded") for step in steps] == [None, None, 1.0, None]
    assert newest(run).state["optimizer_steps"] == 3
    assert newest(run).state["samples"] == 32


def test_scores_that_are_no_numbers_are_named_or_judged_as_the_guard_says(lab, monkeypatch):
    """A run that stops for them names the layer; one that skips gets a loss to judge by."""
    logits, calls = TokenChoiceTopKRouter._logits, []

    def spoilt_logits(self, x):
        calls.append(None)
        return self.ops.mul(logits(self, x), math.nan if len(calls) == 1 else 1.0)

    monkeypatch.setattr(TokenChoiceTopKRouter, "_logits", spoilt_logits)
    settings = {"training__steps": 2, "checkpoint__interval": None}
    with pytest.raises(LaunchError) as caught:
        lab.run("stopped", **settings)
    assert isinstance(caught.value.__cause__, TrainingError)
    message = (
        r"step 1: layers\.\d\.moe, rank 0: routing.scores: expected finite .*; this step changed nothing. Continue from"
    )
    assert re.search(message, str(caught.value))
    calls.clear()
    steps = events(lab.run("skipped", training__guard__on_nonfinite="skip", **settings), "step")
    assert [step["loss"] == "nan" for step in steps] == [True, False]


def test_a_skipped_step_moves_no_expert_bias(lab, spoilt):
    settings = {"training__guard__on_nonfinite": "skip", "training__steps": 1, "checkpoint__interval": None}
    plain = lab.run("plain", **settings)
    spoilt[0] = math.nan
    run = lab.run("run", **settings)
    name = "model.layers.1.moe.expert_bias"
    assert tensors(plain)[name].any()
    assert not tensors(run)[name].any()


@pytest.mark.parametrize(
    ("degrees", "world_size"),
    [({}, 1), (FOUR_RANKS["folded"], 4), ({**FOUR_RANKS["hybrid"], "ep_move_interval": 1}, 4)],
    ids=["1", "4", "4, experts move"],
)
def test_a_run_goes_back_to_its_checkpoint_and_leaves_the_data_out(torch_or, lab, spoilt, degrees, world_size):
    torch_or(world_size == 1)
    spoilt[4] = math.nan
    run = lab.run("run", degrees, world_size, training__guard__on_nonfinite="rollback")
    steps = events(run, "step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6], "each step stands once"
    # Steps 4 and 5 were done twice: of the data read before, none comes again.
    assert [step["samples"] for step in steps] == [8, 16, 24, 48, 56, 64]
    spoilt.clear()
    plain = lab.reference("plain", degrees, world_size)
    assert losses(run)[:3] == losses(plain)[:3]
    # The batch that step 4 then read is that of step 6 of a plain run, on the weights of step 3.
    assert losses(run)[3] != losses(plain)[3]
    assert newest(run).state["samples"] == 64
    assert np.isfinite(losses(run)).all()


@pytest.mark.usefixtures("torch_suffices")
def test_a_spike_is_skipped_and_an_interrupted_run_decides_alike(lab, spoilt):
    rules = {
        "training__guard__on_spike": "skip",
        "training__guard__spike_window": 2,
        "training__guard__spike_sigmas": 20,
        "training__steps": 6,
    }
    spoilt[4] = 100.0
    full = lab.run("full", **rules)
    assert [step["metrics"].get("discarded") for step in events(full, "step")] == [None] * 4 + [1.0, None]
    assert newest(full).state["guard"]["losses"] == [losses(full)[3], losses(full)[5]]
    spoilt.clear()
    spoilt[1] = 100.0  # counted from where it goes on, at step 4
    again = lab.resume(lab.interrupted_copy(full, "again"), **rules)
    assert losses(again) == losses(full)
    for name, value in tensors(full).items():
        np.testing.assert_array_equal(tensors(again)[name], value)


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(lab, spoilt):
    spoilt[1] = math.nan
    with pytest.raises(LaunchError, match="needs a checkpoint to go back to, and there is none yet"):
        lab.run("run", training__guard__on_nonfinite="rollback")


CHECKS = {"training__replay_interval": 2, "training__replica_check_interval": 1, "checkpoint__interval": None}


@pytest.mark.parametrize(("degrees", "size"), [({}, 1), (FOUR_RANKS["folded"], 4)], ids=["1 rank", "4 ranks"])
def test_the_checks_change_nothing(torch_or, lab, degrees, size):
    torch_or(size == 1)
    plain = lab.run("plain", degrees, size, checkpoint__interval=None, training__steps=3)
    checked = lab.run("checked", degrees, size, **CHECKS, training__steps=3)
    assert losses(checked) == losses(plain)
    loads = [[event["metrics"] for event in events(run, "step")] for run in (plain, checked)]
    assert loads[0] == loads[1]
    first, second = tensors(plain), tensors(checked)
    assert all((first[name] == second[name]).all() for name in first)


def flip(platform, model, name_part: str, factor: float) -> None:
    """Change some bits of one element of a weight, as a fault of the memory does."""
    for name, parameter in platform.named_parameters(model):
        if name_part in name:
            local = platform.unwrap(parameter) if isinstance(parameter, DTensor) else parameter
            values = platform.to_numpy(platform.detach(local)).copy()
            values.reshape(-1)[0] *= factor
            with platform.no_grad():
                platform.copy_(local, platform.from_bits(values, local.dtype, platform.device_of(local)))
            return
    raise AssertionError(name_part)


def train_with_a_fault(run, platform, rank: int, where: str) -> None:
    """Train; at the fourth or sixth forward of one rank a bit flips in its weights or its optimizer state."""
    trainer = Trainer(run, run.load_config().config, platform)
    is_faulty = current_world(platform).rank == rank
    accumulate, calls = trainer._step.accumulate_gradients, []

    def faulty(batch):
        calls.append(None)
        # With a replay at every second step: calls of steps 1, 2, 2 again, 3, 4, 4 again.
        if is_faulty and len(calls) == 4 and where == "optimizer":
            exp_avg = next(iter(trainer.setup.optimizer.state().values()))["exp_avg"]
            with platform.no_grad():
                local = platform.unwrap(exp_avg)
                platform.copy_(local, platform.ops.mul(local, 1.5))
        elif is_faulty and len(calls) == (4 if where == "weights" else 6):
            flip(platform, trainer.setup.model, "norm", 1 + 2.0**-20 if where == "weights" else 1.5)
        return accumulate(batch)

    trainer._step.accumulate_gradients = faulty
    trainer.run()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("weights", r"after step 3 the weights of rank 2 differ from its replicas"),
        ("step", r"step 4 computed twice is not the same: .*rank 2 in the loss"),
    ],
)
def test_the_rank_is_named(torch_or, lab, where, message):
    torch_or(where == "weights")
    run = lab.start("run", {"dp_replicate": 4}, **CHECKS, training__steps=6)
    with pytest.raises((LaunchError, SilentCorruptionError), match=message):
        run_ranks(train_with_a_fault, 4, lab.platform, run, lab.platform, 2, where)


@pytest.mark.parametrize("where", ["weights", "optimizer"])
def test_no_checkpoint_is_written_of_replicas_that_differ(torch_or, lab, where):
    """A run that continues from the newest checkpoint is the one without the fault, although no comparison was due."""
    torch_or(where == "optimizer")
    settings = {"training__replica_check_interval": 6, "checkpoint__interval": 1, "checkpoint__keep": 1}
    plain = lab.run("plain", {"dp_replicate": 2}, 2, **settings, training__steps=4)
    run = lab.start("run", {"dp_replicate": 2}, **settings, training__steps=4)
    with pytest.raises(LaunchError, match=r"after step 4 the weights or optimizer states of rank 0, 1 differ"):
        run_ranks(train_with_a_fault, 2, lab.platform, run, lab.platform, 0, where)
    assert newest(run).step == 3
    lab.train(run, 2, newest(run).folder)
    expected, found = tensors(plain), tensors(run)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_of_replicas_the_minority_is_odd():
    assert odd_ranks([{"a": 1}, {"a": 1}, {"a": 2}]) == [2]
    assert odd_ranks([{"a": 1, "b": 5}, {"a": 1, "b": 6}, {"a": 1, "b": 5}, {"c": 9}]) == [1]
    assert odd_ranks([{"a": 1}, {"a": 2}]) == [0, 1]
    assert odd_ranks([{"a": 1}, {"b": 2}]) == []
