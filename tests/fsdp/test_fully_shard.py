"""Sharded training equals the single process: losses, gradients, weights; with the same collectives on every rank.

The cases are the features of `fully_shard`: uneven and empty shards, replicas, parameters that some ranks or steps do
not use, frozen groups, ZeRO stages, placements. The matrix of models and layouts (dp_replicate x dp_shard x tp x ep,
with and without accumulation, exact and close) is in `test_equality.py`.
"""

from __future__ import annotations

import numpy
import pytest
from fsdp_training import (
    Case,
    build,
    full_value,
    mesh_of,
    shard_last_dim,
    step,
    train_reference,
    train_sharded,
)

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.optim import clip_grad_norm_
from hp_dtensor.parallel import nn
from hp_dtensor.spec.placements import Shard
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    FSDPModule,
    FullyShardError,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

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

# Of each feature a case.
ON_SLOW_PLATFORMS = (
    "replicas of uneven shards",
    "tied",
    "block called twice",
    "blocks frozen, what is below them not",
    "some ranks bypass parameters",
    "accumulation on replicas, all-reduced at last",
    "uneven shards of uneven tensor parallel",
    "optimizer state sharded",
    "gradients sharded",
    "last dimension, tensor parallel",
    "a branch is used in some steps, of replicas",
    "a branch is used in one micro-batch, unreduced",
    "a branch is used by no rank",
)


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
def test_training_equals_the_single_process(torch_or, hp_platform, name):
    torch_or(name in ON_SLOW_PLATFORMS)
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


def test_all_problems_are_reported_and_nothing_is_changed(hp_platform):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.good = self.parameter((3,))
            self.scalar = self.parameter(())
            self.count = self.parameter((3,), dtype="int32", requires_grad=False)

    with nn.building(hp_platform):
        model = Odd()
    with pytest.raises(FullyShardError) as caught:
        fully_shard(model, mesh_of(hp_platform, 1))
    assert str(caught.value).startswith("Odd, rank 0: scalar is a scalar")
    assert "count is of" in str(caught.value)
    assert not isinstance(model, FSDPModule)
    assert not isinstance(model.good, DTensor)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p, m: fully_shard(object(), m), "expected a module of platform"),
        (lambda p, m: fully_shard([], m), "at least one module"),
        (lambda p, m: fully_shard(m, "cpu"), "expected a DeviceMesh, got str"),
        (lambda p, m: fully_shard(linear(p), m, mp_policy="bf16"), "expected a MixedPrecisionPolicy, got str"),
        (
            lambda p, m: fully_shard(
                linear(p), m, mp_policy=MixedPrecisionPolicy(param_dtype="float17", reduce_dtype="int8")
            ),
            "param_dtype: expected a dtype of platform .*; reduce_dtype: expected a floating-point dtype, got 'int8'",
        ),
        (lambda p, m: fully_shard(linear(p), m, ignored_params=["weight"]), "expected parameters.* got 'weight'"),
        (
            lambda p, m: fully_shard(model := linear(p), m, replicate_params=model.weight),
            "replicate_params: expected several parameters",
        ),
        (lambda p, m: fully_shard(linear(p), m, shard_placement_fn=Shard(0)), "expected a function of a parameter"),
        (lambda p, m: linear(p, m).set_requires_gradient_sync("no"), "set_requires_gradient_sync: expected a bool"),
        (lambda p, m: linear(p, m).set_requires_all_reduce(0), "set_requires_all_reduce: expected a bool"),
        (lambda p, m: linear(p, m).set_is_last_backward(None), "set_is_last_backward: expected a bool"),
        (lambda p, m: linear(p, m).set_reshard_after_backward(1), "set_reshard_after_backward: expected a bool"),
        (
            lambda p, m: (model := linear(p, m)).set_modules_to_forward_prefetch(model),
            "set_modules_to_forward_prefetch: expected a list of modules",
        ),
        (
            lambda p, m: fully_shard(
                object(), init_device_mesh(p.device_types[0], (1, 1, 1), mesh_dim_names=("a", "b", "c"), platform=p)
            ),
            "expected 1 axis",
        ),
    ],
)
def test_wrong_arguments(hp_platform, make, message):
    with pytest.raises(FullyShardError, match=message):
        make(hp_platform, mesh_of(hp_platform, 1))


def linear(platform, mesh=None):
    """Return a linear map, sharded if there is a mesh."""
    with nn.building(platform):
        model = nn.Linear(2, 2)
    return model if mesh is None else fully_shard(model, mesh)


def test_a_module_is_sharded_once(hp_platform):
    with nn.building(hp_platform):
        model = nn.Linear(2, 2)
    fully_shard(model, mesh_of(hp_platform, 1))
    with pytest.raises(FullyShardError, match="has been through fully_shard already"):
        fully_shard(model, mesh_of(hp_platform, 1))
    with pytest.raises(FullyShardError, match="has not been through fully_shard"):
        register_fsdp_forward_method(object(), "encode")


def test_parameters_may_be_given_by_a_generator(hp_platform):
    """`module.parameters()` is one."""
    with nn.building(hp_platform):
        model = nn.Linear(2, 2, bias=True)
    fully_shard(model, mesh_of(hp_platform, 1), ignored_params=(p for p in [model.weight]))
    assert not isinstance(model.weight, DTensor)
    assert isinstance(model.bias, DTensor)


def test_ignored_parameters_stay(hp_platform):
    case = Case((2,), num_blocks=1)

    def rank():
        model = build(hp_platform, case)
        ignored = model.head.weight
        fully_shard(model, mesh_of(hp_platform, 2), ignored_params=[ignored])
        step(hp_platform, model, case)
        assert model.head.weight is ignored
        assert not isinstance(hp_platform.get_grad(ignored), DTensor)
        assert isinstance(model.embed.weight, DTensor)

    run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=["sharded", "replicas of shards"])
@pytest.mark.parametrize("how", ["listed", "threshold"])
def test_replicated_parameters_have_the_mean_gradient_and_count_once_in_the_norm(hp_platform, sizes, how):
    """hyper-parallel#685, #735: gradients off by the number of ranks, a norm of 48.47 in place of 28.98."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.large, self.small = self.parameter((7, 3)), self.parameter((3,))

        def forward(self, x):
            return self.ops.add(self.ops.matmul(self.large, x), self.ops.sum(self.ops.mul(self.small, x)))

    def rank():
        me = current_world(hp_platform).rank
        with nn.building(hp_platform):
            model = Two()
        options = {"replicate_params": [model.small]} if how == "listed" else {"threshold": 0.05}
        fully_shard(model, mesh_of(hp_platform, *sizes), **options)
        x = hp_platform.from_numpy(numpy.full((3,), 2.0 * me + 1, numpy.float32))
        hp_platform.backward(hp_platform.ops.sum(model(x)))
        # The mean of 1, 3, 5 and 7 is 4; `small` is used in each of seven rows.
        assert full_value(hp_platform, hp_platform.get_grad(model.large)).tolist() == [[4.0] * 3] * 7
        assert full_value(hp_platform, hp_platform.get_grad(model.small)).tolist() == [28.0] * 3
        norm = clip_grad_norm_([model.large, model.small], 1e9, platform=hp_platform)
        assert float(hp_platform.to_numpy(norm)) == pytest.approx((21 * 16 + 3 * 784) ** 0.5, rel=1e-6)

    run_ranks(rank, 4, hp_platform)
