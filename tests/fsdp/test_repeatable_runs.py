"""Two identical runs give identical bits on real ranks; simulated ones are in `test_engine.py`."""

from __future__ import annotations

import numpy
import pytest
from fsdp_training import Case


def train_twice(case):
    """Return the weights of two runs on this rank."""
    from fsdp_training import train_sharded

    return [train_sharded(case).weights for _ in range(2)]


@pytest.mark.real_ranks
def test_two_identical_runs_are_bitwise_identical_on_real_ranks(rank_pool):
    """The same on simulated ranks is in `test_engine.py`."""
    first, second = rank_pool(2).run("test_repeatable_runs:train_twice", Case((2,), tied=True, accumulate=2))
    for weights in (*first, *second):
        for name, value in first[0].items():
            numpy.testing.assert_array_equal(weights[name], value, err_msg=name)
