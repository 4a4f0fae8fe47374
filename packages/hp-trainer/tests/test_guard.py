"""Rules for losses: what is a spike, what is done about it, and that a resumed run decides alike."""

from __future__ import annotations

import json
import math

import pytest

from hp_trainer.config import GuardConfig
from hp_trainer.exceptions import CheckpointError, TrainingError
from hp_trainer.training.health import GO_ON, LossGuard


def guard_after(losses: list[float], **rules: object) -> LossGuard:
    guard = LossGuard(GuardConfig(**rules))
    for loss in losses:
        assert guard.judge_loss(loss, 1) is GO_ON
        guard.accept(loss)
    return guard


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_stops_by_default(loss: float) -> None:
    guard = guard_after([2.0])
    with pytest.raises(TrainingError, match=f"the loss of step 7 is {loss}; this step changed nothing"):
        guard.judge_loss(loss, 7)
    with pytest.raises(TrainingError, match=f"the norm of the gradient of step 7 is {loss}; this step"):
        guard.judge_norm(loss, 7)


def test_a_spike_is_far_above_the_window() -> None:
    losses = [2.0, 2.2, 1.8, 2.0]
    guard = guard_after(losses, on_spike="skip", spike_window=4, spike_sigmas=3.0)
    limit = 2.0 + 3 * 0.02**0.5
    assert guard.judge_loss(limit - 1e-6, 5) is GO_ON
    verdict = guard.judge_loss(limit + 1e-6, 5)
    assert verdict.action == "skip"
    assert "the loss of step 5 is 2.424, far above the mean 2 of the last 4 steps" in str(verdict)
    assert guard_after(losses, spike_window=4).judge_loss(100.0, 5) is GO_ON
    young = guard_after(losses[:3], on_spike="stop", spike_window=4)
    assert young.judge_loss(100.0, 4) is GO_ON


def test_a_run_that_gives_up_too_often_stops() -> None:
    guard = guard_after([2.0], on_nonfinite="skip", max_interventions=2)
    assert [guard.judge_loss(math.nan, 2).action, guard.judge_norm(math.inf, 3).action] == ["skip", "skip"]
    with pytest.raises(TrainingError, match="after 2 steps in a row that were discarded"):
        guard.judge_loss(math.nan, 4)
    guard.accept(2.0)
    assert guard.judge_loss(math.nan, 6).action == "skip"


def test_a_resumed_guard_decides_alike() -> None:
    rules = {"on_spike": "rollback", "spike_window": 3, "max_interventions": 2}
    guard = guard_after([2.0, 2.1, 1.9, 2.0], **rules)
    guard.judge_loss(9.0, 5)
    other = LossGuard(GuardConfig(**rules))
    other.load_state(json.loads(json.dumps(guard.state())))
    assert other.state() == guard.state() == {"losses": [2.1, 1.9, 2.0], "interventions": 1}
    with pytest.raises(CheckpointError, match=r"state\.guard"):
        other.load_state({"losses": "many"})
