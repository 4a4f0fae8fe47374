"""Selection over full sequences, by Sinkhorn's algorithm and by experts, against loops over tokens and experts."""

from __future__ import annotations

import functools
import math

import numpy
import pytest
from loop_over_experts import loop_of
from moe_layouts import LAYOUTS, train
from moe_reference import outputs_and_gradients
from test_expert_parallel import NUM_SAMPLES, assert_same
from test_router import SCORES

from hp_dtensor.parallel import nn
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_moe import AuxLosses, Capacity, MoE, MoEConfigError, record_routing, replay_routing, update_expert_bias
from hp_moe.router import balanced_logits

DIM, EXPERTS, TOP_K, LENGTH = 8, 5, 2, 9
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def built(platform, selection, top_k=TOP_K, **options):
    with nn.building(platform):
        layer = MoE(DIM, 6, EXPERTS, top_k, selection=selection, **options)
    init_parameters(layer, lambda name, shape: Normal(0.7), seed=4)
    return layer


def batch(platform, sequences=4, length=LENGTH, seed=0):
    shape = (sequences, length, DIM)
    x = platform.from_numpy(numpy.random.default_rng(seed).normal(size=shape).astype(numpy.float32))
    platform.set_requires_grad(x, True)
    return x


def logits_of(platform, layer, x):
    rows = platform.ops.reshape(platform.detach(x), (math.prod(x.shape[:-1]), DIM))
    logits = platform.to_numpy(platform.detach(layer.router._logits(rows)))
    return logits.astype(numpy.float64).reshape(*x.shape[:-1], EXPERTS)


def scaled_by_megatron(logits):
    """Megatron-LM's `sinkhorn`, of one sequence, until nothing changes any more."""
    cost = numpy.exp(logits)
    of_tokens, of_experts = numpy.ones(len(cost)), numpy.ones(EXPERTS)
    for _ in range(2000):
        of_tokens = 1 / len(of_tokens) / (cost @ of_experts)
        of_experts = 1 / len(of_experts) / (of_tokens @ cost)
    return of_tokens[:, None] * cost * of_experts


def by_sinkhorn(logits, top_k, score_func):
    """Experts of the tokens of one sequence, by token."""
    if not len(logits):
        return numpy.zeros((0, top_k))
    return numpy.argsort(-scaled_by_megatron(logits), -1, kind="stable")[:, :top_k]


def by_experts(logits, top_k, score_func):
    """Expert after expert, its tokens best first; 5 stands for an expert that has not selected the token."""
    selected, scores = numpy.full(logits.shape, EXPERTS), SCORES[score_func](logits)
    for expert in range(EXPERTS):
        tokens = sorted(range(len(logits)), key=lambda token: (-scores[token, expert], token))
        selected[tokens[: math.ceil(top_k * len(logits) / EXPERTS)], expert] = expert
    return selected


BY_HAND = {"sinkhorn": by_sinkhorn, "expert_choice": by_experts}


@pytest.mark.parametrize("selection", BY_HAND)
@pytest.mark.parametrize(("score_func", "top_k"), [("softmax", 2), ("sigmoid", 1), ("sigmoid", 3)])
@pytest.mark.parametrize(("sequences", "length"), [(4, 9), (2, 3), (0, 9), (3, 0)])
def test_a_layer_equals_a_loop(torch_or, platform, selection, score_func, top_k, sequences, length):
    torch_or(score_func == "softmax" or length == 9)
    layer, x = built(platform, selection, top_k, score_func=score_func), batch(platform, sequences, length)
    each = [BY_HAND[selection](logits, top_k, score_func) for logits in logits_of(platform, layer, x)]
    slots = EXPERTS if selection == "expert_choice" else top_k
    selected = numpy.array(each, numpy.int64).reshape(sequences * length, slots)
    with record_routing(layer) as record:
        got = outputs_and_gradients(platform, layer, layer(x), x)
    numpy.testing.assert_array_equal(record.calls[""][0], selected)
    rows = platform.ops.reshape(x, (sequences * length, DIM))
    chosen = platform.from_numpy(selected)
    scores = layer.router.scoring.scores(platform.ops, layer.router._logits(rows))
    scores = scores if selection == "expert_choice" else platform.ops.gather(scores, 1, chosen)
    y = platform.ops.reshape(loop_of(layer.experts, rows, scores, chosen), tuple(x.shape))
    for a, b in zip(got, outputs_and_gradients(platform, layer, y, x), strict=True):
        numpy.testing.assert_allclose(a, b, **CLOSE)
    with replay_routing(layer, record):
        for a, b in zip(outputs_and_gradients(platform, layer, layer(x), x), got, strict=True):
            numpy.testing.assert_array_equal(a, b)


def test_experts_choose_equally_many_tokens_of_each_sequence(platform):
    layer, x = built(platform, "expert_choice"), batch(platform)
    with record_routing(layer) as record:
        layer(x)
    (metrics,) = update_expert_bias(layer).values()
    assert metrics.loads == (4 * math.ceil(TOP_K * LENGTH / EXPERTS),) * EXPERTS
    selected = record.calls[""][0].reshape(4, LENGTH, EXPERTS) < EXPERTS
    assert {*selected.sum(1).reshape(-1)} == {4}
    # Zero, one, several: as many experts as select a token.
    assert len({*selected.sum(2).reshape(-1)}) > 2


def test_equal_scores_go_to_the_earlier_tokens(platform):
    layer = built(platform, "expert_choice")
    same = numpy.ones((1, LENGTH, DIM), numpy.float32)
    with record_routing(layer) as record:
        layer(platform.from_numpy(same))
    assert (record.calls[""][0] < EXPERTS).all(1).tolist() == [True] * 4 + [False] * 5


def test_sinkhorn_evens_loads_in_training_alone(platform):
    layer = built(platform, "sinkhorn")
    x = platform.ops.abs(platform.detach(batch(platform, 1, 200)))  # the gate then prefers some experts
    with record_routing(layer) as record:
        layer(x)
        with platform.no_grad():
            layer(x)
    trained, evaluated = (numpy.bincount(calls.reshape(-1), minlength=EXPERTS) for calls in record.calls[""])
    assert trained.std() < evaluated.std() / 2
    best = numpy.argsort(-logits_of(platform, layer, x)[0], -1, kind="stable")[:, :TOP_K]
    numpy.testing.assert_array_equal(record.calls[""][1], best)


def test_balanced_logits_are_those_of_converged_scaling_and_of_large_numbers(platform):
    logits = numpy.random.default_rng(0).normal(size=(2, 40, EXPERTS)) * [[[2.0]], [[1.0]]]
    shifted = logits + numpy.array([500.0, -500.0])[:, None, None]
    got = platform.to_numpy(balanced_logits(platform.ops, platform.from_numpy(shifted.astype(numpy.float32))))
    for of_sequence, each in zip(got, logits, strict=True):
        expected = numpy.log(scaled_by_megatron(each))
        difference = of_sequence - expected
        # A number per token, the same for all of its experts.
        numpy.testing.assert_allclose(difference, numpy.broadcast_to(difference[:, :1], difference.shape), atol=2e-3)


IN_LAYOUTS = {
    "sinkhorn": {"selection": "sinkhorn", "num_shared_experts": 1, "aux_losses": AuxLosses(z=0.1)},
    "expert_choice": {"selection": "expert_choice", "aux_losses": AuxLosses(z=0.1)},
}


@functools.cache
def single(name):
    program = functools.partial(train, "one rank", NUM_SAMPLES, steps=2, options=IN_LAYOUTS[name], length=7)
    (result,) = run_ranks(program, 1)
    return result


@pytest.mark.parametrize("name", IN_LAYOUTS)
@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        ("ep of 4", False),
        ("ep beside data", True),
        ("hidden sharded beside data", False),
        ("data and sequence, ep over data", False),
        ("sequence, ep over data, hidden sharded", True),
        ("same tokens on ep, sequence", True),
        ("sequence, hidden sharded, same tokens on ep", False),
        ("sequence over three, uneven", True),
        ("two_level", False),
        ("copy_per_expert", False),
        ("all_gather", True),
        ("in chunks", True),
        ("copies, in chunks", False),
    ],
)
def test_steps_in_a_layout_equal_one_rank(torch_or, layout, recompute, name):
    """Sequences of seven tokens are sharded unevenly; later ranks have more samples, the first ones none."""
    torch_or(layout == "same tokens on ep, sequence")
    options = IN_LAYOUTS[name]
    program = functools.partial(train, layout, NUM_SAMPLES, steps=2, options=options, recompute=recompute, length=7)
    results = run_ranks(program, LAYOUTS[layout].size)
    assert_same(results, single(name))
    for result in results:
        assert [m.loads for m in result.metrics] == [m.loads for m in single(name).metrics]
        losses = [m.aux_losses["z"] for m in result.metrics]
        assert losses == pytest.approx([m.aux_losses["z"] for m in single(name).metrics], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selection": "sinkhorn", "load_balance_coeff": 0.1}, "'sinkhorn' cannot be combined with load_balance_coeff"),
        (
            {"selection": "sinkhorn", "aux_losses": AuxLosses(sequence=0.1)},
            "cannot be combined with aux_losses of sequence",
        ),
        ({"selection": "expert_choice", "capacity": Capacity(1.0)}, "'expert_choice' cannot be combined with capacity"),
        ({"selection": "expert_choice", "route_norm": True}, "'expert_choice' excludes route_norm"),
        ({"selection": "expert_choice", "score_func": "softmax_of_top_k"}, "excludes score_func 'softmax_of_top_k'"),
        ({"selection": "expert_choice", "force_uniform": True}, "excludes force_uniform"),
        ({"selection": "sinkhorn", "hash_vocab_size": 3}, "excludes hash_vocab_size"),
        ({"selection": "sinkhorn", "num_expert_groups": 5, "num_limited_groups": 2}, "excludes num_expert_groups"),
        ({"selection": "best"}, "selection must be 'top_k', 'sinkhorn' or 'expert_choice', got 'best'"),
    ],
)
def test_options_that_do_not_fit_are_refused(platform, options, message):
    with pytest.raises(MoEConfigError, match=message):
        built(platform, **options)
