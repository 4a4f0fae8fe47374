"""Label smoothing and z-loss: their sums, in every layout, and in training alone."""

from __future__ import annotations

import numpy as np
import pytest
from training_runs import FOUR_RANKS, events, losses

from hp_trainer.models.base import TokenLoss

SETTINGS = {"training__label_smoothing": 0.1, "training__z_loss": 1e-2, "training__eval_interval": 6}


def test_the_terms_are_those_of_their_papers(hp_platform):
    random = np.random.default_rng(0)
    logits, targets = random.standard_normal((5, 7)).astype(np.float32) * 3, np.array([0, 6, -100, 2, 2])
    taken = targets != -100
    log_z = np.log(np.exp(logits.astype(np.float64)).sum(1))
    likelihood = logits - log_z[:, None]
    smooth = np.full((5, 7), 0.1 / 7)
    smooth[np.arange(5)[taken], targets[taken]] += 0.9
    expected = -(smooth * likelihood).sum(1)[taken].sum() + 1e-2 * (log_z[taken] ** 2).sum()
    given = [hp_platform.from_numpy(x) for x in (logits, targets)]
    loss = TokenLoss(0.1, 1e-2)
    assert float(hp_platform.to_numpy(hp_platform.detach(loss.summed(hp_platform, *given)))) == pytest.approx(expected)
    with hp_platform.no_grad():
        plain = float(hp_platform.to_numpy(loss.summed(hp_platform, *given)))
    assert plain == pytest.approx(-likelihood[np.arange(5)[taken], targets[taken]].sum())


@pytest.mark.usefixtures("torch_suffices")
def test_every_layout_has_the_same_losses(lab):
    full_value = lab.run("full", **SETTINGS)
    parts = lab.run("parts", FOUR_RANKS["folded"], 4, **SETTINGS)
    np.testing.assert_allclose(losses(parts), losses(full_value), rtol=2e-5)
    plain = lab.run("plain", training__steps=1)
    # log(Z) is near log(256) at first.
    assert losses(full_value)[0] - losses(plain)[0] == pytest.approx(1e-2 * np.log(256) ** 2, rel=0.1)
    evaluated = [events(run, "evaluation")[0]["loss"] for run in (full_value, parts)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=2e-5)
    assert evaluated[0] < losses(full_value)[-1] - 0.1, "evaluation is the cross entropy alone"
