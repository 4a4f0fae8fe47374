"""Attention of the decoder: grouped-query (arXiv 2305.13245) and latent (DeepSeek-V2, arXiv 2405.04434), with norms.

Rotary positions (arXiv 2104.09864) rotate element pairs (i, i + head_dim / 2) with the token's position. Frequencies
are scaled for longer texts as in `transformers.modeling_rope_utils`, so that a model trained there computes the
same."""

from __future__ import annotations

import math
from typing import Any

import numpy

from hp_dtensor.parallel import nn
from hp_dtensor.parallel.attention import AttentionDropout, AttentionMask, attention
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import replicate_like
from hp_trainer.models.decoder.config import DecoderConfig
from hp_trainer.models.decoder.options import DecoderOptions, RopeScalingConfig

Array = numpy.ndarray


def rotary_frequencies(dim: int, theta: float, scaling: RopeScalingConfig) -> tuple[Array, float]:
    """Return the angle per position of each rotated pair, and the factor on cosines and sines.

    Returns:
        float64 `[dim / 2]` in radians, and the factor, which is 1 except for YaRN.
    """
    # theta**(-2i / dim) for pair i (arXiv 2104.09864, section 3.2.2).
    plain = theta ** (-numpy.arange(0, dim, 2) / dim)
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, dim, theta, scaling), _yarn_attention_factor(scaling)
    return plain, 1.0


def score_factor(scaling: RopeScalingConfig) -> float:
    """Return YaRN's factor on the scores of latent attention (DeepSeek-V3's `mscale_all_dim`); 1 without YaRN."""
    if scaling.kind != "yarn" or scaling.mscale_all_dim is None:
        return 1.0
    return _magnitude(scaling.factor, scaling.mscale_all_dim) ** 2


def _llama3(plain: Array, scaling: RopeScalingConfig) -> Array:
    assert scaling.original_max_position_embeddings is not None
    length, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    # Rotations of each pair within a text of the first training: slow pairs are scaled, fast ones unchanged.
    turns = length * plain / (2 * math.pi)
    unscaled = numpy.clip((turns - low) / (high - low), 0.0, 1.0)
    blended: Array = (1 - unscaled) * plain / scaling.factor + unscaled * plain
    return blended


def _yarn(plain: Array, dim: int, theta: float, scaling: RopeScalingConfig) -> Array:
    """Blend scaled and unscaled frequencies (arXiv 2309.00071, section 3.2)."""
    assert scaling.original_max_position_embeddings is not None
    length = scaling.original_max_position_embeddings

    def pair_that_turns(times: float) -> float:
        # The pair i with `length * theta**(-2i / dim) = 2 pi * times`, solved for i.
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    # Pairs faster than `low` keep their frequency, slower than `high` are scaled, and those between are blended.
    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # Equal bounds would divide by zero.
    high = high + 0.001 if low == high else high
    scaled = numpy.clip((numpy.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    blended: Array = scaled * plain / scaling.factor + (1 - scaled) * plain
    return blended


def _yarn_attention_factor(scaling: RopeScalingConfig) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return _magnitude(scaling.factor, scaling.mscale) / _magnitude(scaling.factor, scaling.mscale_all_dim)
    return _magnitude(scaling.factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    # sqrt(1 / t) = 0.1 ln(s) + 1 (YaRN, section 3.4), with DeepSeek's factor `mscale`.
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


Tensor = Any


class RotaryTables:
    """Cosines and sines of all positions, computed once per length.

    Attributes:
        sequence_ranks: context parallel ranks that share a sequence; positions are those in the full sequence.
    """

    def __init__(self, platform: Platform, config: DecoderOptions) -> None:
        self.platform, self.sequence_ranks = platform, 1
        self.frequencies, self.factor = rotary_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def of_length(self, length: int, positions: Tensor | None, like: Tensor) -> Rotation:
        """Return the rotation of a text of `length` tokens, replicated over the mesh of `like` if that is a DTensor.

        Args:
            positions: int64 `[batch, length]`, each below the length of the full sequence; None: 0 .. length - 1 in
                every sample.
        """
        if positions is not None and self.sequence_ranks > 1:
            # A rank has one or two chunks of the sequence, each at most one token shorter than those of other ranks.
            length = (length + 2) * self.sequence_ranks
        if length not in self._tables:
            # In float64: at position 10**6 an angle in float32 is off by up to 0.03 radians.
            angles = numpy.outer(numpy.arange(length), self.frequencies)
            tables = (self.factor * numpy.cos(angles), self.factor * numpy.sin(angles))
            cos, sin = (self.platform.from_numpy(table.astype(numpy.float32)) for table in tables)
            self._tables[length] = cos, sin
        cos, sin = self._tables[length]
        ops = self.platform.ops
        if positions is not None:
            cos, sin = ops.embedding(positions, cos), ops.embedding(positions, sin)
        # Broadcastable over heads: `[(batch,) length, 1, pairs]`.
        cos, sin = ops.unsqueeze(cos, -2), ops.unsqueeze(sin, -2)
        return Rotation(self.platform, replicate_like(cos, like), replicate_like(sin, like))


class Rotation:
    """Rotates queries and keys by their positions.

    An object rather than two tensors: mixed precision casts the tensors among a module's inputs, and in 16 bits the
    angles of far positions would be wrong.
    """

    __slots__ = ("cos", "platform", "sin")

    def __init__(self, platform: Platform, cos: Tensor, sin: Tensor) -> None:
        self.platform, self.cos, self.sin = platform, cos, sin

    def __call__(self, x: Tensor, *, interleaved: bool = False) -> Tensor:
        """Rotate `x` `[batch, length, heads, head_dim]` in float32; the result has `x`'s dtype.

        Args:
            interleaved: pairs are neighbours (2i, 2i + 1). The result has them half a head apart all the same, which
                changes no score, because scores are products of two such vectors.
        """
        ops = self.platform.ops
        wide = ops.cast(x, self.platform.dtype("float32"))
        fused = None if interleaved else self.platform.fused_rotary(wide, self.cos, self.sin)
        if fused is not None:
            return ops.cast(fused, x.dtype)
        first, second = self._pairs(wide, interleaved)
        rotated = (
            ops.sub(ops.mul(first, self.cos), ops.mul(second, self.sin)),
            ops.add(ops.mul(second, self.cos), ops.mul(first, self.sin)),
        )
        return ops.cast(ops.cat(rotated, -1), x.dtype)

    def _pairs(self, x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        ops = self.platform.ops
        if not interleaved:
            first, second = ops.chunk(x, 2, -1)
            return first, second
        *outer, width = x.shape
        first, second = ops.chunk(ops.reshape(x, (*outer, width // 2, 2)), 2, -1)
        return ops.squeeze(first, -1), ops.squeeze(second, -1)


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
