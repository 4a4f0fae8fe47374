"""Every dispatcher gives the numbers of one rank, and sends the bytes that its formula says."""

from __future__ import annotations

import functools
import math
import sys
import threading

import numpy
import pytest
from moe_layouts import BY_DISPATCHER, LAYOUTS, VOCABULARY, train
from test_expert_parallel import NUM_SAMPLES, assert_same

import hp_moe.experts
from hp_dtensor.comm.links import Links, measure_links
from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.parallel import nn
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_moe import (
    AllToAllDispatcher,
    AutoDispatcher,
    Capacity,
    DispatchRates,
    ExpertParallel,
    ExpertParallelError,
    MoE,
    TwoLevelDispatcher,
    dispatch_costs,
    ranks_per_token,
)
from hp_moe.dispatch.row_exchange import find_wire_format

EXACT = [
    "copy_per_expert",
    "all_gather",
    "auto",
    "two_level",
    "two_level of 8",
    "in chunks",
    "copies",
    "copies, in chunks",
]
OPTIONS = {
    "shared": {"num_shared_experts": 1, "route_norm": True, "load_balance_coeff": 0.01},
    "dropped": {"capacity": Capacity(0.7), "bias": True},
    "hashed": {"hash_vocab_size": VOCABULARY},
}


@functools.cache
def single(name, num_experts):
    kwargs = {"steps": 5, "options": OPTIONS[name], "num_experts": num_experts}
    (result,) = run_ranks(functools.partial(train, "one rank", NUM_SAMPLES, **kwargs), 1)
    return kwargs, result


@pytest.mark.parametrize(
    ("dispatcher", "name", "num_experts", "recompute"),
    [
        ("copy_per_expert", "shared", 5, True),
        ("copy_per_expert", "hashed", 6, False),
        ("all_gather", "dropped", 6, True),
        ("all_gather", "shared", 9, False),
        ("auto", "hashed", 5, True),
        ("two_level", "shared", 9, True),
        ("two_level", "hashed", 5, False),
        ("two_level of 8", "dropped", 9, False),
        ("in chunks", "shared", 9, True),
        ("in chunks", "dropped", 5, False),
        ("in chunks", "hashed", 6, False),
    ],
)
def test_five_steps_equal_one_rank(torch_or, dispatcher, name, num_experts, recompute):
    torch_or((dispatcher, name) in (("all_gather", "dropped"), ("two_level", "hashed"), ("in chunks", "shared")))
    kwargs, expected = single(name, num_experts)
    program = functools.partial(train, dispatcher, NUM_SAMPLES, recompute=recompute, **kwargs)
    assert_same(run_ranks(program, LAYOUTS[dispatcher].size), expected)


@pytest.mark.parametrize("dispatcher", ["ep of 4", *EXACT, "all_to_all_int8"])
def test_counted_bytes_are_those_of_the_collectives(torch_or, dispatcher):
    torch_or(dispatcher in ("two_level", "in chunks", "all_to_all_int8"))
    results = run_ranks(functools.partial(train, dispatcher, NUM_SAMPLES, 9, steps=1), LAYOUTS[dispatcher].size)
    assert sum(result.wire_bytes for result in results) == results[0].metrics[0].sent_bytes > 0


def choices(tokens, num_experts, top_k):
    random = numpy.random.default_rng(0)
    return numpy.stack([random.permutation(num_experts)[:top_k] for _ in range(tokens)])


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_ranks"), [(256, 8, 2), (256, 8, 64), (8, 2, 4), (9, 3, 4), (5, 5, 8)]
)
def test_ranks_of_a_token_by_formula(num_experts, top_k, num_ranks):
    owners = choices(4000, num_experts, top_k) // -(-num_experts // num_ranks)
    counted = numpy.mean([len(set(token)) for token in owners.tolist()])
    assert ranks_per_token(num_experts, top_k, num_ranks) == pytest.approx(counted, rel=0.02)


def test_published_shapes():
    """Deduplicated rows and copies per expert: `shared/research` of the issue, DeepSeek-V3 and Qwen3-30B."""
    assert ranks_per_token(256, 8, 64) == pytest.approx(7.68, abs=0.01)
    assert ranks_per_token(128, 8, 4) == pytest.approx(3.63, abs=0.01)
    costs = {cost.name: cost.sent_bytes for cost in dispatch_costs(1, 2 * 4096, 128, 8, 2)}
    assert costs["copy_per_expert"] / costs["all_to_all"] == pytest.approx(4.0, rel=0.02)


def test_the_choice_follows_the_links():
    def best(**rates):
        return dispatch_costs(4096, 14336, 256, 8, 64, DispatchRates(**rates))[0].name

    assert best() == "all_to_all"
    assert best(gather_bandwidth=500e9) == "all_gather"
    # Measured between two processes of one machine, there and back: 25 ms, by all-gather 55, a copy per expert 290.
    costs = dispatch_costs(1024, 2048, 64, 8, 2, DispatchRates.between_processes())
    assert [cost.name for cost in costs] == ["all_to_all", "all_gather", "copy_per_expert"]
    slow = Links(latency=2e-5, bandwidth=2e9)
    assert dispatch_costs(1024, 2048, 64, 8, 2, DispatchRates(slow, copy_bandwidth=2e9))[0].name == "all_gather"
    nodes = Links(latency=2e-5, bandwidth={"ep": 10e9, "ep_inner": 300e9})
    assert best(links=nodes, inner_size=8) == "two_level"


def layer_of(platform, dispatcher, mesh, dim=16):
    with nn.building(platform):
        layer = MoE(dim, 8, 6, 2)
    ExpertParallel(dispatcher).apply(layer, mesh)
    init_parameters(layer, lambda name, shape: Normal(0.4), seed=2)
    return layer


def test_all_ranks_choose_alike_by_measured_links(platform):
    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2,), mesh_dim_names=("ep",), platform=platform)
        rates = DispatchRates(measure_links(mesh, num_bytes=1024, repeats=1))
        layer = layer_of(platform, functools.partial(AutoDispatcher, rates=rates), mesh)
        layer(platform.ops.ones((3, 16), platform.dtype("float32")))
        return layer.experts.dispatcher.reason

    (reason,) = set(run_ranks(rank, 2, platform))
    assert "bytes per token and forward" in reason


def test_auto_says_why(platform):
    def rank():
        mesh = init_device_mesh(platform.device_types[0], (4,), platform=platform)
        rates = DispatchRates(Links(latency=0.0, bandwidth={"ep": 1e9, "ep_inner": 100e9}), inner_size=2)
        layer = layer_of(platform, functools.partial(AutoDispatcher, rates=rates), mesh)
        assert layer.experts.dispatcher.reason == ""
        layer(platform.ops.ones((3, 16), platform.dtype("float32")))
        return layer.experts.dispatcher.reason

    (reason,) = set(run_ranks(rank, 4, platform))
    assert reason.startswith("two_level: ")
    assert "bytes per token and forward; " in reason
    assert {word for word in reason.split() if word.isidentifier()} >= {"all_to_all", "copy_per_expert", "all_gather"}


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("dim", [16, 256])
def test_rounded_rows_are_near_and_their_gradients_exact(platform, name, dim):
    if name == "fp8" and platform.name != "torch":
        with pytest.raises(CapabilityError, match="has no wire format 'fp8'; use 'int8' or None"):
            find_wire_format(platform, name)
        return
    data = numpy.random.default_rng(0).normal(size=(2, 40, dim)).astype(numpy.float32)
    data[1, 3] = 0.0

    def rank(dispatcher):
        mesh = init_device_mesh(platform.device_types[0], (2,), platform=platform)
        layer = layer_of(platform, dispatcher, mesh, dim)
        x = platform.from_numpy(data[mesh.get_local_rank()])
        platform.set_requires_grad(x, True)
        with record_collectives() as log:
            y = layer(x)
        platform.backward(platform.ops.sum(y))
        return platform.to_numpy(platform.detach(y)), platform.to_numpy(platform.get_grad(x)), log.wire_bytes()

    exact = run_ranks(functools.partial(rank, "all_to_all"), 2, platform)
    rounded = run_ranks(functools.partial(rank, f"all_to_all_{name}"), 2, platform)
    # A step of int8 is 1/127 of the largest, and half of it the error; of fp8, 1/16 of the number itself.
    limit = {"int8": 0.02, "fp8": 0.06}[name]
    for (y, dx, sent), (near, near_dx, fewer) in zip(exact, rounded, strict=True):
        assert 0 < numpy.linalg.norm(near - y) / numpy.linalg.norm(y) < limit
        assert numpy.linalg.norm(near_dx - dx) / numpy.linalg.norm(dx) < 2 * limit
        assert fewer < sent


def test_whole_numbers_are_not_rounded(platform):
    wire = find_wire_format(platform, "int8")
    numbers = numpy.random.default_rng(0).integers(-127, 128, (5, 2, 128)).astype(numpy.float32)
    numbers[:, :, 0] = 127
    numbers[2, 1] = 0
    codes, scales = wire.encode(platform.from_numpy(numbers))
    assert platform.dtype_name(codes.dtype) == "int8"
    numpy.testing.assert_array_equal(platform.to_numpy(wire.decode(codes, scales)), numbers)


def test_halves_are_rounded_away_from_zero(platform):
    wire = find_wire_format(platform, "int8")
    numbers = numpy.array([[[127.0, 0.5, -0.5, 1.4, -1.6]]], numpy.float32)
    codes, _ = wire.encode(platform.from_numpy(numbers))
    assert platform.to_numpy(codes).tolist() == [[[127, 1, -1, 1, -2]]]


@pytest.mark.parametrize(
    ("dispatcher", "waits"),
    [("all_to_all", 1), ("in chunks", 1), ("all_gather", 1), ("copy_per_expert", 1), ("nodes", 2)],
)
def test_the_host_waits_once_in_forward_and_never_in_backward(platform, dispatcher, waits, monkeypatch):
    """Reads of device memory; values are not looked at before, as on an accelerator."""
    monkeypatch.setattr(hp_moe.experts, "check_inputs", lambda *args: None)
    builds = {
        "nodes": functools.partial(TwoLevelDispatcher, inner_size=2),
        "in chunks": functools.partial(AllToAllDispatcher, num_chunks=3),
    }
    build = builds.get(dispatcher, dispatcher)
    readers, original = [], type(platform).to_numpy

    def to_numpy(self, x):
        # Simulated collectives read too.
        if sys._getframe(1).f_globals["__name__"].startswith(("hp_moe", "hp_platform")):
            readers.append(threading.get_ident())
        return original(self, x)

    monkeypatch.setattr(type(platform), "to_numpy", to_numpy)

    def rank():
        layer = layer_of(platform, build, init_device_mesh(platform.device_types[0], (4,), platform=platform))
        x = platform.ops.ones((5, 16), platform.dtype("float32"))
        platform.set_requires_grad(x, True)
        me, counts = threading.get_ident(), []
        counts.append(readers.count(me))
        y = layer(x)
        counts.append(readers.count(me))
        platform.backward(platform.ops.sum(y))
        counts.append(readers.count(me))
        return counts[1] - counts[0], counts[2] - counts[1]

    assert run_ranks(rank, 4, platform) == [(waits, 0)] * 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda group: TwoLevelDispatcher(group, 4, inner_size=2), "inner_size must divide the 3 ranks .* got 2"),
        (lambda group: AllToAllDispatcher(group, 4, wire_format="int4"), "wire_format must be 'int8', 'fp8' or None"),
    ],
)
def test_what_cannot_be_built_is_refused(platform, build, message):
    def rank():
        with pytest.raises(ExpertParallelError, match=message):
            build(init_device_mesh(platform.device_types[0], (3,), platform=platform).get_group())

    run_ranks(rank, 3, platform)


def test_all_dispatchers_have_a_layout():
    assert {*EXACT, "all_to_all_int8", "all_to_all_fp8"} == {*BY_DISPATCHER}
    assert math.prod(LAYOUTS["two_level of 8"].mesh.values()) == 8
