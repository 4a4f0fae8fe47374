"""Auxiliary losses: their gradients by formula, and the same in every layout, accumulation and recomputation."""

from __future__ import annotations

import functools
import math

import numpy
import pytest
from moe_layouts import LAYOUTS, train
from test_expert_parallel import NUM_SAMPLES, assert_same

from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_moe import AuxLosses, MoE, MoEConfigError, update_expert_bias

DIM, EXPERTS, TOP_K = 8, 5, 2
KINDS = ("micro_batch", "sequence", "global_batch", "z")


def built(platform, aux_losses, score_func="softmax", **options):
    with nn.building(platform):
        layer = MoE(DIM, 6, EXPERTS, TOP_K, score_func=score_func, aux_losses=aux_losses, **options)
    init_parameters(layer, lambda name, shape: Normal(0.7), seed=4)
    return layer


def batch(seed, samples=3, length=7):
    return numpy.random.default_rng(seed).normal(size=(samples, length, DIM)).astype(numpy.float32)


def gate_gradients(platform, layer, *batches, step_tokens=None, recompute=False):
    """Gradients of gate and inputs where the layer's own loss has none, and the metrics of the step."""
    layer.step_tokens = step_tokens
    grads = []
    for data in batches:
        x = platform.from_numpy(data.copy())
        platform.set_requires_grad(x, True)
        y = checkpoint(layer, x, platform=platform) if recompute else layer(x)
        platform.backward(y, platform.ops.zeros_like(y))
        grads.append(platform.to_numpy(platform.get_grad(x)).copy())
    gate = layer.router.gate.weight
    result = platform.to_numpy(platform.get_grad(gate)).copy()
    for _, each in platform.named_parameters(layer):
        platform.set_grad(each, None)
    (metrics,) = update_expert_bias(layer).values()
    return result, numpy.concatenate(grads), metrics


def softmax(logits):
    e = numpy.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def by_formula(platform, layer, data, kind, score_func, last=None):
    """The value of one loss, and the gradients of gate and input, in NumPy."""
    weight = platform.to_numpy(platform.detach(layer.router.gate.weight)).astype(numpy.float64)
    rows = data.reshape(-1, DIM).astype(numpy.float64)
    logits = rows @ weight.T
    if kind == "z":
        lse = numpy.log(numpy.exp(logits).sum(-1))
        d_logits = 2 * lse[:, None] * softmax(logits) / len(rows)
        value = (lse**2).mean()
    else:
        scores = softmax(logits) if score_func == "softmax" else 1 / (1 + numpy.exp(-logits))
        chosen = numpy.argsort(-scores, -1)[:, :TOP_K]
        hits = numpy.zeros_like(scores)
        numpy.put_along_axis(hits, chosen, 1.0, 1)
        by_sequence = hits.reshape(*data.shape[:2], EXPERTS)
        shares = {
            "micro_batch": numpy.broadcast_to(hits.mean(0) / TOP_K, hits.shape),
            "sequence": numpy.repeat(by_sequence.mean(1) / TOP_K, data.shape[1], 0),
            "global_batch": numpy.broadcast_to(0.0 if last is None else last, hits.shape),
        }[kind]
        total = scores.sum(-1, keepdims=True)
        probabilities = scores / total
        value = EXPERTS * (shares * probabilities).sum() / len(rows)
        d_p = EXPERTS * shares / len(rows)
        d_scores = (d_p - (d_p * probabilities).sum(-1, keepdims=True)) / total
        if score_func == "softmax":
            d_logits = scores * (d_scores - (d_scores * scores).sum(-1, keepdims=True))
        else:
            d_logits = d_scores * scores * (1 - scores)
    return value, d_logits.T @ rows, (d_logits @ weight).reshape(data.shape)


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_by_formula(platform, kind, score_func):
    layer = built(platform, AuxLosses(**{kind: 0.3}), score_func)
    last = None
    for seed in (1, 2):
        data = batch(seed)
        gate, inputs, metrics = gate_gradients(platform, layer, data)
        value, wanted_gate, wanted_inputs = by_formula(platform, layer, data, kind, score_func, last)
        numpy.testing.assert_allclose(gate, 0.3 * wanted_gate, rtol=2e-5, atol=1e-6)
        numpy.testing.assert_allclose(inputs, 0.3 * wanted_inputs, rtol=2e-5, atol=1e-6)
        assert metrics.aux_losses == {kind: pytest.approx(value, rel=1e-5)}
        last = numpy.array(metrics.loads) / sum(metrics.loads)
        assert numpy.abs(gate).max() > 1e-3 or (kind, seed) == ("global_batch", 1)


def test_even_routing_has_balance_losses_of_one(platform):
    layer = built(platform, AuxLosses(micro_batch=1.0, sequence=1.0, global_batch=1.0), force_uniform=True)
    platform.copy_(layer.router.gate.weight, platform.ops.zeros_like(platform.detach(layer.router.gate.weight)))
    for _ in range(2):
        _, _, metrics = gate_gradients(platform, layer, batch(1, 2, EXPERTS))
    assert metrics.aux_losses == pytest.approx({"micro_batch": 1.0, "sequence": 1.0, "global_batch": 1.0}, rel=1e-5)
    assert metrics.entropy == pytest.approx(1.0)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_micro_batches_do_not_change_what_is_a_sum_over_sequences(platform, count):
    coefficients = AuxLosses(sequence=0.3, global_batch=0.2, z=0.1)
    data = batch(5, samples=6)
    results = []
    for parts in (1, count):
        layer = built(platform, coefficients)
        gate_gradients(platform, layer, batch(4), step_tokens=21)  # loads for the next step
        results.append(gate_gradients(platform, layer, *numpy.array_split(data, parts), step_tokens=42))
    (gate, inputs, metrics), (gate_of_parts, inputs_of_parts, metrics_of_parts) = results
    numpy.testing.assert_allclose(gate_of_parts, gate, rtol=2e-5, atol=1e-6)
    numpy.testing.assert_allclose(inputs_of_parts, inputs, rtol=2e-5, atol=1e-6)
    assert metrics_of_parts.aux_losses == pytest.approx(metrics.aux_losses, rel=1e-5)


def test_the_loss_of_a_micro_batch_is_as_strong_in_many_equal_ones(platform):
    data = batch(5)
    full, _, _ = gate_gradients(platform, built(platform, AuxLosses(micro_batch=0.3)), data, step_tokens=21)
    parts, _, _ = gate_gradients(platform, built(platform, AuxLosses(micro_batch=0.3)), data, data, step_tokens=42)
    numpy.testing.assert_allclose(parts, full, rtol=2e-5, atol=1e-6)


def test_recomputation_gives_the_same_bits_and_counts_once(platform):
    results = []
    for recompute in (False, True):
        layer = built(platform, AuxLosses(0.1, 0.2, 0.3, 0.4), load_balance_coeff=0.01)
        for seed in (1, 2):
            results.append(gate_gradients(platform, layer, batch(seed), recompute=recompute))
    for plain, recomputed in zip(results[:2], results[2:], strict=True):
        for a, b in zip(plain[:2], recomputed[:2], strict=True):
            numpy.testing.assert_array_equal(a, b)
        assert plain[2] == recomputed[2]


def test_evaluation_has_no_losses(platform):
    layer = built(platform, AuxLosses(0.1, 0.2, 0.3, 0.4))
    with platform.no_grad():
        layer(platform.from_numpy(batch(1)))
    (metrics,) = update_expert_bias(layer).values()
    assert (metrics.tokens, metrics.aux_losses) == (0, {"micro_batch": 0, "sequence": 0, "global_batch": 0, "z": 0})


def test_no_tokens(platform):
    layer = built(platform, AuxLosses(0.1, 0.2, 0.3, 0.4))
    gate, inputs, _ = gate_gradients(platform, layer, batch(1, samples=0))
    assert inputs.shape == (0, 7, DIM)
    assert not gate.any()


OPTIONS = {"num_shared_experts": 1}


@functools.cache
def single(micro_batches):
    coefficients = AuxLosses(0.5 if micro_batches == 1 else 0.0, 0.4, 0.3, 0.2)
    kwargs = {"steps": 3, "micro_batches": micro_batches, "options": {**OPTIONS, "aux_losses": coefficients}}
    (result,) = run_ranks(functools.partial(train, "one rank", NUM_SAMPLES, **kwargs), 1)
    return kwargs, result


@pytest.mark.parametrize(
    "layout",
    ["ep beside data", "hidden sharded beside data", "sequence over three, uneven", "same tokens on ep, sequence"],
)
def test_steps_in_a_layout_equal_one_rank(torch_or, layout):
    torch_or(layout == "same tokens on ep, sequence")
    kwargs, expected = single(1)
    results = run_ranks(functools.partial(train, layout, NUM_SAMPLES, **kwargs), LAYOUTS[layout].size)
    assert_same(results, expected)
    for result in results:
        for metrics, wanted in zip(result.metrics, expected.metrics, strict=True):
            assert metrics.aux_losses == pytest.approx(wanted.aux_losses, rel=1e-4)
            assert metrics.loads == wanted.loads


@pytest.mark.parametrize(
    ("layout", "micro_batches", "recompute"),
    [
        ("ep", 3, False),
        ("sequence, hidden sharded", 2, True),
        ("same tokens on ep, sequence, hidden sharded", 3, True),
    ],
)
def test_accumulation_and_recomputation_in_a_layout_equal_one_rank(torch_or, layout, micro_batches, recompute):
    torch_or(recompute and micro_batches == 2)
    _, expected = single(7)
    kwargs = {**single(7)[0], "micro_batches": micro_batches, "recompute": recompute}
    assert_same(run_ranks(functools.partial(train, layout, NUM_SAMPLES, **kwargs), LAYOUTS[layout].size), expected)


def test_coefficients_below_zero_are_refused():
    with pytest.raises(MoEConfigError, match=r"coefficients must be at least 0, got sequence = -1.0, z = -0.5"):
        AuxLosses(sequence=-1.0, z=-0.5)
    with pytest.raises(MoEConfigError, match="got z = nan"):
        AuxLosses(z=math.nan)
