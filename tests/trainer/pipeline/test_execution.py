"""A step of a pipeline has the losses and the gradients of one device, bit by bit, whatever the schedule."""

from __future__ import annotations

import numpy as np
import pipeline_programs as programs
import pytest

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.testing import run_ranks
from hp_trainer.exceptions import ScheduleError

# (schedule, ranks, stages per rank, micro-batches): fewer than ranks, equal, no multiple, and more.
SIMULATED = [
    ("gpipe", 2, 1, 3),
    ("gpipe", 2, 2, 2),
    ("1f1b", 4, 1, 6),
    ("1f1b", 3, 1, 2),
    ("interleaved_1f1b", 2, 2, 4),
    ("interleaved_1f1b", 2, 3, 3),
    ("zero_bubble_h1", 3, 1, 5),
    ("interleaved_zero_bubble", 2, 2, 3),
    ("zero_bubble_v", 2, 2, 4),
    ("zero_bubble_v", 1, 2, 3),
    ("dualpipe_v", 2, 2, 5),
    ("dualpipe_v", 4, 2, 1),
]


def check(found, name, num_layers, num_microbatches):
    losses, gradients = programs.single_device(name, num_layers, num_microbatches)
    assert [each for each, _, _ in found if each] == [losses]
    merged = {key: value for _, part, _ in found for key, value in part.items()}
    assert merged.keys() == gradients.keys()
    for key, expected in gradients.items():
        np.testing.assert_array_equal(merged[key], expected, err_msg=key)


@pytest.mark.parametrize(("schedule", "ranks", "stages", "microbatches"), SIMULATED)
def test_gradients_equal_one_device_bit_by_bit(hp_platform, schedule, ranks, stages, microbatches):
    layers = ranks * stages + 1
    found = run_ranks(
        programs.pipeline_rank, ranks, hp_platform, hp_platform.name, schedule, stages, microbatches, layers
    )
    check(found, hp_platform.name, layers, microbatches)


@pytest.mark.real_ranks
@pytest.mark.parametrize(
    ("schedule", "ranks", "stages", "microbatches"),
    [("1f1b", 2, 1, 4), ("interleaved_1f1b", 2, 2, 4), ("dualpipe_v", 4, 2, 8), ("zero_bubble_h1", 4, 1, 3)],
)
def test_the_same_on_real_ranks(hp_platform, rank_pool, schedule, ranks, stages, microbatches):
    layers = ranks * stages + 1
    found = rank_pool(ranks).run(programs.pipeline_rank, hp_platform.name, schedule, stages, microbatches, layers)
    check(found, hp_platform.name, layers, microbatches)


COMPOSED = [
    ("1f1b", 1, {"pp": 2, "dp": 2}),
    ("zero_bubble_v", 2, {"pp": 2, "dp": 2}),
    ("interleaved_1f1b", 2, {"pp": 2, "tp": 2}),
    ("gpipe", 1, {"pp": 2, "dp": 2, "tp": 2}),
]


@pytest.mark.parametrize(("schedule", "stages", "degrees"), COMPOSED)
def test_stages_that_are_sharded_over_other_axes(hp_platform, schedule, stages, degrees):
    """DTensors pass between stages; parameters are gathered once, and gradients reduced once."""
    microbatches, size = 3, int(np.prod(list(degrees.values())))
    arguments = (hp_platform.name, schedule, stages, microbatches, degrees)
    found = run_ranks(programs.composed_rank, size, hp_platform, *arguments)
    num_layers = degrees["pp"] * stages + 1
    expected = programs.summed_over_samples(hp_platform.name, num_layers, microbatches, degrees.get("dp", 1))
    assert set().union(*(grads for grads, _ in found)) == set(expected)
    for grads, names in found:
        for key, grad in grads.items():
            np.testing.assert_allclose(grad, expected[key], rtol=2e-5, atol=2e-5, err_msg=key)
        if degrees.get("tp", 1) == 1:
            assert names.count("all_gather") == stages
            assert names.count("reduce_scatter") == stages


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize("reduces_once", [True, False], ids=["reduced once", "reduced each time"])
def test_weights_may_be_gathered_for_each_use(hp_platform, schedule, stages, reduces_once):
    """The same gradients, with the memory of one use; the price is counted in collectives."""
    microbatches, options = 4, {"gathers_for_step": False, "reduces_once": reduces_once}
    arguments = (hp_platform.name, schedule, stages, microbatches, {"pp": 2, "dp": 2}, options)
    found = run_ranks(programs.composed_rank, 4, hp_platform, *arguments)
    expected = programs.summed_over_samples(hp_platform.name, 2 * stages + 1, microbatches, 2)
    assert set().union(*(grads for grads, _ in found)) == set(expected)
    for grads, names in found:
        for key, grad in grads.items():
            np.testing.assert_allclose(grad, expected[key], rtol=2e-5, atol=2e-5, err_msg=key)
        assert names.count("reduce_scatter") == stages * (1 if reduces_once else microbatches)
        # Every forward gathers; a backward right after the forward of its stage finds what that has left.
        assert stages * microbatches <= names.count("all_gather") <= 2 * stages * microbatches


def test_split_backwards_need_weights_gathered_for_the_step(hp_platform):
    def program():
        pipeline = programs.composed_rank
        pipeline(hp_platform.name, "zero_bubble_h1", 1, 4, {"pp": 2, "dp": 2}, {"gathers_for_step": False})

    with pytest.raises(LaunchError, match=r"the schedule splits backwards \(rank \d does \dI0\)") as raised:
        run_ranks(program, 4, hp_platform)
    assert isinstance(raised.value.__cause__, ScheduleError)


def test_gradients_reduced_each_time_need_weights_gathered_for_each_use(hp_platform):
    def program():
        programs.composed_rank(hp_platform.name, "1f1b", 1, 4, {"pp": 2}, {"reduces_once": False})

    with pytest.raises(LaunchError, match=r"reduces_once=False: expected gathers_for_step=False with it"):
        run_ranks(program, 2, hp_platform)
