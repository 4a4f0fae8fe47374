"""Busy experts have copies on other ranks: where they are is the best place, and changes no result."""

from __future__ import annotations

import functools
import itertools

import numpy
import pytest
from moe_layouts import LAYOUTS, VOCABULARY, train
from test_expert_parallel import NUM_SAMPLES, assert_same, reference

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.parallel import nn
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_moe import (
    AllToAllDispatcher,
    Capacity,
    ExpertParallel,
    ExpertParallelError,
    ExpertTensorParallel,
    MoE,
    ReplicatingDispatcher,
    busiest_load,
    place_copies,
)
from hp_moe.placement import ranks_of_experts


def every_placement(num_experts, num_ranks, slots):
    """By subsets, in another way than the code under test."""
    subsets = [s for n in range(slots + 1) for s in itertools.combinations(range(num_experts), n)]
    chunk = -(-num_experts // num_ranks)
    for placement in itertools.product(subsets, repeat=num_ranks):
        if all(expert // chunk != rank for rank, extra in enumerate(placement) for expert in extra):
            yield placement


def busiest(loads, placement):
    chunk, shares = -(-len(loads) // len(placement)), [0.0] * len(placement)
    for expert, load in enumerate(loads):
        having = [rank for rank, extra in enumerate(placement) if expert in extra or expert // chunk == rank]
        for rank in having:
            shares[rank] += load / len(having)
    return max(shares)


@pytest.mark.parametrize(("num_experts", "num_ranks", "slots"), [(4, 2, 1), (5, 2, 2), (5, 3, 1), (3, 4, 1), (4, 4, 1)])
def test_no_placement_is_better(num_experts, num_ranks, slots):
    random = numpy.random.default_rng(num_experts)
    for _ in range(6):
        loads = (random.random(num_experts) ** 4 * 1000).astype(int).tolist()
        found = place_copies(loads, num_ranks, slots)
        assert place_copies(loads, num_ranks, slots) == found, "each time the same"
        least = min(
            (busiest(loads, each), sum(map(len, each))) for each in every_placement(num_experts, num_ranks, slots)
        )
        assert busiest(loads, found) == pytest.approx(least[0], rel=1e-12)
        assert sum(map(len, found)) <= least[1], "and none as good has fewer copies"
        assert busiest_load(loads, found) == pytest.approx(busiest(loads, found))


def test_many_experts_are_placed_quickly_and_well():
    """DeepSeek-V3's 256 on 32 ranks, loads by Zipf's law: from eight times the mean to nearly the mean."""
    loads = (1e6 / numpy.arange(1, 257)).astype(int)
    numpy.random.default_rng(0).shuffle(loads)
    found = place_copies(loads.tolist(), 32, 2)
    mean = loads.sum() / 32
    assert busiest_load(loads.tolist(), ((),) * 32) > 5 * mean
    assert busiest_load(loads.tolist(), found) < 1.5 * mean
    assert all(len(extra) <= 2 for extra in found)
    assert max(map(len, ranks_of_experts(256, found))) <= 8


@pytest.mark.parametrize(
    ("layout", "options", "num_experts", "recompute"),
    [
        ("copies", {"num_shared_experts": 1, "load_balance_coeff": 0.01, "bias": True}, 6, False),
        ("copies", {"capacity": Capacity(0.7)}, 5, True),
        ("copies, in chunks", {"hash_vocab_size": VOCABULARY}, 5, False),
        ("copies, in chunks", {"num_shared_experts": 1}, 9, True),
    ],
)
@pytest.mark.parametrize("one_expert", [False, True])
def test_training_with_copies_that_move_equals_one_rank(torch_or, layout, options, num_experts, recompute, one_expert):
    torch_or(one_expert and recompute)
    kwargs = {"steps": 4, "options": options, "num_experts": num_experts, "one_expert": one_expert}
    program = functools.partial(train, layout, NUM_SAMPLES, optimizer="adamw", recompute=recompute, **kwargs)
    results = run_ranks(program, LAYOUTS[layout].size)
    (expected,) = run_ranks(functools.partial(train, "one rank", NUM_SAMPLES, optimizer="adamw", **kwargs), 1)
    assert_same(results, expected)
    placements = results[0].placements
    assert any(any(each) for each in placements)
    assert all(result.placements == placements for result in results), "every rank decides alike"


def trained(kwargs):
    return train("copies", NUM_SAMPLES, **kwargs)


@pytest.mark.real_ranks
def test_copies_on_real_ranks(rank_pool):
    kwargs = {"steps": 3, "options": {"num_shared_experts": 1}, "num_experts": 6, "one_expert": True}
    results = rank_pool(4).run(trained, kwargs)
    assert any(any(each) for each in results[0].placements)
    assert_same(results, reference(**kwargs))


def test_runs_with_copies_repeat_bit_by_bit():
    program = functools.partial(train, "copies", NUM_SAMPLES, one_expert=True, num_experts=6)
    for one, other in zip(*(run_ranks(program, 4) for _ in range(2)), strict=True):
        for key, weight in one.weights.items():
            numpy.testing.assert_array_equal(weight, other.weights[key], err_msg=key)


def test_parameters_stay_where_they_are_and_copies_take_load(platform):
    """So checkpoints and optimizers do not know of placements; a rank with a copy keeps its tokens of that expert."""

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2,), platform=platform)
        with nn.building(platform):
            layer = MoE(4, 6, 4, 1, route_scale=2.0)
        ExpertParallel(functools.partial(ReplicatingDispatcher, slots=1)).apply(layer, mesh)
        init_parameters(layer, lambda name, shape: Normal(0.3), seed=1)
        shapes = {name: tuple(platform.unwrap(p).shape) for name, p in platform.named_parameters(layer)}
        dispatcher = layer.experts.dispatcher
        x = platform.from_numpy(
            numpy.abs(numpy.random.default_rng(mesh.get_local_rank()).normal(size=(6, 4)).astype("f4"))
        )
        gate = numpy.zeros((4, 4), numpy.float32)
        gate[:, 0] = [9, 0, 0, 0]
        platform.copy_(platform.unwrap(layer.router.gate.weight), platform.from_numpy(gate))
        before = layer(x)
        assert dispatcher.place_copies([12, 0, 0, 0]) == ((), (0,))
        after = layer(x)
        numpy.testing.assert_allclose(*(platform.to_numpy(platform.detach(y)) for y in (before, after)), rtol=1e-6)
        assert {name: tuple(platform.unwrap(p).shape) for name, p in platform.named_parameters(layer)} == shapes
        layer.totals.take()
        layer(x)
        sizes = 8 * (1 + 3)
        assert layer.totals.sent_bytes == sizes, "no row leaves its rank"

    run_ranks(rank, 2, platform)


def test_copies_of_sharded_experts(platform):
    """With a sharded hidden dimension each of its ranks has its shards of the copies."""

    def rank(slots):
        mesh = init_device_mesh(platform.device_types[0], (2, 2), mesh_dim_names=("ep", "etp"), platform=platform)
        with nn.building(platform):
            layer = MoE(4, 6, 4, 2)
        build = functools.partial(ReplicatingDispatcher, slots=1) if slots else AllToAllDispatcher
        ExpertTensorParallel(build).apply(layer, mesh)
        init_parameters(layer, lambda name, shape: Normal(0.3), seed=1)
        if slots:
            assert layer.experts.dispatcher.place_copies([9, 0, 0, 0]) == ((), (0,))
        x = platform.from_numpy(numpy.random.default_rng(mesh.get_local_rank("ep")).normal(size=(6, 4)).astype("f4"))
        y = layer(x)
        platform.backward(platform.ops.sum(platform.ops.mul(y, y)))
        grads = [platform.get_grad(p) for _, p in platform.named_parameters(layer)]
        return [platform.to_numpy(platform.detach(platform.unwrap(each))) for each in (y, *grads)]

    for got, wanted in zip(run_ranks(rank, 4, platform, 1), run_ranks(rank, 4, platform, 0), strict=True):
        for a, b in zip(got, wanted, strict=True):
            numpy.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_placements_that_cannot_be_are_refused(platform):
    def rank():
        group = init_device_mesh(platform.device_types[0], (2,), platform=platform).get_group()
        with pytest.raises(ExpertParallelError, match="slots for copies of experts must be at least 0, got -1"):
            ReplicatingDispatcher(group, 4, slots=-1)
        for loads in ([1, 2, 3], [1, 2, 3, -1]):
            with pytest.raises(ExpertParallelError, match=r"loads: expected 4 numbers of at least 0, .* got \[1, 2, 3"):
                ReplicatingDispatcher(group, 4, slots=1).place_copies(loads)

    run_ranks(rank, 2, platform)
