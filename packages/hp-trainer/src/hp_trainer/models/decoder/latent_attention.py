"""Latent attention: keys and values are unfolded from one narrow vector per token (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

from typing import Any

from hp_dtensor.parallel import nn
from hp_dtensor.parallel.attention import AttentionDropout, AttentionMask, attention
from hp_trainer.models.decoder.attention import join_heads
from hp_trainer.models.decoder.config import DecoderConfig
from hp_trainer.models.decoder.rotary import Rotation
from hp_trainer.models.decoder.rotary_scaling import score_factor

Tensor = Any

# DeepSeek's own code fixes it for these two norms, whatever the configuration says.
_LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Causal latent attention with rotary positions on a part of each head.

    A head's query and key are a part without rotation, of width `qk_nope_head_dim`, and a rotated one, of width
    `qk_rope_head_dim`; the rotated part of the key is one for all heads.

    Attributes:
        q_proj: queries straight from the token; None where they are compressed (`q_a_proj`, `q_a_norm`, `q_b_proj`).
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
        self.scale = scale * score_factor(config.rope_scaling)

    def forward(
        self, x: Tensor, rotation: Rotation, mask: AttentionMask, dropout: AttentionDropout | None = None
    ) -> Tensor:
        """Transform every token: `[batch, length, hidden]` -> the same."""
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
        # One rotated key for all heads (DeepSeek-V2, arXiv 2405.04434, section 2.1.3): were the rest rotated, its
        # projection could not be folded into that of the queries.
        one_head = ops.reshape(shared, (batch, length, 1, self.rope))
        rotated = rotation(one_head, interleaved=self.config.rope_interleaved)
        return ops.cat([plain, ops.expand(rotated, (batch, length, heads, self.rope))], -1), values
