"""Sharded training equals the single process: losses, gradients, weights; with the same collectives on every rank.

The cases are the features of `fully_shard`: uneven and empty shards, replicas, parameters that some ranks or steps do
not use, frozen groups, ZeRO stages, placements. The matrix of models and layouts (dp_replicate x dp_shard x tp x ep,
with and without accumulation, exact and close) is in `test_equality.py`.
"""

from __future__ import annotations

import numpy
import pytest
from fsdp_training import Case, shard_last_dim, train_reference, train_sharded

from hp_dtensor.testing.simulated import run_ranks

# float32: sums of the same few hundred products in another order, over up to five optimizer steps.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}

CASES = {
    "two ranks": Case((2,), steps=5),
    "three ranks": Case((3,), steps=5),
    "more ranks than rows": Case((8,)),
    "replicas of shards": Case((2, 2), steps=5),
    "replicas of uneven shards": Case((2, 3)),
    "replicas only": Case((3, 1)),
    "shards in one replica": Case((1, 2)),
    "tied": Case((3,), tied=True, steps=5),
    "block called twice": Case((2,), twice=True),
    "a complete group frozen": Case((2,), frozen=("embed", "blocks.1")),
    "blocks frozen, what is below them not": Case((2,), frozen=("blocks",)),
    "some ranks leave a branch out": Case((3,), branch="beside", branch_ranks=(1,)),
    "all ranks leave a branch out": Case((2,), branch="beside"),
    "some replicas leave a branch out": Case((2, 2), branch="beside", branch_ranks=(0, 3)),
    "some ranks bypass parameters": Case((3,), branch="bypass", branch_ranks=(0,)),
    "all ranks bypass parameters": Case((2,), branch="bypass"),
    "accumulation, reduced at last": Case((2,), accumulate=3, sync="last"),
    "accumulation on replicas, all-reduced at last": Case((2, 2), accumulate=3, all_reduce="last"),
    "accumulation on replicas, reduced at last": Case((2, 2), accumulate=3, sync="last"),
    "list of modules": Case((3,), group_list=True),
    "sum over ranks": Case((2, 2), gradient_sum=True),
    "unsharded after forward": Case((2,), reshard_after_forward=False),
    "uneven shards of uneven tensor parallel": Case((3,), tp=2, accumulate=3, sync="last"),
    "tensor parallel, replicas": Case((2, 2), tp=3),
    "nothing sharded": Case((3,), steps=2, accumulate=2, sync="last", options={"zero_stage": 0}),
    "optimizer state sharded": Case(
        (2, 2), steps=2, accumulate=2, sync="last", options={"zero_stage": 1}, frozen=("up",)
    ),
    "gradients sharded": Case((3,), steps=2, accumulate=2, sync="last", options={"zero_stage": 2}),
    "small parameters replicated": Case((2,), steps=2, tp=2, accumulate=2, sync="last", options={"threshold": 0.1}),
    "sharded along the last dimension": Case((3,), tied=True, options={"shard_placement_fn": shard_last_dim}),
    "last dimension, tensor parallel": Case(
        (2,), steps=2, tp=2, accumulate=2, options={"shard_placement_fn": shard_last_dim}
    ),
    "sharded over two ranks after forward": Case((4,), steps=2, twice=True, reshard_after_forward=2),
    "a branch is used by one rank, in some steps": Case(
        (3,), steps=6, branch="beside", branch_ranks=(1,), branch_steps=(1, 4)
    ),
    "a branch is used in some steps, of replicas": Case(
        (2, 2), steps=6, branch="bypass", branch_ranks=(2,), branch_steps=(0, 3)
    ),
    "a branch is used in one micro-batch, of replicas all-reduced at last": Case(
        (2, 2), steps=6, accumulate=3, branch="beside", branch_ranks=(3,), branch_steps=(1, 2), all_reduce="last"
    ),
    "a branch is used in one micro-batch, unreduced": Case(
        (2,), steps=6, accumulate=3, sync="last", branch="bypass", branch_ranks=(0,), branch_steps=(2, 5)
    ),
    "a branch is used in one micro-batch, gradients sharded": Case(
        (2,),
        steps=6,
        accumulate=3,
        sync="last",
        branch="beside",
        branch_ranks=(1,),
        branch_steps=(2, 5),
        options={"zero_stage": 2},
    ),
    "a branch is used in some steps, nothing sharded": Case(
        (2, 2), steps=6, branch="beside", branch_ranks=(1,), branch_steps=(0, 3), options={"zero_stage": 0}
    ),
    "a branch is used by no rank": Case((2,), steps=6, branch="beside"),
    "root freed too": Case((2,), reshard_after_forward=True, tied=True),
}


def check_equal(result, reference):
    assert result.weights.keys() == reference.weights.keys()
    for name, expected in reference.grads.items():
        found = result.grads[name]
        assert (found is None) == (expected is None), name
        if expected is not None:
            numpy.testing.assert_allclose(found, expected, **CLOSE, err_msg=f"gradient of {name}")
    for name, expected in reference.weights.items():
        numpy.testing.assert_allclose(result.weights[name], expected, **CLOSE, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_training_equals_the_single_process(hp_platform, name):
    case = CASES[name]
    reference = train_reference(case)
    results = run_ranks(train_sharded, case.size, hp_platform, case)
    numpy.testing.assert_allclose(results[0].losses, reference.losses, rtol=2e-5)
    for result in results:
        check_equal(result, reference)
        assert result.same_parameters
        if case.options.get("zero_stage", 3) == 3:
            assert result.held == [0] * len(result.held)
    assert all(result.collectives == results[0].collectives for result in results)


@pytest.mark.real_ranks
@pytest.mark.parametrize(
    "name",
    [
        "two ranks",
        "replicas only",
        "some ranks leave a branch out",
        "tied",
        "a branch is used in one micro-batch, unreduced",
    ],
)
def test_training_equals_the_single_process_on_real_ranks(rank_pool, name):
    case = CASES[name]
    if case.size != 2:
        case = Case(**{**vars(case), "mesh": (2,) if len(case.mesh) == 1 else (2, 1)})
    reference = train_reference(case)
    for result in rank_pool(2).run("fsdp_training:train_sharded", case):
        check_equal(result, reference)
        assert result.held == [0] * len(result.held)
