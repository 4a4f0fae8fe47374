"""`torch.nn.functional.multi_head_attention_forward` put together from operations that have sharding rules.

So `nn.MultiheadAttention` and the layers of `nn.Transformer` take DTensors. Random numbers of dropout are drawn in the
shapes in which torch draws them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hp_dtensor.exceptions import ShardingRuleError

Tensor = torch.Tensor


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute multi-head attention; arguments and results as torch's, `[length, batch, features]` or without a batch.

    Raises:
        ShardingRuleError: extra keys and values (`bias_k`, `add_zero_attn`, `static_k`), or causal without a mask
            where weights are wanted.
    """
    if any(x is not None for x in (bias_k, bias_v, static_k, static_v)) or add_zero_attn:
        raise ShardingRuleError(
            "multi_head_attention_forward of DTensors takes no bias_k, bias_v, add_zero_attn, static_k or static_v"
        )
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight.chunk(3)  # type: ignore[union-attr]
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    batched = query.dim() == 3
    inputs = (query, key, value) if batched else tuple(x.unsqueeze(1) for x in (query, key, value))
    projected = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]  # type: ignore[arg-type]
    q, k, v = (x.reshape(*x.shape[:2], num_heads, -1).permute(1, 2, 0, 3) for x in projected)
    dropout_p = dropout_p if training else 0.0
    explicit = need_weights or dropout_p > 0  # the fused operation of DTensors has no dropout
    is_causal = is_causal and key_padding_mask is None and not explicit
    mask = None if is_causal else _merged(attn_mask, key_padding_mask, (q.shape[0], num_heads), q)
    if explicit:
        attended, shares = _attend(q, k, v, mask, dropout_p)
    else:
        attended, shares = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal), None
    if shares is not None:
        shares = None if not need_weights else shares.mean(1) if average_attn_weights else shares
    output = F.linear(attended.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    return (output, shares) if batched else (output.squeeze(1), None if shares is None else shares.squeeze(0))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> tuple[Tensor, Tensor]:
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    shares = F.softmax(scores if mask is None else scores + mask, -1)
    shares = F.dropout(shares, dropout_p) if dropout_p else shares
    return shares @ v, shares


def _merged(attn_mask: Tensor | None, padding: Tensor | None, batch: Sequence[int], q: Tensor) -> Tensor | None:
    """Merge both masks into one that is added to the scores `[batch, heads, length, keys]`."""
    masks: list[Any] = []
    if attn_mask is not None:
        masks.append(attn_mask.reshape(*batch, *attn_mask.shape[1:]) if attn_mask.dim() == 3 else attn_mask)
    if padding is not None:
        masks.append(padding.reshape(batch[0] if padding.dim() == 2 else 1, 1, 1, padding.shape[-1]))
    if not masks:
        return None
    return sum((_additive(mask, q) for mask in masks[1:]), _additive(masks[0], q))


def _additive(mask: Tensor, q: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, float("-inf"))
