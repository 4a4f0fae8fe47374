"""Auxiliary losses of experts, and the router's noise, are the same in every layout, precision and check of a run."""

from __future__ import annotations

import numpy as np
import pytest
from training_runs import FOUR_RANKS, events, losses, tensors

# Micro-batches are not those of one rank in a pipeline: its loss within one is left out there.
LOSSES = {
    "model__sequence_aux_loss": 0.3,
    "model__global_batch_aux_loss": 0.2,
    "model__router_z_loss": 0.1,
    "training__steps": 3,
    "checkpoint__interval": None,
}
NOISE = {"model__router_jitter": 0.3, "training__steps": 3, "checkpoint__interval": None}


@pytest.mark.parametrize(
    ("degrees", "size", "settings"),
    [
        ({"cp": 2}, 2, {"model__micro_batch_aux_loss": 0.2}),
        ({"cp": 2, "tp": 2}, 4, {"model__micro_batch_aux_loss": 0.2}),
        (FOUR_RANKS["experts cut"], 4, {"model__micro_batch_aux_loss": 0.2}),
        ({"cp": 2, "ep": 2, "expert_mesh": "peer"}, 4, {"model__micro_batch_aux_loss": 0.2}),
        ({"pp": 2, "dp_shard": 2}, 4, {"training__micro_batch_size": 2}),
    ],
    ids=["cp", "cp, tp", "etp", "cp, peer", "pp"],
)
def test_auxiliary_losses_are_those_of_one_rank(lab, degrees, size, settings):
    one = lab.run("one", **LOSSES, **settings)
    run = lab.run("run", degrees, size, **LOSSES, **settings)
    np.testing.assert_allclose(losses(run), losses(one), rtol=2e-5)
    found, expected = (
        [{name: x for name, x in event["metrics"].items() if "aux_loss" in name} for event in events(each, "step")]
        for each in (run, one)
    )
    assert len(expected[0]) == len([name for name in {**LOSSES, **settings} if name.endswith("_loss")])
    for got, wanted in zip(found, expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-4)
    weights = tensors(run, ["model."])
    for name, value in tensors(one, ["model."]).items():
        np.testing.assert_allclose(weights[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


def test_the_scale_of_float16_scales_auxiliary_losses_too(lab):
    runs = [
        lab.run(f"{scale}", **LOSSES, training__dtype="float16", training__loss_scaling__init_scale=scale)
        for scale in (1.0, 4096.0)
    ]
    norms = [[event["gradient_norm"] for event in events(run, "step")] for run in runs]
    np.testing.assert_allclose(norms[1], norms[0], rtol=2e-2)
    without = lab.run("without", training__dtype="float16", training__steps=1, checkpoint__interval=None)
    assert abs(events(without, "step")[0]["gradient_norm"] - norms[0][0]) > 0.1 * norms[0][0], "losses must matter"


def test_evaluations_see_no_noise_and_leave_that_of_training_alone(lab):
    never = lab.run("never", **NOISE)
    often = lab.run("often", **NOISE, training__eval_interval=1, training__eval_batches=1)
    assert losses(often) == losses(never)


def test_a_step_that_is_computed_twice_has_the_same_noise(lab):
    plain, checked = lab.run("plain", **NOISE), lab.run("checked", **NOISE, training__replay_interval=1)
    assert losses(checked) == losses(plain)
    first, second = tensors(plain), tensors(checked)
    assert all((first[name] == second[name]).all() for name in first)
