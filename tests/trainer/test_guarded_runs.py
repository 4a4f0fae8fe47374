"""Steps that the guard gives up change nothing, on any number of ranks, and the run goes on."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from training_runs import FOUR_RANKS, events, losses, newest, tensors

from hp_dtensor.exceptions import LaunchError
from hp_moe import TokenChoiceTopKRouter
from hp_trainer.exceptions import TrainingError
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

    def agree_spoilt(self, loss, stop):
        found, stopping = agree(self, loss, stop)
        factor, self.spoilt_by = self.spoilt_by, 1.0
        return found * factor, stopping

    monkeypatch.setattr(OptimizerStep, "accumulate_gradients", accumulate_noted)
    monkeypatch.setattr(OptimizerStep, "agree", agree_spoilt)
    monkeypatch.setattr(OptimizerStep, "calls", 0, raising=False)
    monkeypatch.setattr(OptimizerStep, "spoilt_by", 1.0, raising=False)
    return positions


@pytest.mark.parametrize(("degrees", "world_size"), [({}, 1), (FOUR_RANKS["folded"], 4)], ids=["1", "4"])
def test_a_skipped_step_changes_nothing_but_the_position(lab, spoilt, degrees, world_size):
    spoilt[2] = math.nan
    run = lab.run("run", degrees, world_size, training__guard__on_nonfinite="skip", model__load_balance_coeff=None)
    steps = events(run, "step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[2]["loss"] == "nan"
    assert [step["metrics"].get("given_up") for step in steps] == [None, None, 1.0, None, None, None]
    assert newest(run).state["optimizer_steps"] == 5
    assert newest(run).state["samples"] == 48


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
    told = (
        r"step 1: layers\.\d\.moe, rank 0: routing.scores: expected finite .*; this step changed nothing. Continue from"
    )
    assert re.search(told, str(caught.value))
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
def test_a_run_goes_back_to_its_checkpoint_and_leaves_the_data_out(lab, spoilt, degrees, world_size):
    spoilt[4] = math.nan
    run = lab.run("run", degrees, world_size, training__guard__on_nonfinite="rollback")
    steps = events(run, "step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6], "each step stands once"
    # Steps 4 and 5 were done twice: of the data read before, none comes again.
    assert [step["samples"] for step in steps] == [8, 16, 24, 48, 56, 64]
    spoilt.clear()
    plain = lab.run("plain", degrees, world_size)
    assert losses(run)[:3] == losses(plain)[:3]
    # The batch that step 4 then read is that of step 6 of a plain run, on the weights of step 3.
    assert losses(run)[3] != losses(plain)[3]
    assert newest(run).state["samples"] == 64
    assert np.isfinite(losses(run)).all()


def test_a_spike_is_skipped_and_an_interrupted_run_decides_alike(lab, spoilt):
    rules = {
        "training__guard__on_spike": "skip",
        "training__guard__spike_window": 2,
        "training__guard__spike_sigmas": 20,
        "training__steps": 6,
    }
    spoilt[4] = 100.0
    whole = lab.run("whole", **rules)
    assert [step["metrics"].get("given_up") for step in events(whole, "step")] == [None] * 4 + [1.0, None]
    assert newest(whole).state["guard"]["losses"] == [losses(whole)[3], losses(whole)[5]]
    spoilt.clear()
    spoilt[1] = 100.0  # counted from where it goes on, at step 4
    again = lab.resume(lab.interrupted_copy(whole, "again"), **rules)
    assert losses(again) == losses(whole)
    for name, value in tensors(whole).items():
        np.testing.assert_array_equal(tensors(again)[name], value)


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(lab, spoilt):
    spoilt[1] = math.nan
    with pytest.raises(LaunchError, match="needs a checkpoint to go back to, and there is none yet"):
        lab.run("run", training__guard__on_nonfinite="rollback")
