"""The whole grid of equality: 1 to 8 simulated ranks, 1 to 4 real ones. Run by the session `proof`.

Five models; every layout of dp_replicate x dp_shard x tp x ep; AdamW close, integers and SGD bit by bit; one
micro-batch per step, or three, reduced every time or at last.
"""

from __future__ import annotations

import pytest
from equality_models import MODELS
from equality_training import Case, all_layouts, check_equal, train, train_reference

from hp_dtensor.testing.simulated import run_ranks

REDUCED = ((1, "every"), (3, "every"), (3, "last"))


def cases(max_ranks, all_reduced):
    for layout in all_layouts(max_ranks):
        for model in MODELS if layout.ep == 1 else ("moe",):
            for exact in (True, False):
                for reduced in all_reduced:
                    yield Case(model, layout, exact, *reduced)


@pytest.mark.parametrize("case", cases(8, REDUCED), ids=str)
def test_simulated_ranks(hp_platform, case):
    expected = train_reference(case)
    for result in run_ranks(train, case.layout.size, hp_platform, case):
        check_equal(case, result, expected)


@pytest.mark.real_ranks
@pytest.mark.parametrize("case", cases(4, REDUCED[::2]), ids=str)
def test_real_ranks(rank_pool, case):
    expected = train_reference(case)
    for result in rank_pool(case.layout.size).run("equality_training:train", case):
        check_equal(case, result, expected)
