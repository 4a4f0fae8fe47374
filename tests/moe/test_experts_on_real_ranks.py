"""The same training on real processes, where collectives really wait for each other."""

from __future__ import annotations

import pytest
from moe_layouts import LAYOUTS, train
from test_expert_parallel import NUM_SAMPLES, WITH_SHARED, assert_same, reference

from hp_moe import AuxLosses, Capacity

TWO = ["ep", "hidden cut", "sequence, ep folded", "sequence, hidden cut", "ep among ranks with the same tokens"]
FOUR = ["ep of 4", "ep and hidden", "data and sequence, ep folded over both", "same tokens on ep, sequence"]


pytestmark = pytest.mark.real_ranks


@pytest.mark.parametrize("name", TWO)
def test_two_processes(rank_pool, name):
    check(rank_pool, name, steps=3, options=WITH_SHARED)


@pytest.mark.parametrize("name", FOUR)
def test_four_processes(rank_pool, name):
    check(rank_pool, name, steps=3, options=WITH_SHARED)


def test_a_process_whose_experts_get_no_token(rank_pool):
    check(rank_pool, "ep", one_expert=True, num_experts=8)


@pytest.mark.parametrize("name", ["ep and hidden", "same tokens on ep, sequence"])
def test_losses_and_dropping_on_four_processes(rank_pool, name):
    options = {"aux_losses": AuxLosses(0.5, 0.4, 0.3, 0.2), "capacity": Capacity(0.8), "bias": True}
    check(rank_pool, name, steps=5, options=options)


@pytest.mark.parametrize("name", ["two_level", "all_gather"])
def test_other_dispatchers_on_four_processes(rank_pool, name):
    check(rank_pool, name, steps=2, options=WITH_SHARED)


def check(rank_pool, name, **kwargs):
    pool = rank_pool(LAYOUTS[name].size)
    assert_same(pool.run(_train, name, NUM_SAMPLES, kwargs), reference(**kwargs))


def _train(name, num_samples, kwargs):
    return train(name, num_samples, **kwargs)
