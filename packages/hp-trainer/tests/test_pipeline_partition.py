"""Stages of a model's layers: as even as can be, or as listed; and what a rank does of a schedule."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from hp_trainer.exceptions import PipelineError
from hp_trainer.pipeline import balanced_stages, build_schedule, listed_stages, rank_actions


def most_expensive(stages, costs, first, last):
    sums = [sum(costs[layer] for layer in stage) for stage in stages]
    sums[0] += first
    sums[-1] += last
    return max(sums)


def all_splits(num_layers, num_stages):
    for ends in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield [range(begin, end) for begin, end in itertools.pairwise((0, *ends, num_layers))]


def test_no_split_has_a_cheaper_most_expensive_stage():
    numbers = random.Random(1)
    for _ in range(60):
        costs = [float(numbers.randint(0, 9)) for _ in range(numbers.randint(1, 8))]
        num_stages, first, last = numbers.randint(1, len(costs)), numbers.randint(0, 9), numbers.randint(0, 20)
        stages = balanced_stages(costs, num_stages, first_cost=first, last_cost=last)
        assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
        assert all(len(stage) for stage in stages)
        best = min(most_expensive(split, costs, first, last) for split in all_splits(len(costs), num_stages))
        assert most_expensive(stages, costs, first, last) == best


def test_layers_that_cannot_be_split():
    with pytest.raises(PipelineError, match=r"3 layers cannot be split into 4 stages; expected 1 to 3 stages"):
        balanced_stages([1.0] * 3, 4)
    with pytest.raises(PipelineError, match=r"costs of layers: expected finite numbers >= 0, got \[1.0, -1.0"):
        balanced_stages([1.0, -1.0], 2)
    with pytest.raises(PipelineError, match=r"got \[1.0, inf"):
        balanced_stages([1.0, math.inf], 2)
    with pytest.raises(PipelineError, match=r"3 layers cannot be split into 2\.0 stages"):
        balanced_stages([1.0] * 3, 2.0)
    with pytest.raises(PipelineError, match=r"expected integers, got \[1.5, 1.5\]"):
        listed_stages([1.5, 1.5], num_layers=3, num_stages=2)
    with pytest.raises(PipelineError, match="0 layers cannot be split into 1 stages; expected at least one layer"):
        balanced_stages([], 1)
    with pytest.raises(PipelineError, match=r"expected 2 numbers >= 0 that add up to 3, such as \[2, 1\], got \[1\]"):
        listed_stages([1], num_layers=3, num_stages=2)
    assert listed_stages([0, 3], num_layers=3, num_stages=2) == [range(0), range(3)]


def texts(actions):
    return " ".join(map(str, actions))


def test_receives_stand_one_computation_ahead_and_sends_follow_at_once():
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    assert texts(rank_actions(schedule, 0)) == "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1"
    assert texts(rank_actions(schedule, 1)) == ("1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1")


def test_sharded_stages_are_gathered_once_and_reduced_once():
    schedule = build_schedule("zero_bubble_v", num_ranks=1, num_microbatches=2)
    apart = texts(rank_actions(schedule, 0, sharded_stages={0: "a", 1: "b"}))
    assert apart.startswith("0UNSHARD 0F0 1UNSHARD 1F0")
    assert apart.endswith("REDUCE_GRAD")
    assert [apart.count(each) for each in ("0UNSHARD", "1UNSHARD", "0REDUCE_GRAD", "1REDUCE_GRAD")] == [1] * 4
    shared = texts(rank_actions(schedule, 0, sharded_stages={0: "a", 1: "a"}))
    assert [shared.count(each) for each in ("UNSHARD", "REDUCE_GRAD")] == [1, 1]
    assert shared.startswith("0UNSHARD")
    assert shared.endswith("REDUCE_GRAD")
    assert texts(rank_actions(schedule, 0, forward_only=True, sharded_stages={0: "a"})).count("RESHARD") == 1


def test_stages_gathered_for_each_use_announce_their_last_backward():
    schedule = build_schedule("interleaved_1f1b", num_ranks=1, num_microbatches=2, stages_per_rank=2)
    options = {"sharded_stages": {0: "a", 1: "a"}, "gathers_for_step": False}
    found = texts(rank_actions(schedule, 0, **options))
    assert [found.count(each) for each in ("UNSHARD", "REDUCE_GRAD")] == [1, 1]
    assert found.startswith("0UNSHARD 0F0")
    assert found.endswith("0REDUCE_GRAD 0B1")
    assert "SHARD" not in texts(rank_actions(schedule, 0, forward_only=True, **options))
