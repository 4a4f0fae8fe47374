"""Attention of the decoder: grouped-query (arXiv 2305.13245) and latent (DeepSeek-V2, arXiv 2405.04434), with norms."""

from __future__ import annotations

from typing import Any

from hp_dtensor.parallel import nn
from hp_dtensor.parallel.attention import AttentionDropout, AttentionMask, attention
from hp_trainer.models.decoder.config import DecoderConfig
from hp_trainer.models.decoder.rotary import Rotation, score_factor

Tensor = Any


class UnitOffsetRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, as Gemma does, so that weights near 0 change little."""

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.ops.add(self.weight, 1.0), self.eps)


def build_norm(config: DecoderConfig, dim: int) -> Any:
    """Return the configured norm over a last dimension of width `dim`."""
    kind = UnitOffsetRMSNorm if config.norm_unit_offset else nn.RMSNorm
    return kind(dim, config.rms_norm_eps)


class GroupedAttention(nn.Module):
    """Causal grouped-query attention with rotary positions.

    Biases, normalized queries and keys, soft caps and sinks are options.

    Attributes:
        sinks: `[num_attention_heads]`, a learned score per head that takes part in the softmax and has no value
            (gpt-oss); None: no sinks.
        q_norm, k_norm: norms of queries and keys; None: not normalized.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.output_bias)
        self.q_norm = self._query_key_norm(width)
        self.k_norm = self._query_key_norm(kv_width)
        self.sinks: Any = self.parameter((self.num_heads,)) if config.attention_sinks else None

    def forward(
        self, x: Tensor, rotation: Rotation, mask: AttentionMask, dropout: AttentionDropout | None = None
    ) -> Tensor:
        """Transform every token: `[batch, length, hidden]` -> the same shape."""
        q = self._normalized(self.q_norm, self.q_proj(x), self.num_heads)
        k = self._normalized(self.k_norm, self.k_proj(x), self.num_kv_heads)
        v = self._heads(self.v_proj(x), self.num_kv_heads)
        # Rotation is done as `[batch, length, heads, head_dim]`, where the tables broadcast over heads; attention wants
        # heads first.
        q, k, v = (self.ops.transpose(each, 1, 2) for each in (rotation(q), rotation(k), v))
        out = attention(
            q,
            k,
            v,
            mask=mask,
            scale=self.config.attention_scale,
            soft_cap=self.config.attention_soft_cap,
            sinks=self.sinks,
            dropout=dropout,
        )
        return self.o_proj(join_heads(self.ops, out))

    def _query_key_norm(self, width: int) -> Any:
        if self.config.qk_norm == "none":
            return None
        return build_norm(self.config, width if self.config.qk_norm == "full" else self.head_dim)

    def _normalized(self, norm: Any, x: Tensor, heads: int) -> Tensor:
        if norm is None:
            return self._heads(x, heads)
        # OLMoE normalizes all heads together, Qwen3 each head.
        return self._heads(norm(x), heads) if self.config.qk_norm == "full" else norm(self._heads(x, heads))

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        batch, length, _ = x.shape
        return self.ops.reshape(x, (batch, length, heads, self.head_dim))


def join_heads(ops: Any, x: Tensor) -> Tensor:
    """Join heads: `[batch, heads, length, head_dim]` -> `[batch, length, heads * head_dim]`."""
    batch, heads, length, head_dim = x.shape
    return ops.reshape(ops.transpose(x, 1, 2), (batch, length, heads * head_dim))


# DeepSeek's own code uses this constant for these two norms, whatever `rms_norm_eps` is.
_LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Causal latent attention: keys and values are computed from one narrow vector per token.

    A head's query and key consist of `qk_nope_head_dim` elements without rotary positions and `qk_rope_head_dim`
    rotated ones. All heads share the rotated elements of the key.

    Attributes:
        q_proj: query projection; None where queries are compressed too (`q_a_proj`, `q_a_norm`, `q_b_proj`).
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.nope, self.rope, self.value_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        hidden, rank, q_rank = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
        query_width = self.num_heads * (self.nope + self.rope)
        self.q_proj: Any = nn.Linear(hidden, query_width) if q_rank is None else None
        self.q_a_proj: Any = None if q_rank is None else nn.Linear(hidden, q_rank)
        self.q_a_norm: Any = None if q_rank is None else nn.RMSNorm(q_rank, _LATENT_NORM_EPS)
        self.q_b_proj: Any = None if q_rank is None else nn.Linear(q_rank, query_width)
        self.kv_a_proj = nn.Linear(hidden, rank + self.rope)
        self.kv_a_norm = nn.RMSNorm(rank, _LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(rank, self.num_heads * (self.nope + self.value_dim))
        self.o_proj = nn.Linear(self.num_heads * self.value_dim, hidden)
        scale = (self.nope + self.rope) ** -0.5 if config.attention_scale is None else config.attention_scale
        # DeepSeek applies YaRN's factor to the scores. Where mscale equals mscale_all_dim, cosines and sines have none.
        self.scale = scale * score_factor(config.rope_scaling)

    def forward(
        self, x: Tensor, rotation: Rotation, mask: AttentionMask, dropout: AttentionDropout | None = None
    ) -> Tensor:
        """Transform every token: `[batch, length, hidden]` -> the same shape."""
        ops = self.ops
        q = self._queries(x, rotation)
        k, v = self._keys_and_values(x, rotation)
        q, k, v = (ops.transpose(each, 1, 2) for each in (q, k, v))
        out = attention(q, k, v, mask=mask, scale=self.scale, soft_cap=self.config.attention_soft_cap, dropout=dropout)
        return self.o_proj(join_heads(ops, out))

    def _queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return `[batch, length, heads, qk_nope_head_dim + qk_rope_head_dim]`."""
        narrow = x if self.q_a_proj is None else self.q_a_norm(self.q_a_proj(x))
        wide = self.q_b_proj(narrow) if self.q_proj is None else self.q_proj(narrow)
        batch, length, _ = x.shape
        heads = self.ops.reshape(wide, (batch, length, self.num_heads, self.nope + self.rope))
        plain, rotated = self.ops.split(heads, [self.nope, self.rope], -1)
        return self.ops.cat([plain, rotation(rotated, interleaved=self.config.rope_interleaved)], -1)

    def _keys_and_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return keys as `_queries` does, and values `[batch, length, heads, v_head_dim]`."""
        ops, heads = self.ops, self.num_heads
        batch, length, _ = x.shape
        narrow, shared = ops.split(self.kv_a_proj(x), [self.config.kv_lora_rank, self.rope], -1)
        wide = ops.reshape(self.kv_b_proj(self.kv_a_norm(narrow)), (batch, length, heads, self.nope + self.value_dim))
        plain, values = ops.split(wide, [self.nope, self.value_dim], -1)
        # One rotated key for all heads (DeepSeek-V2, section 2.1.3). If the other elements were rotated too, their
        # projection could not be folded into that of the queries.
        one_head = ops.reshape(shared, (batch, length, 1, self.rope))
        rotated = rotation(one_head, interleaved=self.config.rope_interleaved)
        return ops.cat([plain, ops.expand(rotated, (batch, length, heads, self.rope))], -1), values
