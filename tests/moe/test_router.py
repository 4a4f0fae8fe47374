from __future__ import annotations

import math

import numpy
import pytest
from moe_reference import choose, sigmoid

from hp_dtensor.parallel import nn
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_moe import MoEConfigError, TokenChoiceTopKRouter

DIM, EXPERTS, TOP_K = 16, 8, 3


SCORES = {
    "softmax": lambda logits: numpy.exp(logits) / numpy.exp(logits).sum(-1, keepdims=True),
    "sigmoid": sigmoid,
    "sqrt_softplus": lambda logits: numpy.sqrt(numpy.log1p(numpy.exp(logits))),
    "softmax_of_top_k": lambda logits: logits,
}


def make(platform, top_k=TOP_K, **options):
    with nn.building(platform):
        router = TokenChoiceTopKRouter(DIM, EXPERTS, top_k, **options)
    init_parameters(router, lambda name, shape: Normal(1.0), seed=3)
    return router


def route(router, tokens, bias=None):
    """(scores, experts, counts) as arrays, and all scores `[tokens, experts]` by NumPy."""
    platform = router.platform
    x = numpy.random.default_rng(tokens).normal(size=(tokens, DIM)).astype(numpy.float32)
    weight = platform.to_numpy(router.gate.weight).astype(numpy.float64)
    logits = x @ weight.T
    scores = SCORES[router.score_func](logits)
    given = None if bias is None else platform.from_numpy(bias.astype(numpy.float32))
    return [platform.to_numpy(each) for each in router(platform.from_numpy(x), given)], scores


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("route_norm", [False, True])
@pytest.mark.parametrize("tokens", [1, 33])
def test_best_experts_with_their_scores(platform, score_func, route_norm, tokens):
    router = make(platform, score_func=score_func, route_norm=route_norm, route_scale=2.5)
    (top, experts, counts), scores = route(router, tokens)
    expected = choose(scores, TOP_K)
    numpy.testing.assert_array_equal(experts, expected)
    picked = numpy.take_along_axis(scores, expected, 1)
    picked = 2.5 * (picked / picked.sum(1, keepdims=True) if route_norm else picked)
    numpy.testing.assert_allclose(top, picked, rtol=1e-5)
    numpy.testing.assert_array_equal(counts, numpy.bincount(expected.reshape(-1), minlength=EXPERTS))


def test_bias_changes_the_choice_but_not_the_scores(platform):
    bias = numpy.array([5.0, 0, 0, 0, 0, -5.0, 0, 0])
    (top, experts, _), scores = route(make(platform), 20, bias)
    assert (experts == 0).any(1).all()
    assert not (experts == 5).any()
    numpy.testing.assert_array_equal(experts, choose(scores, TOP_K, bias))
    numpy.testing.assert_allclose(top, numpy.take_along_axis(scores, experts, 1), rtol=1e-5)


@pytest.mark.parametrize(("groups", "limited"), [(4, 2), (2, 1), (8, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_groups_are_chosen_by_their_two_best_biased_scores(platform, groups, limited, biased):
    bias = numpy.linspace(-0.3, 0.4, EXPERTS) if biased else None
    router = make(platform, score_func="sigmoid", num_expert_groups=groups, num_limited_groups=limited)
    (_, experts, _), scores = route(router, 40, bias)
    numpy.testing.assert_array_equal(experts, choose(scores, TOP_K, bias, groups, limited))
    assert max(len(set(row // (EXPERTS // groups))) for row in experts) <= limited


def test_the_softmax_of_the_chosen_logits(platform):
    (top, experts, _), logits = route(make(platform, score_func="softmax_of_top_k", route_scale=2.0), 20)
    numpy.testing.assert_array_equal(experts, choose(logits, TOP_K))
    chosen = numpy.exp(numpy.take_along_axis(logits, experts, 1))
    numpy.testing.assert_allclose(top, 2 * chosen / chosen.sum(1, keepdims=True), rtol=1e-5)


def test_root_of_softplus_has_finite_gradients_at_both_ends(platform):
    router = make(platform, score_func="sqrt_softplus")
    logits = platform.from_numpy(numpy.array([[-1e4, -90.0, 0.0, 90.0, 1e4]], numpy.float32))
    platform.set_requires_grad(logits, True)
    scores = router.scoring.scores(platform.ops, logits)
    (grad,) = platform.grad([scores], [logits], [platform.ops.ones_like(scores)])
    expected = numpy.sqrt([0.0, 0.0, math.log(2), 90.0, 1e4])
    numpy.testing.assert_allclose(platform.to_numpy(scores)[0], expected, rtol=1e-5, atol=1e-12)
    assert numpy.isfinite(platform.to_numpy(grad)).all()
    wanted = [0.25 / expected[2], *(0.5 / expected[3:])]
    numpy.testing.assert_allclose(platform.to_numpy(grad)[0, 2:], wanted, rtol=1e-5)


def test_a_bias_of_the_gate_counts_in_scores(platform):
    router = make(platform, gate_bias=True)
    x = numpy.random.default_rng(1).normal(size=(9, DIM)).astype(numpy.float32)
    top, experts, _ = (platform.to_numpy(platform.detach(each)) for each in router(platform.from_numpy(x)))
    weight, bias = (platform.to_numpy(platform.detach(each)) for each in (router.gate.weight, router.gate.bias))
    scores = SCORES["softmax"](x.astype(numpy.float64) @ weight.T + bias)
    numpy.testing.assert_array_equal(experts, choose(scores, TOP_K))
    numpy.testing.assert_allclose(top, numpy.take_along_axis(scores, experts, 1), rtol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_groups_are_chosen_by_their_best_biased_score(platform, biased):
    bias = numpy.linspace(-0.3, 0.4, EXPERTS) if biased else None
    options = {"num_expert_groups": 4, "num_limited_groups": 2, "group_score": "max"}
    (_, experts, _), scores = route(make(platform, score_func="sigmoid", **options), 40, bias)
    numpy.testing.assert_array_equal(experts, choose(scores, TOP_K, bias, 4, 2, best=1))
    assert (experts != choose(scores, TOP_K, bias, 4, 2)).any()


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
def test_logits_of_bfloat16_tokens_are_float32(platform, gate):
    router = make(platform)
    x = numpy.random.default_rng(1).normal(size=(9, DIM)).astype(numpy.float32)
    ops, bfloat16 = platform.ops, platform.dtype("bfloat16")
    narrow = ops.cast(platform.from_numpy(x), bfloat16)
    weight = ops.cast(platform.detach(router.gate.weight), platform.dtype(gate))
    platform.set_parameter(router.gate, "weight", platform.Parameter(weight, requires_grad=True))
    top, experts, _ = router(narrow)
    wide = [platform.to_numpy(ops.cast(each, platform.dtype("float32"))) for each in (narrow, weight)]
    scores = SCORES["softmax"](wide[0].astype(numpy.float64) @ wide[1].T)
    assert platform.dtype_name(top.dtype) == "float32"
    numpy.testing.assert_array_equal(platform.to_numpy(experts), choose(scores, TOP_K))
    expected = numpy.take_along_axis(scores, platform.to_numpy(experts), 1)
    numpy.testing.assert_allclose(platform.to_numpy(platform.detach(top)), expected, rtol=1e-5)


def test_no_tokens(platform):
    (top, experts, counts), _ = route(make(platform, route_norm=True), 0)
    assert top.shape == experts.shape == (0, TOP_K)
    numpy.testing.assert_array_equal(counts, numpy.zeros(EXPERTS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, "top_k must be between 1 and num_experts = 8, got 9"),
        ({"score_func": "relu"}, "score_func must be 'softmax', 'sigmoid', .* or 'softmax_of_top_k', got 'relu'"),
        ({"group_score": "mean"}, "group_score must be 'top2_sum' or 'max', got 'mean'"),
        ({"num_expert_groups": 4}, "num_expert_groups and num_limited_groups must be given together"),
        ({"num_expert_groups": 3, "num_limited_groups": 1}, "num_expert_groups must divide num_experts = 8, got 3"),
        ({"num_expert_groups": 4, "num_limited_groups": 5}, "must be between 1 and num_expert_groups = 4, got 5"),
        ({"num_expert_groups": 4, "num_limited_groups": 1}, "1 groups of 2 experts hold fewer than top_k = 3"),
    ],
)
def test_options_that_do_not_fit_are_refused(platform, options, message):
    with nn.building(platform), pytest.raises(MoEConfigError, match=message):
        TokenChoiceTopKRouter(DIM, EXPERTS, **{"top_k": TOP_K, **options})


@pytest.mark.parametrize("options", [{"route_norm": True}, {"score_func": "softmax_of_top_k"}], ids=str)
def test_normalized_scores_of_one_expert_are_one_with_a_warning(platform, options):
    with pytest.warns(UserWarning, match="with top_k = 1 makes every score 1, so the gate learns from an auxiliary"):
        router = make(platform, top_k=1, **options)
    (top, _, counts), _ = route(router, 6)
    numpy.testing.assert_array_equal(top, numpy.ones((6, 1)))
    assert counts.sum() == 6


def test_all_problems_at_once(platform):
    with nn.building(platform), pytest.raises(MoEConfigError, match=r"top_k .*; score_func .*; num_expert_groups"):
        TokenChoiceTopKRouter(DIM, EXPERTS, 0, score_func="tanh", num_expert_groups=2)
