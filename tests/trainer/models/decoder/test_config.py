"""The operations of a token, against the weights that it meets and the pairs that the mask shows, one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from test_decoder import SMALL, VARIANTS

from hp_trainer.models import build_decoder
from hp_trainer.models.decoder.activation_memory import visible_keys


@pytest.mark.parametrize("name", list(VARIANTS))
def test_operations_are_those_of_the_weights_and_the_visible_pairs(platform, name: str) -> None:
    config, length = replace(SMALL, **VARIANTS[name]), 7
    model = build_decoder(config, platform)
    weights = sum(met_by_a_token(config, name, tuple(value.shape)) for name, value in platform.named_parameters(model))
    if config.tie_word_embeddings:
        weights += config.vocab_size * config.hidden_size
    latent = config.attention == "latent"
    width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim if latent else 2 * config.head_dim
    pairs = sum(
        1
        for layer in range(config.num_hidden_layers)
        for query in range(length)
        for key in range(query + 1)
        if config.window_of(layer) is None or query - key < config.window_of(layer)
    )
    expected = 6 * (weights + pairs / length * config.num_attention_heads * width)
    assert model.training_flops_per_token(length) == pytest.approx(expected, rel=1e-12)


def met_by_a_token(config, name: str, shape: tuple[int, ...]) -> float:
    """Count the elements of a weight that enter a product of one token: of embeddings, norms, biases and sinks none."""
    if name.startswith("embed.") or len(shape) < 2 or "norm" in name or name.endswith((".b1", ".b2", ".b3")):
        return 0
    size = math.prod(shape)
    return size * config.num_experts_per_tok / config.num_experts if len(shape) == 3 else size


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 9])
def test_visible_keys(length: int, window: int | None) -> None:
    seen = [min(query + 1, window or length) for query in range(length)]
    assert visible_keys(length, window) == pytest.approx(sum(seen) / length)
