"""Experts of every kind: activations, biases, places of the score, gated shared experts."""

from __future__ import annotations

import functools
import math

import numpy
import pytest
from loop_over_experts import loop_of, loop_over_experts
from moe_layouts import LAYOUTS, train
from test_expert_parallel import NUM_SAMPLES, assert_same

from hp_dtensor.parallel import nn
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_moe import Activation, FeedForward, GroupedExperts, MoE, MoEConfigError, Routing, clamped_swiglu
from hp_moe.feed_forward import find_activation

DIM, EXPERTS = 8, 5
# float32: sums of a few hundred products of order one, in another order.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}

GPT_OSS = {
    "activation": clamped_swiglu(limit=1.0),
    "bias": True,
    "gate_bias": True,
    "score_func": "softmax_of_top_k",
}
OPTIONS = {
    "geglu": {"activation": "geglu"},
    "tanh, before": {"activation": "geglu_tanh", "score_before_experts": True},
    "no gate, inside": {"activation": "relu_squared", "score_position": "inside", "score_func": "sigmoid"},
    "no gate, biases": {"activation": "gelu", "bias": True},
    "biases, before": {"bias": True, "score_position": "before"},
    "biases, inside": {"bias": True, "score_position": "inside", "score_func": "sqrt_softplus", "route_norm": True},
    "gpt-oss": GPT_OSS,
    "swiglu, inside": {"score_position": "inside"},
    "gated shared": {"shared_hidden_dim": 3, "shared_gate": True},
    "no gate, gated shared": {"activation": "relu_squared", "num_shared_experts": 1, "shared_gate": True},
}


def normal(seed, *shape):
    return numpy.random.default_rng(seed).normal(size=shape).astype(numpy.float32)


def erf(x):
    return numpy.vectorize(math.erf)(x)


def sigmoid(x):
    return 1 / (1 + numpy.exp(-x))


BY_FORMULA = {
    "swiglu": lambda a, b: a * sigmoid(a) * b,
    "geglu": lambda a, b: 0.5 * a * (1 + erf(a / math.sqrt(2))) * b,
    "geglu_tanh": lambda a, b: 0.5 * a * (1 + numpy.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))) * b,
    "reglu": lambda a, b: numpy.maximum(a, 0) * b,
    "relu_squared": lambda a, b: numpy.maximum(a, 0) ** 2,
    "gelu": lambda a, b: 0.5 * a * (1 + erf(a / math.sqrt(2))),
    "clamped_swiglu": lambda a, b: (
        numpy.minimum(a, 7) * sigmoid(1.702 * numpy.minimum(a, 7)) * (numpy.clip(b, -7, 7) + 1)
    ),
}


@pytest.mark.parametrize("name", BY_FORMULA)
def test_activations_by_their_formulas(platform, name):
    gate, up = 6 * normal(0, 40), 6 * normal(1, 40)
    got = find_activation(name).apply(platform.ops, platform.from_numpy(gate), platform.from_numpy(up))
    expected = BY_FORMULA[name](gate.astype(numpy.float64), up.astype(numpy.float64))
    # 1 + erf and 1 + tanh cancel where they are near 0: float32's 6e-8 of 1, times inputs of order ten, twice.
    numpy.testing.assert_allclose(platform.to_numpy(got), expected, rtol=2e-5, atol=2e-5)


def test_a_dense_network_has_the_same_activations_and_biases(platform):
    with nn.building(platform):
        layer = FeedForward(DIM, 4, "relu_squared", bias=True)
    init_parameters(layer, lambda name, shape: Normal(0.5), seed=0)
    x = normal(0, 3, DIM)
    parameters = layer.w1.weight, layer.w1.bias, layer.w2.weight, layer.w2.bias
    w1, b1, w2, b2 = (platform.to_numpy(platform.detach(each)) for each in parameters)
    expected = numpy.maximum(x @ w1.T + b1, 0) ** 2 @ w2.T + b2
    assert [name for name, _ in platform.named_parameters(layer)] == ["w1.weight", "w1.bias", "w2.weight", "w2.bias"]
    numpy.testing.assert_allclose(platform.to_numpy(platform.detach(layer(platform.from_numpy(x)))), expected, **CLOSE)


def built(platform, options, top_k=2):
    with nn.building(platform):
        layer = MoE(DIM, 6, EXPERTS, top_k, **options)
    init_parameters(layer, lambda name, shape: Normal(0.7), seed=4)
    return layer


def results(platform, layer, function, data, grad):
    x = platform.from_numpy(data.copy())
    platform.set_requires_grad(x, True)
    y = function(layer, x)
    names, parameters = zip(*platform.named_parameters(layer), strict=True)
    grads = platform.grad([y], [x, *parameters], [platform.from_numpy(grad)])
    named = zip(("output", "input", *names), (y, *grads), strict=True)
    return {name: platform.to_numpy(platform.detach(each)) for name, each in named}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (9, 3), (40, 5)])
def test_layer_and_all_its_gradients_are_those_of_a_loop_over_experts(platform, options, tokens, top_k):
    layer = built(platform, options, top_k)
    data, grad = normal(5, tokens, DIM), normal(6, tokens, DIM)
    got = results(platform, layer, lambda layer, x: layer(x), data, grad)
    expected = results(platform, layer, loop_over_experts, data, grad)
    for name, wanted in expected.items():
        numpy.testing.assert_allclose(got[name], wanted, err_msg=name, **CLOSE)


@pytest.mark.parametrize("position", ["before", "inside", "after"])
def test_biases_of_experts_without_tokens_get_exactly_zero(platform, position):
    with nn.building(platform):
        experts = GroupedExperts(DIM, 6, EXPERTS, bias=True, score_position=position)
    init_parameters(experts, lambda name, shape: Normal(0.7), seed=4)
    chosen = numpy.array([[1, 3], [3, 1], [1, 3]])
    counts = numpy.bincount(chosen.reshape(-1), minlength=EXPERTS)
    scores = platform.from_numpy(normal(1, 3, 2))
    routing = Routing(platform.from_numpy(chosen), platform.from_numpy(counts), scores)
    data, grad = normal(5, 3, DIM), normal(6, 3, DIM)
    got = results(platform, experts, lambda layer, x: layer(x, routing), data, grad)
    wanted = results(platform, experts, lambda layer, x: loop_of(layer, x, scores, routing.experts), data, grad)
    for name in ("w1", "w2", "w3", "b1", "b2", "b3"):
        assert not got[name][[0, 2, 4]].any()
        assert got[name][[1, 3]].any()
        numpy.testing.assert_allclose(got[name], wanted[name], err_msg=name, **CLOSE)


@functools.cache
def single(name):
    (result,) = run_ranks(functools.partial(train, "one rank", NUM_SAMPLES, steps=5, options=OPTIONS[name]), 1)
    return result


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("ep", "gpt-oss"),
        ("ep of 4", "biases, inside"),
        ("ep beside data", "no gate, biases"),
        ("hidden cut", "gpt-oss"),
        ("hidden cut", "no gate, inside"),
        ("ep and hidden", "biases, before"),
        ("sequence, ep folded", "gated shared"),
        ("sequence, hidden cut", "gpt-oss"),
        ("sequence, ep over data, hidden cut", "no gate, biases"),
        ("sequence, experts replicated", "gpt-oss"),
        ("ep among ranks with the same tokens", "no gate, gated shared"),
        ("same tokens on ep, sequence, hidden cut", "biases, inside"),
    ],
)
def test_five_steps_in_a_layout_equal_one_rank(layout, name):
    program = functools.partial(train, layout, NUM_SAMPLES, steps=5, options=OPTIONS[name])
    assert_same(run_ranks(program, LAYOUTS[layout].size), single(name))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: GroupedExperts(4, 4, 2, activation="mish"),
            "must be one of clamped_swiglu, geglu, .*'mish'",
        ),
        (lambda: GroupedExperts(4, 4, 2, score_position="behind"), "'before', 'inside' or 'after', got 'behind'"),
        (lambda: GroupedExperts(4, 4, 2, True, score_position="inside"), "contradicts score_position = 'inside'"),
        (lambda: MoE(4, 4, 2, 1, shared_gate=True), "give num_shared_experts or shared_hidden_dim too"),
        (lambda: MoE(4, 4, 2, 1, num_shared_experts=1, shared_hidden_dim=3), "give one"),
        (lambda: MoE(4, 4, 2, 1, score_func="softmax_of_top_k"), "softmax_of_top_k with top_k = 1 makes every score 1"),
        (lambda: clamped_swiglu(limit=0.0), "limit must be above 0, got 0.0"),
    ],
)
def test_options_that_do_not_fit_are_refused(platform, build, message):
    with nn.building(platform), pytest.raises(MoEConfigError, match=message):
        build()


def test_an_activation_of_ones_own_is_not_replaced_by_fused_swiglu(platform):
    halved = Activation("halved", lambda ops, gate, up: ops.mul(ops.mul(gate, 0.5), up))
    layer = built(platform, {"activation": halved})
    data, grad = normal(5, 9, DIM), normal(6, 9, DIM)
    got = results(platform, layer, lambda layer, x: layer(x), data, grad)
    expected = results(platform, layer, loop_over_experts, data, grad)
    numpy.testing.assert_allclose(got["output"], expected["output"], **CLOSE)
