from __future__ import annotations

import functools
import math

import numpy
import pytest
from loop_over_experts import loop_of, loop_over_experts
from moe_layouts import LAYOUTS, train
from moe_reference import LAYER, ReferenceMoE
from test_expert_parallel import NUM_SAMPLES, assert_same

from hp_dtensor.parallel import nn
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_moe import (
    Activation,
    ExpertParallelError,
    FeedForward,
    GroupedExperts,
    GroupSizes,
    MoE,
    MoEConfigError,
    Routing,
    clamped_swiglu,
    grouped_matmul,
)
from hp_moe.experts import find_activation

# float32 against float64: a few hundred sums of products of order one.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def normal(seed, *shape):
    return numpy.random.default_rng(seed).normal(size=shape).astype(numpy.float32)


def leaf(platform, array):
    x = platform.from_numpy(array.copy())
    platform.set_requires_grad(x, True)
    return x


def sizes_of(platform, counts):
    return GroupSizes(platform, platform.from_numpy(numpy.array(counts, numpy.int64)))


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_counts_by_name_and_in_any_integer_dtype(platform, dtype):
    with nn.building(platform):
        experts = GroupedExperts(8, 4, 3)
    init_parameters(experts, lambda name, shape: Normal(0.5), seed=1)
    x = platform.from_numpy(normal(3, 6, 8))
    expected = experts(x, platform.from_numpy(numpy.array((1, 0, 5), numpy.int64)))
    got = experts(x, num_tokens_per_expert=platform.from_numpy(numpy.array((1, 0, 5), dtype)))
    numpy.testing.assert_array_equal(platform.to_numpy(got), platform.to_numpy(expected))


@pytest.mark.parametrize(
    ("counts", "expected_message"),
    [
        ([1, 0, 4], r"the counts \[1, 0, 4\] add up to 5, but there are 6 rows"),
        ([1, 2, 5], r"the counts \[1, 2, 5\] add up to 8, but there are 6 rows"),
        ([1, 5], r"one count for each of 3 experts, got shape \[2\]"),
        ([1, 0, 5, 0], r"one count for each of 3 experts, got shape \[4\]"),
        ([8, -1, -1], r"expected integers of at least 0, got \[8, -1, -1\] \(int64\)"),
    ],
)
def test_counts_that_do_not_describe_the_rows_are_refused(platform, counts, expected_message):
    with nn.building(platform):
        experts = GroupedExperts(8, 4, 3)
    counts = platform.from_numpy(numpy.array(counts, numpy.int64))
    with pytest.raises(ExpertParallelError, match=expected_message):
        experts(platform.from_numpy(normal(3, 6, 8)), counts)


def test_experts_take_a_routing_or_counts(platform):
    with nn.building(platform):
        experts = GroupedExperts(8, 4, 1)
    x, counts = platform.from_numpy(normal(3, 6, 8)), platform.from_numpy(numpy.array([6], numpy.int64))
    with pytest.raises(ExpertParallelError, match="give one"):
        experts(x)
    with pytest.raises(ExpertParallelError, match="give one"):
        experts(x, counts, num_tokens_per_expert=counts)
    with pytest.raises(ExpertParallelError, match=r"expected integers of at least 0, got \[6.0\] \(float32\)"):
        experts(x, platform.from_numpy(numpy.array([6], numpy.float32)))


OPTIONS = [
    {},
    {"score_before_experts": True},
    {"num_shared_experts": 2, "score_func": "sigmoid", "route_norm": True, "route_scale": 1.5},
    {"score_before_experts": True, "route_norm": True, "num_shared_experts": 1},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(7,), (2, 5), (1,), (0,)])
def test_layer_and_all_its_gradients(platform, options, shape):
    with nn.building(platform):
        layer = MoE(**LAYER, **options)
    init_parameters(layer, lambda name, _: Normal(0.5), seed=5)
    weights = {name: platform.to_numpy(p) for name, p in platform.named_parameters(layer)}
    keys = ("score_func", "route_norm", "route_scale")
    reference = ReferenceMoE(
        weights,
        LAYER["top_k"],
        before=options.get("score_before_experts", False),
        **{key: options[key] for key in keys if key in options},
    )
    data, grad = normal(6, *shape, LAYER["dim"]), normal(7, *shape, LAYER["dim"])
    flat = (-1, LAYER["dim"])
    out, dx, dw = reference(data.reshape(flat).astype(numpy.float64), grad.reshape(flat))
    x = leaf(platform, data)
    y = layer(x)
    platform.backward(y, platform.from_numpy(grad))
    numpy.testing.assert_allclose(platform.to_numpy(y).reshape(flat), out, **CLOSE)
    numpy.testing.assert_allclose(platform.to_numpy(platform.get_grad(x)).reshape(flat), dx, **CLOSE)
    for name, parameter in platform.named_parameters(layer):
        got = platform.to_numpy(platform.get_grad(parameter))
        numpy.testing.assert_allclose(got, dw[name], err_msg=name, **CLOSE)


class Relu2Experts(GroupedExperts):
    """Experts of another activation, as a user writes them: squared ReLU without a gate."""

    def _hidden(self, x, weights, sizes):
        hidden = self.ops.relu(grouped_matmul(x, weights.w1, sizes))
        return self.ops.mul(hidden, hidden)


def test_experts_that_compute_something_else_are_not_replaced_by_fused_ones(platform):
    with nn.building(platform):
        layer = MoE(dim=4, hidden_dim=8, num_experts=3, top_k=1)
        layer.experts = Relu2Experts(4, 8, 3)
    init_parameters(layer, lambda name, shape: Normal(0.5), seed=0)
    data = normal(0, 5, 4)
    y = platform.to_numpy(platform.detach(layer(platform.from_numpy(data))))
    gate = platform.to_numpy(platform.detach(layer.router.gate.weight))
    w1, w2 = (platform.to_numpy(platform.detach(w)) for w in (layer.experts.w1, layer.experts.w2))
    logits = data @ gate.T
    chosen, score = logits.argmax(1), 1 / numpy.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)
    hidden = numpy.maximum(numpy.einsum("eoi,ei->eo", w1[chosen], data), 0)
    numpy.testing.assert_allclose(y, score * numpy.einsum("eoi,ei->eo", w2[chosen], hidden * hidden), **CLOSE)


DIM, EXPERTS = 8, 5
# float32: sums of a few hundred products of order one, in another order.

GPT_OSS = {
    "activation": clamped_swiglu(limit=1.0),
    "bias": True,
    "gate_bias": True,
    "score_func": "softmax_of_top_k",
}
LAYER_OPTIONS = {
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


@pytest.mark.parametrize("options", LAYER_OPTIONS.values(), ids=LAYER_OPTIONS)
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
    (result,) = run_ranks(functools.partial(train, "one rank", NUM_SAMPLES, steps=3, options=LAYER_OPTIONS[name]), 1)
    return result


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("ep", "gpt-oss"),
        ("ep of 4", "biases, inside"),
        ("ep beside data", "no gate, biases"),
        ("hidden sharded", "gpt-oss"),
        ("hidden sharded", "no gate, inside"),
        ("ep and hidden", "biases, before"),
        ("sequence, ep folded", "gated shared"),
        ("sequence, hidden sharded", "gpt-oss"),
        ("sequence, ep over data, hidden sharded", "no gate, biases"),
        ("sequence, experts replicated", "gpt-oss"),
        ("ep among ranks with the same tokens", "no gate, gated shared"),
        ("same tokens on ep, sequence, hidden sharded", "biases, inside"),
    ],
)
def test_steps_in_a_layout_equal_one_rank(torch_or, layout, name):
    torch_or(
        layout in ("ep of 4", "sequence, ep over data, hidden sharded", "same tokens on ep, sequence, hidden sharded")
    )
    program = functools.partial(train, layout, NUM_SAMPLES, steps=3, options=LAYER_OPTIONS[name])
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
