"""The matrix of equality with one rank: layouts x models x options, at the level of `hp-train`.

Losses, norms of gradients, weights and both moments of AdamW after two steps are those of one rank. A second run on
processes repeats the first steps with the same bits; simulated ranks always come in one order. Samples differ on every
rank and have different numbers of targets.

| axis                   | choices                                                                                |
|------------------------|----------------------------------------------------------------------------------------|
| data parallel          | replicas, shards, both                                                                 |
| sequence               | one rank; ring, all_gather, ulysses; ring and all_gather between ranks, ulysses within |
| tensor parallel        | dense layers; experts too                                                              |
| pipeline               | none; every schedule                                                                   |
| model                  | dense, tied, several documents in a sample; experts of every rank, spread, of peers    |
| accumulation           | one micro-batch or three                                                               |

| where                  | what is covered                                                                        |
|------------------------|----------------------------------------------------------------------------------------|
| suite, torch           | every two choices, schedules by family and each at least once, on simulated ranks      |
| suite, torch           | every axis on two and four processes                                                   |
| suite, MindSpore       | every choice of data, tensor, pipeline and model; two cases on processes               |
| `nox -s proof`         | all 2,480 combinations for 20 steps; those of up to four ranks on processes too        |

What the matrix leaves to others: kinds of attention and norms, `etp` without `ep`, and uneven lengths
(`models/decoder/test_parallelize.py`); options of pipelines and evaluation (`test_pipelined_model.py`); settings,
such as precision and clipping (`test_trainer.py`); other models under `fully_shard` alone
(`tests/fsdp/test_fully_shard_equality.py`); one expert layer by every dispatcher (`tests/moe/test_expert_parallel.py`).
"""

from __future__ import annotations

import pytest
from combinations import (
    EXPERTS,
    FAMILIES,
    STEPS,
    Combination,
    all_combinations,
    assert_close,
    check,
    covering,
    pairs_of,
    train,
    traits_of,
)
from training_runs import skip_unless_torch_or

from hp_fsdp.communication import Communication
from hp_trainer.pipeline import schedule_names

ALL = all_combinations()
SAMPLE = list(covering(ALL, pairs_of))


def axes_of(combination):
    """Return the choices of a combination without those of sequences, which reach no code of a platform's own."""
    return {(name, choice) for name, choice in traits_of(combination) if name not in ("sequence", "accumulation")}


# A simulated run of four ranks takes half a minute there.
ON_SLOW_PLATFORMS = list(covering([each for each in ALL if each.num_ranks <= 4 and each.parts == 1], axes_of))


@pytest.mark.parametrize("combination", [*SAMPLE, *(each for each in ON_SLOW_PLATFORMS if each not in SAMPLE)], ids=str)
def test_trains_as_one_rank(lab, combination):
    skip_unless_torch_or(lab.platform, combination in ON_SLOW_PLATFORMS)
    if lab.platform.name == "torch" and combination not in SAMPLE:
        pytest.skip("chosen for slower platforms")
    check(lab, combination, steps=STEPS)


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
    # MindSpore's exchanges of context parallel ranks are tested on processes in test_context_parallel.py.
    skip_unless_torch_or(lab.platform, combination == REAL[5])
    check(lab, combination, steps=STEPS, repeated=2, pool=rank_pool)


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
    assert {each.schedule for each in SAMPLE} - {None} == set(schedule_names()) == FAMILIES.keys()


@pytest.mark.parametrize(("op", "factor"), [("max", 1.0), ("sum", 2.0)], ids=["not summed", "of another scale"])
def test_wrong_gradients_are_seen(lab, monkeypatch, op, factor):
    skip_unless_torch_or(lab.platform, False)
    right = train(lab, "right", Combination(dp_shard=2), steps=STEPS)

    def reduce_scatter(self, output, gradients, group):
        return group.reduce_scatter_into(output, self.platform.ops.mul(gradients, factor), op, async_op=True)

    monkeypatch.setattr(Communication, "reduce_scatter", reduce_scatter)
    wrong = train(lab, "wrong", Combination(dp_shard=2), steps=STEPS)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_close(wrong, right)
