"""Five models in layouts of dp_replicate x dp_shard x tp x ep train as on one rank: a sample of `proof_equality.py`.

The cases cover every pair of values of any two factors: the model (MLP, transformer, tied embedding, frozen base with
adapters, mixture of experts), the size of each axis, integers compared bit by bit or AdamW compared closely, and one
micro-batch or three, reduced every time or at last. Other features of `fully_shard` are in `test_fully_shard.py`.
"""

from __future__ import annotations

import itertools

import pytest
from equality_models import MODELS
from equality_training import Case, Layout, check_equal, train, train_reference

from hp_dtensor.testing.simulated import run_ranks

FACTORS = {
    "model": MODELS,
    "dp_replicate": (1, 2),
    "dp_shard": (1, 2, 4),
    "tp": (1, 2),
    "ep": (1, 2),
    "exact": (True, False),
    "reduced": ((1, "every"), (3, "every"), (3, "last")),
}
MAX_RANKS, STEPS = 8, 2


def case_of(model, dp_replicate, dp_shard, tp, ep, exact, reduced):
    return Case(model, Layout(dp_replicate, dp_shard, tp, ep), exact, *reduced, steps=STEPS)


def legal(values):
    case = case_of(*values)
    return case.layout.size <= MAX_RANKS and (case.layout.ep == 1 or case.model == "moe")


def cost(case):
    return case.layout.size * case.accumulate


def pairs(values):
    return set(itertools.combinations(enumerate(values), 2))


def pairwise():
    """Yield few cases that contain every pair of values of two factors that any legal case contains, smallest first."""
    candidates = sorted(filter(legal, itertools.product(*FACTORS.values())), key=lambda v: case_of(*v).layout.size)
    wanted = set().union(*map(pairs, candidates))
    while wanted:
        # New pairs per rank: what a case costs grows with its ranks.
        best = max(candidates, key=lambda values: len(pairs(values) & wanted) / (3 + case_of(*values).layout.size))
        wanted -= pairs(best)
        yield case_of(*best)


CASES = list(pairwise())
# A step takes ten times as long there.
ON_SLOW_PLATFORMS = [
    min((case for case in CASES if case.model == model and case.layout.size > 1), key=cost) for model in MODELS
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_in_a_layout_equals_training_on_one_rank(hp_platform, case):
    if hp_platform.name != "torch" and case not in ON_SLOW_PLATFORMS:
        pytest.skip("in the proof session")
    expected = train_reference(case)
    for result in run_ranks(train, case.layout.size, hp_platform, case):
        check_equal(case, result, expected)


@pytest.mark.real_ranks
def test_training_in_a_layout_equals_training_on_one_rank_in_real_processes(rank_pool):
    case = Case("moe", Layout(ep=2), True, steps=STEPS)
    expected = train_reference(case)
    for result in rank_pool(2).run("equality_training:train", case):
        check_equal(case, result, expected)
