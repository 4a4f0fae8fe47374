"""Capacity, hash routing, jitter, forced uniform routing; recording and replaying."""

from __future__ import annotations

import functools
import math

import numpy
import pytest
from loop_over_experts import loop_of
from moe_layouts import LAYOUTS, VOCABULARY, train
from moe_reference import outputs_and_gradients
from test_expert_parallel import NUM_SAMPLES, assert_same

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_moe import (
    Capacity,
    ExpertParallelError,
    MoE,
    MoEConfigError,
    RoutingRecord,
    TensorParallel,
    record_routing,
    replay_routing,
    update_expert_bias,
)
from hp_moe.router import uniform_noise
from hp_moe.routing import Choices, DeviceTable, choices_within_capacity

DIM, EXPERTS, TOP_K = 8, 5, 2
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def built(platform, top_k=TOP_K, **options):
    with nn.building(platform):
        layer = MoE(DIM, 6, EXPERTS, top_k, **options)
    init_parameters(layer, lambda name, shape: Normal(0.7), seed=4)
    return layer


def batch(platform, seed=0, tokens=30):
    x = platform.from_numpy(numpy.random.default_rng(seed).normal(size=(tokens, DIM)).astype(numpy.float32))
    platform.set_requires_grad(x, True)
    return x


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_a_table_is_copied_to_its_device_once_and_clamps_numbers(platform, monkeypatch, dtype):
    numbers = platform.from_numpy(numpy.array([[-3, 0], [2, 9]], dtype))
    table = DeviceTable(platform, numpy.array([[5, 6], [7, 8], [1, 2]]))
    copies, original = [], type(platform).from_numpy
    monkeypatch.setattr(type(platform), "from_numpy", lambda self, *args: copies.append(args) or original(self, *args))
    for _ in range(2):
        found = table.look_up(numbers)
        assert platform.dtype_name(found.dtype) == "int64"
        assert platform.to_numpy(found).tolist() == [[[5, 6], [5, 6]], [[1, 2], [1, 2]]]
    assert len(copies) == 1
    assert tuple(table.look_up(numbers[:0]).shape) == (0, 2, 2)


def retained_by_hand(experts, scores, capacity, bound):
    """One expert after the other, one choice after the other."""
    retained = numpy.zeros(experts.shape, bool)
    for expert in range(EXPERTS):
        choices = [(token, slot) for token, slot in numpy.ndindex(*experts.shape) if experts[token, slot] == expert]
        if capacity.drop == "probability":
            choices.sort(key=lambda at: -scores[at])
        for at in choices[:bound]:
            retained[at] = True
    return retained


@pytest.mark.parametrize("drop", ["probability", "position"])
@pytest.mark.parametrize("factor", [0.3, 1.0, 100.0])
@pytest.mark.parametrize("tokens", [0, 1, 30])
def test_choices_beyond_the_capacity_are_dropped(torch_or, platform, drop, factor, tokens):
    torch_or(tokens == 30 or factor == 1.0)
    capacity = Capacity(factor, drop)
    layer = built(platform, capacity=capacity, route_norm=True)
    x = batch(platform, tokens=tokens)
    scores, experts, _ = layer.router(x)
    bound = math.ceil(factor * tokens * TOP_K / EXPERTS)
    retained = retained_by_hand(platform.to_numpy(experts), platform.to_numpy(platform.detach(scores)), capacity, bound)
    got = outputs_and_gradients(platform, layer, layer(x), x)
    left = platform.from_numpy(numpy.where(retained, platform.to_numpy(experts), EXPERTS))
    expected = outputs_and_gradients(platform, layer, loop_of(layer.experts, x, scores, left), x)
    for a, b in zip(got, expected, strict=True):
        numpy.testing.assert_allclose(a, b, **CLOSE)
    (metrics,) = update_expert_bias(layer).values()
    assert (metrics.tokens, metrics.dropped) == (tokens * TOP_K, int((~retained).sum()))
    assert (metrics.dropped > 0) == (tokens == 30 and factor < 100)


IN_LAYOUTS = {
    "dropped by probability": {"capacity": Capacity(0.8), "num_shared_experts": 1, "load_balance_coeff": 0.01},
    "dropped by position": {"capacity": Capacity(0.6, "position"), "route_norm": True},
    "hashed": {"hash_vocab_size": VOCABULARY, "route_norm": True},
    "jittered": {"jitter": 0.3, "num_shared_experts": 1},
}


@functools.cache
def single(name):
    (result,) = run_ranks(functools.partial(train, "one rank", NUM_SAMPLES, steps=3, options=IN_LAYOUTS[name]), 1)
    return result


@pytest.mark.parametrize(
    ("layout", "recompute", "name"),
    [
        ("ep beside data", False, "dropped by probability"),
        ("same tokens on ep, sequence", True, "dropped by probability"),
        ("sequence over three, uneven", False, "dropped by position"),
        ("sequence, ep over data, hidden sharded", True, "dropped by position"),
        ("hidden sharded beside data", True, "hashed"),
        ("ep of 4", False, "hashed"),
        ("ep beside data", True, "jittered"),
        ("same tokens on ep, sequence, hidden sharded", False, "jittered"),
        ("sequence over three, uneven", False, "jittered"),
    ],
)
def test_steps_in_a_layout_equal_one_rank(torch_or, layout, recompute, name):
    torch_or(recompute)
    program = functools.partial(train, layout, NUM_SAMPLES, steps=3, options=IN_LAYOUTS[name], recompute=recompute)
    results = run_ranks(program, LAYOUTS[layout].size)
    assert_same(results, single(name))
    for result in results:
        assert [m.dropped for m in result.metrics] == [m.dropped for m in single(name).metrics]
    assert (single(name).metrics[0].dropped > 0) == ("dropped" in name)


def test_hashed_tokens_go_to_the_experts_of_their_ids_even_twice(platform):
    layer = built(platform, hash_vocab_size=3)
    table = numpy.array([[4, 4], [0, 2], [2, 2]])
    platform.copy_(layer.router.expert_of_id, platform.from_numpy(table))
    ids = numpy.random.default_rng(0).integers(3, size=30)
    x = batch(platform)
    scores, experts, counts = layer.router(x, ids=platform.from_numpy(ids))
    numpy.testing.assert_array_equal(platform.to_numpy(experts), table[ids])
    numpy.testing.assert_array_equal(platform.to_numpy(counts), numpy.bincount(table[ids].reshape(-1), minlength=5))
    got = outputs_and_gradients(platform, layer, layer(x, platform.from_numpy(ids)), x)
    expected = outputs_and_gradients(platform, layer, loop_of(layer.experts, x, scores, experts), x)
    for a, b in zip(got, expected, strict=True):
        numpy.testing.assert_allclose(a, b, **CLOSE)


def test_hash_routing_needs_an_id_for_each_token(platform):
    layer = built(platform, hash_vocab_size=3)
    with pytest.raises(ExpertParallelError, match="one for each of 30 tokens, got none; call the layer with ids"):
        layer(batch(platform))
    with pytest.raises(ExpertParallelError, match=r"one for each of 30 tokens, got shape \[29\]"):
        layer(batch(platform), platform.from_numpy(numpy.zeros(29, numpy.int64)))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (numpy.arange(30) % 7, r"expected numbers from 0 to hash_vocab_size - 1 = 5, got 6 \(4 out of range\)"),
        # MindSpore would read the last row.
        (numpy.arange(30) % 6 - 1, "hash_vocab_size - 1 = 5, got -1"),
        (numpy.zeros(30, numpy.float32), "ids: expected int64, got float32"),
    ],
)
def test_ids_out_of_range_are_refused(platform, ids, message):
    layer = built(platform, hash_vocab_size=6)
    with pytest.raises(ExpertParallelError, match=message):
        layer(batch(platform), platform.from_numpy(ids))


def test_forced_uniform_routing_takes_experts_in_turn(platform):
    layer = built(platform, top_k=3, force_uniform=True)
    scores, experts, counts = layer.router(batch(platform, tokens=10))
    assert platform.to_numpy(counts).tolist() == [6] * EXPERTS
    assert all(len(set(row)) == 3 for row in platform.to_numpy(experts).tolist())
    assert platform.requires_grad(scores)


@pytest.mark.parametrize("tokens", [1, 4, 7])
def test_forced_uniform_routing_loads_a_ranks_own_tokens_evenly(platform, tokens):
    """Counted from the rank's own first token, so that every rank's loads are even, however few it has."""
    layer = built(platform, force_uniform=True)
    _, experts, counts = layer.router(batch(platform, tokens=tokens))
    assert numpy.ptp(platform.to_numpy(counts)) <= 1
    assert platform.to_numpy(experts)[0].tolist() == [0, 1]


def test_experts_in_turn_and_replayed_ones_need_no_ids(platform):
    layer, x = built(platform, hash_vocab_size=3), batch(platform)
    with record_routing(layer) as record:
        layer(x, platform.from_numpy(numpy.zeros(30, numpy.int64)))
    with replay_routing(layer, record):
        layer(x)
    assert tuple(built(platform, hash_vocab_size=3, force_uniform=True)(x).shape) == (30, DIM)


@pytest.mark.parametrize("drop", ["probability", "position"])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_equal_scores_are_dropped_alike_however_tokens_are_sharded(drop, block_size):
    """Blocks of ranks have samples of their own, the ranks of a block parts of their sequences."""
    samples, length, ranks = 8, 4, 4
    random = numpy.random.default_rng(0)
    experts = numpy.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(samples * length)])
    scores = random.integers(2, size=experts.shape).astype(numpy.float32)
    capacity, places = Capacity(0.5, drop), numpy.arange(samples * length)
    expected = choices_within_capacity(Choices(experts, scores, places), capacity, EXPERTS, None)
    assert 0 < expected.sum() < expected.size

    def rank():
        mesh = init_device_mesh("cpu", (ranks,))
        block, part = divmod(mesh.get_local_rank(), block_size)
        own = numpy.array_split(places.reshape(samples, length), ranks // block_size)[block]
        mine = numpy.array_split(own, block_size, 1)[part].reshape(-1)
        choices = Choices(experts[mine], scores[mine], mine - own[0, 0])
        return mine, choices_within_capacity(choices, capacity, EXPERTS, mesh.group_along(), block_size)

    for mine, retained in run_ranks(rank, ranks):
        numpy.testing.assert_array_equal(retained, expected[mine])


def test_jitter_is_for_training_only_and_kept_for_recomputation(platform):
    x = batch(platform)
    plain, jittered, again = built(platform), built(platform, jitter=0.2), built(platform, jitter=0.2)
    with platform.no_grad():
        jittered.router.training = False
    numpy.testing.assert_array_equal(*(platform.to_numpy(each.router(x)[0]) for each in (plain, jittered)))
    jittered.router.training = True
    got = outputs_and_gradients(platform, jittered, jittered(x), x)
    recomputed = outputs_and_gradients(platform, again, checkpoint(again, x, platform=platform), x)
    for a, b in zip(got, recomputed, strict=True):
        numpy.testing.assert_array_equal(a, b)
    assert (got[0] != outputs_and_gradients(platform, plain, plain(x), x)[0]).any()
    second = outputs_and_gradients(platform, jittered, jittered(x), x)
    assert (got[0] != second[0]).any(), "every call draws other noise"


def test_noise_is_uniform_and_a_tokens_own():
    numbers = numpy.random.default_rng(0).permutation(4000)
    noise = uniform_noise(numbers, 16, seed=3, call=9)
    assert noise.dtype == numpy.float32
    assert 0 <= noise.min() < noise.max() < 1
    # The mean of 64000 uniform numbers is within 0.001 of a half at about one standard deviation.
    assert abs(noise.mean() - 0.5) < 0.005
    assert abs(noise.var() - 1 / 12) < 0.002
    assert abs(numpy.corrcoef(noise.T) - numpy.eye(16)).max() < 0.08, "channels do not follow each other"
    shares, _ = numpy.histogram(noise, bins=16, range=(0, 1))
    assert abs(shares / noise.size - 1 / 16).max() < 0.004
    numpy.testing.assert_array_equal(uniform_noise(numbers[:5], 16, seed=3, call=9), noise[:5])
    for seed, call in ((3, 10), (4, 9)):
        assert (uniform_noise(numbers, 16, seed, call) != noise).mean() > 0.99


def test_jitter_is_the_same_on_ranks_that_shard_an_expert_and_another_on_others(platform):
    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2, 2), mesh_dim_names=("dp", "etp"), platform=platform)
        layer = built(platform, jitter=0.2)
        TensorParallel().apply(layer, mesh["etp"])
        layer.token_mesh = mesh["dp"]
        init_parameters(layer, lambda name, shape: Normal(0.7), seed=4)
        with record_routing(layer) as record:
            y = layer(batch(platform))
        return platform.to_numpy(platform.detach(y)), record.calls[""][0]

    (a, of_a), (b, of_b), (_, of_c), _ = run_ranks(rank, 4, platform)
    numpy.testing.assert_array_equal(of_a, of_b)
    numpy.testing.assert_array_equal(a, b)
    assert (of_a != of_c).any()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_recorded_step_is_replayed_with_other_weights(platform, tmp_path, recompute):
    with nn.building(platform):
        model = nn.ModuleList([built(platform), built(platform, top_k=3)])
    x = batch(platform)
    with record_routing(model) as record:
        for layer in (*model, model[0]):
            y = checkpoint(layer, x, platform=platform) if recompute else layer(x)
            outputs_and_gradients(platform, layer, y, x)
    assert {name: [calls.shape for calls in each] for name, each in record.calls.items()} == {
        "0": [(30, 2)] * 2,
        "1": [(30, 3)],
    }
    record.save(tmp_path / "routing.npz")
    init_parameters(model, lambda name, shape: Normal(0.7), seed=5)
    record = RoutingRecord.load(tmp_path / "routing.npz")
    with replay_routing(model, record):
        for layer, experts in zip(
            (*model, model[0]), (*record.calls["0"][:1], *record.calls["1"], *record.calls["0"][1:]), strict=True
        ):
            scores = layer.router.scoring.scores(platform.ops, layer.router._logits(x))
            chosen = platform.from_numpy(experts)
            loop = loop_of(layer.experts, x, platform.ops.gather(scores, 1, chosen), chosen)
            expected = outputs_and_gradients(platform, layer, loop, x)
            y = checkpoint(layer, x, platform=platform) if recompute else layer(x)
            for a, b in zip(outputs_and_gradients(platform, layer, y, x), expected, strict=True):
                numpy.testing.assert_allclose(a, b, **CLOSE)
    assert model[0].router.tapes == []


def test_a_failed_save_leaves_the_earlier_record(tmp_path, monkeypatch):
    path = tmp_path / "routing.npz"
    RoutingRecord({"": [numpy.array([[3, 1]])]}).save(path)

    def fails(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(numpy, "savez", fails)
    with pytest.raises(OSError, match="disk full"):
        RoutingRecord({"": [numpy.array([[0, 2]])]}).save(path)
    assert RoutingRecord.load(path).calls[""][0].tolist() == [[3, 1]]


def test_a_layer_that_was_not_called_needs_no_call_in_the_replay(platform, tmp_path):
    with nn.building(platform):
        model = nn.ModuleList([built(platform), built(platform)])
    with record_routing(model) as record:
        model[0](batch(platform))
    record.save(tmp_path / "routing.npz")
    record = RoutingRecord.load(tmp_path / "routing.npz")
    with replay_routing(model, record):
        model[0](batch(platform))
    expected_message = "layer '1': only 0 calls were recorded"
    with pytest.raises(ExpertParallelError, match=expected_message), replay_routing(model, record):
        model[1](batch(platform))


def test_what_was_not_recorded_cannot_be_replayed(platform):
    layer, x = built(platform), batch(platform)
    with record_routing(layer) as record:
        layer(x)
    expected_message = "layer '': only 1 calls were recorded"
    with pytest.raises(ExpertParallelError, match=expected_message), replay_routing(layer, record):
        layer(layer(x))
    expected_message = "layer '', call 0: recorded with 30 tokens of 2 experts, this call has 29 of 2"
    with pytest.raises(ExpertParallelError, match=expected_message), replay_routing(layer, record):
        layer(batch(platform, tokens=29))
    with pytest.raises(ExpertParallelError, match="1 calls were recorded, but only 0"), replay_routing(layer, record):
        pass
    with nn.building(platform):
        model = nn.ModuleList([layer])
    with (
        pytest.raises(ExpertParallelError, match=r"the record has the layers \[''\], the model has \['0'\]"),
        replay_routing(model, record),
    ):
        pass
    assert layer.router.tapes == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jitter": 1.0}, "jitter must be at least 0 and below 1, got 1.0"),
        ({"hash_vocab_size": 0}, "hash_vocab_size must be at least 1 or None, got 0"),
        ({"load_balance_coeff": math.nan}, "load_balance_coeff must be above 0 or None, got nan"),
        ({"shared_hidden_dim": -3}, "shared network's width must be at least 0, got -3"),
    ],
)
def test_options_that_do_not_fit_are_refused(platform, options, message):
    with pytest.raises(MoEConfigError, match=message):
        built(platform, **options)
    with pytest.raises(MoEConfigError, match="expected a factor above 0 and drop 'probability' or 'position', got 0"):
        Capacity(0.0)
    with pytest.raises(MoEConfigError, match="got inf"):
        Capacity(math.inf)
    with pytest.raises(MoEConfigError, match="'random'"):
        Capacity(1.0, "random")
