"""Names and shapes of the parameters of an attention layer, in the order of its modules, without building one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# By name alone: `hp_trainer.models.decoder` builds on this module.
DecoderConfig = Any
Shape = tuple[int, ...]


def attention_shapes(config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    """Yield the name within the layer, and the shape, of each parameter of grouped or latent attention."""
    return _latent_attention(config) if config.attention == "latent" else _grouped_attention(config)


def _grouped_attention(config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    if config.attention_sinks:
        yield "sinks", (config.num_attention_heads,)
    for name, size in (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)):
        yield from linear_shapes(name, hidden, size, config.qkv_bias)
    yield from linear_shapes("o_proj", width, hidden, config.output_bias)
    if config.qk_norm != "none":
        full = config.qk_norm == "full"
        yield "q_norm.weight", (width if full else config.head_dim,)
        yield "k_norm.weight", (kv_width if full else config.head_dim,)


def _latent_attention(config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    hidden, heads, rank, q_rank = (
        config.hidden_size,
        config.num_attention_heads,
        config.kv_lora_rank,
        config.q_lora_rank,
    )
    query_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    if q_rank is None:
        yield from linear_shapes("q_proj", hidden, query_width)
    else:
        yield from linear_shapes("q_a_proj", hidden, q_rank)
        yield "q_a_norm.weight", (q_rank,)
        yield from linear_shapes("q_b_proj", q_rank, query_width)
    yield from linear_shapes("kv_a_proj", hidden, rank + config.qk_rope_head_dim)
    yield "kv_a_norm.weight", (rank,)
    yield from linear_shapes("kv_b_proj", rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
    yield from linear_shapes("o_proj", heads * config.v_head_dim, hidden)


def linear_shapes(name: str, inputs: int, outputs: int, bias: bool = False) -> Iterator[tuple[str, Shape]]:
    """Yield the shapes of a linear layer's weight and bias."""
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)
