"""Expert biases move against the load, once per step, and only what was trained counts."""

from __future__ import annotations

import numpy
import pytest

from hp_dtensor.parallel import nn
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_moe import MoE, MoEConfigError, moe_layers, update_expert_bias

EXPERTS = 6


@pytest.fixture
def layer(platform):
    with nn.building(platform):
        layer = MoE(8, 4, EXPERTS, 2, load_balance_coeff=0.01)
    init_parameters(layer, lambda name, shape: Normal(0.5), seed=0)
    return layer


def batch(platform, seed=0):
    return platform.from_numpy(numpy.random.default_rng(seed).normal(size=(30, 8)).astype(numpy.float32))


def counts_of(layer, x):
    return layer.platform.to_numpy(layer.router(x, layer.expert_bias)[2])


def bias_of(layer):
    return layer.platform.to_numpy(layer.expert_bias).copy()


def test_bias_moves_against_the_load(platform, layer):
    x = batch(platform)
    counts = counts_of(layer, x)
    layer(x)
    (metrics,) = update_expert_bias(layer).values()
    direction = numpy.sign(counts.mean() - counts)
    numpy.testing.assert_allclose(bias_of(layer), 0.01 * (direction - direction.mean()), atol=1e-7)
    assert metrics.tokens == 60
    assert metrics.max_violation == pytest.approx(counts.max() / 10 - 1)


def test_micro_batches_count_together_and_once(platform, layer):
    first, second = batch(platform, 1), batch(platform, 2)
    counts = counts_of(layer, first) + counts_of(layer, second)
    layer(first)
    layer(second)
    numpy.testing.assert_array_equal(platform.to_numpy(layer.totals.take())[:EXPERTS], counts)
    numpy.testing.assert_array_equal(platform.to_numpy(layer.totals.take())[:EXPERTS], numpy.zeros(EXPERTS))


def test_evaluation_does_not_count(platform, layer):
    with platform.no_grad():
        layer(batch(platform))
    update_expert_bias(layer)
    assert not bias_of(layer).any()


def test_many_steps_even_the_load(platform, layer):
    x = batch(platform)
    before = counts_of(layer, x).max()
    for _ in range(60):
        layer(x)
        update_expert_bias(layer)
    after = counts_of(layer, x)
    assert after.max() < before
    assert after.max() <= 13


def test_bias_is_a_float32_buffer(platform, layer):
    (buffer,) = dict(platform.named_buffers(layer)).values()
    assert platform.dtype_name(buffer.dtype) == "float32"
    assert "expert_bias" not in dict(platform.named_parameters(layer))


def test_layers_are_found_by_name(platform):
    with nn.building(platform):
        model = nn.ModuleList([MoE(8, 4, 3, 1), nn.Linear(8, 8), MoE(8, 4, 3, 1)])
    assert list(moe_layers(model)) == ["0", "2"]
    assert update_expert_bias(model)["2"].tokens == 0


def test_a_step_against_the_load_must_be_positive(platform):
    with (
        nn.building(platform),
        pytest.raises(MoEConfigError, match="load_balance_coeff must be above 0 or None, got 0"),
    ):
        MoE(8, 4, 3, 1, load_balance_coeff=0)
