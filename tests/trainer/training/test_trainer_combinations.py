"""Combinations of parallel axes train as one rank does: few, in which every two choices meet; all are in the proof."""

from __future__ import annotations

import pytest
from combinations import EXPERTS, Combination, all_combinations, assert_close, check, pairs_of, pairwise_sample, train
from training_runs import skip_unless_torch_or

from hp_fsdp.communication import Communication

ALL = all_combinations()
SAMPLE = list(pairwise_sample(ALL))


@pytest.mark.parametrize("combination", SAMPLE, ids=str)
def test_trains_as_one_rank_and_repeats_bit_by_bit(lab, combination):
    skip_unless_torch_or(lab.platform, combination in [each for each in SAMPLE if each.parts == 1][:3])
    check(lab, combination, steps=5, repeated=2)


# On two and four processes: every axis, beside another where there are four.
REAL = [
    Combination(dp_replicate=2, parts=3),
    Combination(dp_replicate=2, dp_shard=2, experts=True, parts=3),
    Combination(cp=2, cp_method="ring", pp=2, schedule="interleaved_1f1b"),
    Combination(cp=4, cp_method="ring", ulysses_degree=2),
    Combination(cp=2, cp_method="ulysses", tp=2, parts=3),
    Combination(pp=2, schedule="dualpipe_v", experts=True, dp_shard=2, ep=2, parts=3),
    Combination(pp=2, schedule="zero_bubble_v", experts=True, ep=2, expert_mesh="peer", parts=3),
    Combination(pp=4, schedule="zero_bubble_h1", parts=3),
]


@pytest.mark.parametrize("combination", REAL, ids=str)
def test_processes_train_as_one_rank_and_repeat_bit_by_bit(lab, rank_pool, combination):
    skip_unless_torch_or(lab.platform, combination in (REAL[2], REAL[5]))
    check(lab, combination, steps=5, repeated=2, pool=rank_pool)


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


@pytest.mark.parametrize(("op", "factor"), [("max", 1.0), ("sum", 2.0)], ids=["not summed", "of another scale"])
def test_wrong_gradients_are_seen(lab, monkeypatch, op, factor):
    skip_unless_torch_or(lab.platform, False)
    right = train(lab, "right", Combination(dp_shard=2), steps=5)

    def reduce_scatter(self, output, gradients, group):
        return group.reduce_scatter_into(output, self.platform.ops.mul(gradients, factor), op, async_op=True)

    monkeypatch.setattr(Communication, "reduce_scatter", reduce_scatter)
    wrong = train(lab, "wrong", Combination(dp_shard=2), steps=5)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_close(wrong, right)
