"""The complete grid of equality: 1 to 8 simulated ranks, 1 to 4 real ones. Run by the session `proof`.

Five models; every layout of dp_replicate x dp_shard x tp x ep; AdamW close, integers and SGD bit by bit; one
micro-batch per step, or three, reduced every time or at last.
"""

from __future__ import annotations

import pytest
from equality_models import MODELS
from equality_training import Case, all_layouts, check_equal, train, train_reference

from hp_dtensor.testing.pytest_plugin import chosen
from hp_dtensor.testing.simulated import run_ranks

REDUCED = ((1, "every"), (3, "every"), (3, "last"))


def cases(max_ranks, all_reduced):
    for layout in all_layouts(max_ranks):
        for model in MODELS if layout.ep == 1 else ("moe",):
            for exact in (True, False):
                for reduced in all_reduced:
                    yield Case(model, layout, exact, *reduced)


SIMULATED, REAL = list(cases(8, REDUCED)), list(cases(4, REDUCED[::2]))


@pytest.fixture
def in_share(hp_share):
    """`in_share(case, cases)`: skip the test of a case of another share."""

    def check(case, all_cases):
        if case not in chosen(all_cases, share=hp_share):
            pytest.skip("of another share")

    return check


@pytest.mark.parametrize("case", SIMULATED, ids=str)
def test_simulated_ranks(hp_platform, in_share, count_cases, case):
    in_share(case, SIMULATED)
    expected = train_reference(case)
    for result in run_ranks(train, case.layout.size, hp_platform, case):
        check_equal(case, result, expected)
    count_cases(f"layouts on {hp_platform.name}, simulated ranks", 1)


@pytest.mark.real_ranks
@pytest.mark.parametrize("case", REAL, ids=str)
def test_real_ranks(hp_platform, rank_pool, in_share, count_cases, case):
    in_share(case, REAL)
    expected = train_reference(case)
    for result in rank_pool(case.layout.size).run("equality_training:train", case):
        check_equal(case, result, expected)
    count_cases(f"layouts on {hp_platform.name}, real ranks", 1)
