"""Floating-point operations of the decoder: those of its matrix products, which are nearly all."""

from __future__ import annotations

from hp_trainer.models.decoder.config import DecoderConfig


def training_flops_per_token(config: DecoderConfig, sequence_length: int) -> float:
    """Return the operations that a token needs in forward and backward, on average over one document.

    A weight of a matrix product costs 2 in forward and 4 in backward for each token that meets it, so an expert
    counts for the tokens that are routed to it. Attention's two products count the pairs of query and key that the
    causal mask and the window let see each other. Nothing is counted that is computed again (PaLM, arXiv 2204.02311,
    appendix B, which counts all pairs).
    """
    return sum(layer_flops_per_token(config, sequence_length)) + head_flops_per_token(config)


def layer_flops_per_token(config: DecoderConfig, sequence_length: int) -> list[float]:
    """Return the same for each block, by which a pipeline is cut into stages."""
    widths = config.num_attention_heads * (_score_width(config) + _value_width(config))
    keys = [visible_keys(sequence_length, config.window_of(layer)) for layer in range(config.num_hidden_layers)]
    return [
        6.0 * (_attention_weights(config) + _feed_forward_weights(config, layer) + seen * widths)
        for layer, seen in enumerate(keys)
    ]


def routed_flops_per_token(config: DecoderConfig, layer: int) -> float:
    """Return the part of a block's operations that its gate and its routed experts have; 0 of a dense block."""
    if config.num_experts is None or config.is_dense(layer):
        return 0.0
    experts = 3 * config.moe_intermediate_size * config.num_experts_per_tok
    return 6.0 * config.hidden_size * (experts + config.num_experts)


def head_flops_per_token(config: DecoderConfig) -> float:
    """Return the same for the head."""
    return 6.0 * config.hidden_size * config.vocab_size


def visible_keys(length: int, window: int | None) -> float:
    """Return how many keys a query of a document sees on average, itself included."""
    width = length if window is None else min(window, length)
    return width - width * (width - 1) / 2 / length


def _attention_weights(config: DecoderConfig) -> int:
    hidden, heads = config.hidden_size, config.num_attention_heads
    output = heads * _value_width(config) * hidden
    query_width = heads * _score_width(config)
    if config.attention == "grouped":
        return hidden * (query_width + 2 * config.num_key_value_heads * config.head_dim) + output
    rank = config.q_lora_rank
    queries = hidden * query_width if rank is None else (hidden + query_width) * rank
    compressed = hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
    return queries + compressed + config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim) + output


def _feed_forward_weights(config: DecoderConfig, layer: int) -> int:
    if config.num_experts is None or config.is_dense(layer):
        return 3 * config.hidden_size * config.intermediate_size
    experts = config.num_experts_per_tok + config.num_shared_experts
    return config.hidden_size * (3 * config.moe_intermediate_size * experts + config.num_experts)


def _score_width(config: DecoderConfig) -> int:
    """Return the width of a head's queries and keys."""
    return config.head_dim if config.attention == "grouped" else config.qk_nope_head_dim + config.qk_rope_head_dim


def _value_width(config: DecoderConfig) -> int:
    """Return the width of a head's values."""
    return config.head_dim if config.attention == "grouped" else config.v_head_dim
