"""Combinations of parallel axes train as one rank does: few, in which every two choices meet; all are in the proof."""

from __future__ import annotations

import pytest
from combinations import EXPERTS, all_combinations, check, pairs_of, pairwise_sample
from training_runs import skip_unless_torch_or

ALL = all_combinations()
SAMPLE = list(pairwise_sample(ALL))


@pytest.mark.parametrize("combination", SAMPLE, ids=str)
def test_trains_as_one_rank_and_repeats_bit_by_bit(lab, combination):
    skip_unless_torch_or(lab.platform, combination in SAMPLE[:4])
    check(lab, combination, steps=5, repeated=2)


def test_all_combinations_are_there_and_the_sample_has_every_pair():
    assert len(set(ALL)) == len(ALL) == 2480
    for name, degrees in {
        "dp_replicate": {1, 2, 4, 8},
        "dp_shard": {1, 2, 4, 8},
        "cp": {1, 2, 4, 8},
        "tp": {1, 2, 4},
        "pp": {1, 2, 4, 8},
        "ep": {1, 2, EXPERTS},
        "etp": {1, 2, 4},
        "expert_mesh": {"folded", "peer"},
        "ulysses_degree": {None, 2, 4},
        "parts": {1, 3},
    }.items():
        assert {getattr(each, name) for each in ALL} == degrees, name
    assert set().union(*map(pairs_of, SAMPLE)) == set().union(*map(pairs_of, ALL))
