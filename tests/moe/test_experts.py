from __future__ import annotations

import numpy
import pytest
from moe_reference import LAYER, ReferenceMoE

from hp_dtensor.parallel import nn
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_moe import ExpertParallelError, GroupedExperts, GroupSizes, MoE, grouped_matmul, loop_grouped_matmul

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


@pytest.mark.parametrize("product", [grouped_matmul, loop_grouped_matmul], ids=["platform's", "loop"])
@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 4, 0), (0, 0, 0, 0), (7,), ()])
@pytest.mark.parametrize(("width", "out"), [(8, 12), (6, 5)])
def test_grouped_product_and_its_gradients(platform, product, counts, width, out):
    rows = sum(counts)
    data, weights, grad = normal(0, rows, width), normal(1, len(counts), out, width), normal(2, rows, out)
    x, w = leaf(platform, data), leaf(platform, weights)
    y = product(x, w, sizes_of(platform, counts))
    dx, dw = platform.grad([y], [x, w], [platform.from_numpy(grad)])
    group = numpy.repeat(numpy.arange(len(counts)), counts)
    expected_dw = numpy.zeros(weights.shape)
    for row, e in enumerate(group):
        expected_dw[e] += numpy.outer(grad[row], data[row])
    numpy.testing.assert_allclose(platform.to_numpy(y), _each(weights, data, group, "eoi,ei->eo"), **CLOSE)
    numpy.testing.assert_allclose(platform.to_numpy(dx), _each(weights, grad, group, "eoi,eo->ei"), **CLOSE)
    numpy.testing.assert_allclose(platform.to_numpy(dw), expected_dw, **CLOSE)
    for e, count in enumerate(counts):
        assert count or not platform.to_numpy(dw)[e].any()


def _each(weights, rows, group, formula):
    if len(rows) == 0:
        return numpy.zeros((0, weights.shape[1 if formula.endswith("o") else 2]))
    return numpy.einsum(formula, weights[group], rows)


def test_a_sum_may_be_the_loss(platform):
    """Its gradient is one number expanded, which some kernels refuse."""
    x, w = leaf(platform, normal(0, 4, 8)), leaf(platform, normal(1, 2, 4, 8))
    platform.backward(platform.ops.sum(grouped_matmul(x, w, sizes_of(platform, (1, 3)))))
    expected = numpy.repeat(platform.to_numpy(w).sum(1), (1, 3), axis=0)
    numpy.testing.assert_allclose(platform.to_numpy(platform.get_grad(x)), expected, **CLOSE)


def test_rows_in_expert_major_order(platform):
    with nn.building(platform):
        experts = GroupedExperts(8, 4, 3)
    init_parameters(experts, lambda name, shape: Normal(0.5), seed=1)
    x, counts = normal(3, 6, 8), (1, 0, 5)
    y = experts(platform.from_numpy(x), platform.from_numpy(numpy.array(counts, numpy.int64)))
    w1, w2, w3 = (platform.to_numpy(getattr(experts, name)) for name in ("w1", "w2", "w3"))
    for row, e in enumerate(numpy.repeat(numpy.arange(3), counts)):
        a = w1[e] @ x[row]
        expected = w2[e] @ (a / (1 + numpy.exp(-a)) * (w3[e] @ x[row]))
        numpy.testing.assert_allclose(platform.to_numpy(y)[row], expected, **CLOSE)


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
    ("counts", "told"),
    [
        ([1, 0, 4], r"the counts \[1, 0, 4\] add up to 5, but there are 6 rows"),
        ([1, 2, 5], r"the counts \[1, 2, 5\] add up to 8, but there are 6 rows"),
        ([1, 5], r"one count for each of 3 experts, got shape \[2\]"),
        ([1, 0, 5, 0], r"one count for each of 3 experts, got shape \[4\]"),
        ([8, -1, -1], r"expected integers of at least 0, got \[8, -1, -1\] \(int64\)"),
    ],
)
def test_counts_that_do_not_describe_the_rows_are_refused(platform, counts, told):
    with nn.building(platform):
        experts = GroupedExperts(8, 4, 3)
    counts = platform.from_numpy(numpy.array(counts, numpy.int64))
    with pytest.raises(ExpertParallelError, match=told):
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
    hidden = numpy.maximum(_each(w1, data, chosen, "eoi,ei->eo"), 0)
    numpy.testing.assert_allclose(y, score * _each(w2, hidden * hidden, chosen, "eoi,ei->eo"), **CLOSE)
