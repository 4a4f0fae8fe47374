"""Grouped-query attention: each key-value head is shared by several query heads (arXiv 2305.13245)."""

from __future__ import annotations

from typing import Any

from hp_dtensor.parallel import nn
from hp_dtensor.parallel.attention import AttentionDropout, AttentionMask, attention
from hp_trainer.models.decoder.config import DecoderConfig
from hp_trainer.models.decoder.norm import build_norm
from hp_trainer.models.decoder.rotary import Rotation

Tensor = Any


class GroupedAttention(nn.Module):
    """Causal grouped-query attention with rotary positions.

    Biases, normalized queries and keys, soft caps and sinks are options.

    Attributes:
        sinks: `[num_attention_heads]`, a score of each head that takes weight from the others and brings no value
            (gpt-oss); None: there are none.
        q_norm, k_norm: None where queries and keys are not normalized.
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
        """Transform every token: `[batch, length, hidden]` -> the same."""
        q = self._normalized(self.q_norm, self.q_proj(x), self.num_heads)
        k = self._normalized(self.k_norm, self.k_proj(x), self.num_kv_heads)
        v = self._heads(self.v_proj(x), self.num_kv_heads)
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
        return self._heads(norm(x), heads) if self.config.qk_norm == "full" else norm(self._heads(x, heads))

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        batch, length, _ = x.shape
        return self.ops.reshape(x, (batch, length, heads, self.head_dim))


def join_heads(ops: Any, x: Tensor) -> Tensor:
    """Lay the heads of `[batch, heads, length, head_dim]` side by side: `[batch, length, heads * head_dim]`."""
    batch, heads, length, head_dim = x.shape
    return ops.reshape(ops.transpose(x, 1, 2), (batch, length, heads * head_dim))
