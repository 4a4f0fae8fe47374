"""A step of a pipeline has the losses and the gradients of one device, bit by bit, whatever the schedule."""

from __future__ import annotations

import numpy as np
import pipeline_programs as programs
import pytest

from hp_dtensor.testing import run_ranks

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
