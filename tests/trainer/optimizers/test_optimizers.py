"""Every optimizer trains alike in any layout, goes on exactly, and does the arithmetic of its paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
from training_runs import FOUR_RANKS, losses, newest, skip_unless_torch_or, tensors

from hp_trainer.optimizers import (
    SGD,
    Adafactor,
    AdafactorConfig,
    AdamW8bit,
    AdamW8bitConfig,
    Lion,
    LionConfig,
    SGDConfig,
)
from hp_trainer.plugins import registries

OPTIMIZERS = {
    "sgd": {"optimizer": "{name: sgd, lr: 0.05, nesterov: true, weight_decay: 0.1}"},
    "lion": {"optimizer": "{name: lion, lr: 1.0e-3}"},
    "adafactor": {"optimizer": "{name: adafactor}"},
    "muon": {"optimizer": "{name: muon, lr: 5.0e-3}"},
    "adamw_8bit": {"optimizer": "{name: adamw_8bit, lr: 5.0e-3, eps: 1.0e-5, block_size: 8, min_elements: 64}"},
    "groups": {
        "parameter_groups": "[{match: ['*norm*'], weight_decay: 0}, {match: [head.*, embed.*], lr_factor: 0.1}]",
    },
}
SLOTS = {
    "sgd": {"momentum_buffer"},
    "lion": {"exp_avg"},
    "adafactor": {"row", "column", "square"},
    "muon": {"momentum_buffer", "exp_avg", "exp_avg_sq"},
    "adamw_8bit": {"exp_avg", "exp_avg_sq"},
    "groups": {"exp_avg", "exp_avg_sq"},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_alike_in_any_layout_and_goes_on_exactly(lab, name):
    skip_unless_torch_or(lab.platform, name in ("adafactor", "muon"))
    # Two steps after the checkpoint: weights that the loaded state has updated show in the loss of the second.
    settings = {"training__steps": 5, **OPTIMIZERS[name]}
    full = lab.run("full", **settings)
    assert losses(full)[-1] < losses(full)[0]
    saved = tensors(full, ("optimizer.",))
    assert {tensor.rpartition(".")[2] for tensor in saved} == SLOTS[name]
    parts = lab.run("parts", FOUR_RANKS["folded"], 4, **settings)
    # The sign of a number near 0 (Lion), products of matrices (Muon) and the step between two codes make more of a
    # rounding.
    loose = 2e-3 if name in ("lion", "muon", "adamw_8bit") else 1e-4
    np.testing.assert_allclose(losses(parts), losses(full), rtol=loose)
    again = lab.resume(lab.interrupted_copy(full, "again"), **settings)
    assert losses(again) == losses(full)
    moved = lab.resume(lab.interrupted_copy(parts, "moved"), {"dp_shard": 2}, 2, **settings)
    np.testing.assert_allclose(losses(moved), losses(parts), rtol=loose)
    assert tensors(moved, ("optimizer.",)).keys() == saved.keys()


def test_groups_change_rates_and_decay_of_what_they_match(lab):
    groups = "[{match: ['*norm*'], max_dims: 1, lr_factor: 0}]"
    run = lab.run("run", training__steps=2, parameter_groups=groups)
    found = tensors(run, ("model.",))
    norms = [value for name, value in found.items() if "norm" in name]
    assert norms
    assert all((value == 1).all() for value in norms)
    with pytest.raises(Exception, match="no parameter matches nothing"):
        lab.run("unknown", parameter_groups="[{match: [nothing]}]")
    assert newest(run).step == 2


# The arithmetic of each --------------------------------------------------------------------------------------


def steps_of(platform, kind, options, shape, count=3):
    """Weights after a few steps on given gradients, and the gradients."""
    random = np.random.default_rng(5)
    start = random.standard_normal(shape).astype(np.float32)
    parameter = platform.Parameter(platform.from_numpy(start.copy()))
    optimizer = kind([("x", parameter)], options, platform)
    grads = [random.standard_normal(shape).astype(np.float32) for _ in range(count)]
    for grad in grads:
        platform.set_grad(parameter, platform.from_numpy(grad))
        optimizer.step(0.1)
    assert optimizer.num_steps == count
    return start, grads, platform.to_numpy(platform.detach(parameter))


def test_adamw_8bit_needs_nothing_of_a_platform(hp_platform):
    options = AdamW8bitConfig(block_size=8, min_elements=8)

    def own(parameters, options, platform):
        return registries().optimizers.get("adamw_8bit", platform.name).build(parameters, options, platform)

    composed, native = (steps_of(hp_platform, kind, options, (4, 12))[2] for kind in (AdamW8bit, own))
    # The moments of both agree to a rounding, which may be the step between two codes.
    np.testing.assert_allclose(composed, native, rtol=1e-3, atol=1e-3)


def test_sgd(hp_platform):
    options = SGDConfig(momentum=0.9, nesterov=True, weight_decay=0.01)
    x, grads, found = steps_of(hp_platform, SGD, options, (3, 4))
    velocity = 0
    for grad in grads:
        grad = grad + 0.01 * x
        velocity = 0.9 * velocity + grad
        x = x - 0.1 * (grad + 0.9 * velocity)
    np.testing.assert_allclose(found, x, rtol=2e-6)


def test_lion(hp_platform):
    x, grads, found = steps_of(hp_platform, Lion, LionConfig(weight_decay=0.5), (5,))
    momentum = 0
    for grad in grads:
        x = x * (1 - 0.1 * 0.5) - 0.1 * np.sign(0.9 * momentum + 0.1 * grad)
        momentum = 0.99 * momentum + 0.01 * grad
    np.testing.assert_allclose(found, x, rtol=2e-6)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_adafactor(hp_platform, shape):
    x, grads, found = steps_of(hp_platform, Adafactor, AdafactorConfig(weight_decay=0.01), shape)
    row = column = square = 0
    for step, grad in enumerate(grads, 1):
        decay = 1 - step**-0.8
        squares = grad**2 + 1e-30
        if len(shape) == 1:
            square = decay * square + (1 - decay) * squares
            moment = square
        else:
            row = decay * row + (1 - decay) * squares.mean(-1)
            column = decay * column + (1 - decay) * squares.mean(-2)
            moment = (row / row.mean(-1, keepdims=True))[..., None] * column[..., None, :]
        update = grad / np.sqrt(moment)
        update /= max(1, math.sqrt((update**2).mean()))
        x = x * (1 - 0.1 * 0.01) - 0.1 * max(1e-3, math.sqrt((x**2).mean())) * update
    np.testing.assert_allclose(found, x, rtol=1e-5)


def test_every_platform_has_them():
    known = registries().optimizers.names()
    assert {"adamw", "sgd", "lion", "adafactor", "muon"} <= set(known)
