"""A run whose model is split into pipeline stages has the losses and weights of one rank, whatever runs beside."""

from __future__ import annotations

import numpy as np
import pytest
from pipeline_runs import CASES, CLOSE, check, settings_of
from training_runs import events, losses, skip_unless_torch_or, tensors

from hp_dtensor.exceptions import LaunchError

# Layouts and schedules are in the matrix of `test_trainer_combinations.py`, the other cases in the proof.
QUICK = [
    "interleaved, sharded, tied",
    "v, experts",
    "four stages, listed",
    "gathered and reduced for each use",
]


@pytest.mark.parametrize("name", QUICK)
def test_stages_train_as_one_rank(lab, name):
    skip_unless_torch_or(lab.platform, name in ("interleaved, sharded, tied", "v, experts"))
    check(lab, *CASES[name])


def test_experts_in_half_precision_have_the_same_gradients_in_a_split_backward(lab):
    """Their weights are cast first, so that nodes with a backward of their own are not alone with a weight."""
    skip_unless_torch_or(lab.platform, False)
    runs = []
    for schedule in ("1f1b", "zero_bubble_h1"):
        _, staged = settings_of(experts=4, schedule=schedule, steps=2)
        runs.append(lab.run(schedule, {"pp": 2}, 2, training__dtype="bfloat16", **staged))
    full, split = ([event["gradient_norm"] for event in events(run, "step")] for run in runs)
    np.testing.assert_allclose(split, full, rtol=1e-5)


@pytest.mark.usefixtures("torch_suffices")
def test_checkpoints_of_stages_and_of_one_rank_continue_each_other(lab):
    plain, staged = settings_of(tied=True, steps=6, schedule="interleaved_1f1b")
    plain["checkpoint__interval"] = staged["checkpoint__interval"] = 3
    full = lab.run("one", **plain)
    two = lab.run("staged", {"pp": 2}, 2, **staged)
    on_one = lab.resume(lab.interrupted_copy(two, "on one"), **plain)
    on_four = lab.resume(lab.interrupted_copy(full, "on four"), {"pp": 4, "dp_shard": 1}, 4, **plain)
    for run in (on_one, on_four):
        np.testing.assert_allclose(losses(run), losses(full), **CLOSE)
    # The same layout goes on bit by bit, moments included.
    again = lab.resume(lab.interrupted_copy(two, "again"), {"pp": 2}, 2, **staged)
    assert losses(again) == losses(two)
    for name, value in tensors(two).items():
        np.testing.assert_array_equal(tensors(again)[name], value, err_msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {"parameter_groups": "[{match: [embed.*], lr_factor: 0.1}, {match: [head.*], weight_decay: 0}]"},
        {"training__freeze": "[embed.*, 'layers.0.*']", "parameter_groups": "[{match: [head.*], lr_factor: 2}]"},
        {"training__freeze": "['layers.1.*', norm.*, head.*]"},
        {"training__freeze": "[embed.*]", "model__tie_word_embeddings": True},
    ],
    ids=["groups", "first stage frozen", "last stage frozen", "tied weights frozen"],
)
def test_settings_of_parameters_of_one_stage_are_those_of_one_rank(torch_or, lab, settings):
    torch_or(len(settings) == 2)
    settings |= {"training__steps": 2, "checkpoint__interval": None}
    one = lab.run("one", **settings)
    run = lab.run("staged", {"pp": 2, "dp_shard": 2}, 4, training__micro_batch_size=2, **settings)
    np.testing.assert_allclose(losses(run), losses(one), **CLOSE)
    found, expected = tensors(run), tensors(one)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training__freeze": "[embedd.*]"}, r"training.freeze: no parameter matches embedd"),
        ({"training__freeze": "['*']"}, "no parameter is left to train"),
        ({"parameter_groups": "[{match: [nothing]}]"}, "no parameter matches nothing"),
    ],
)
def test_settings_of_parameters_of_no_stage_are_refused(lab, settings, message):
    with pytest.raises(LaunchError, match=message):
        lab.run("staged", {"pp": 2}, 2, **settings)
