"""Blocks of attention by torch's flash kernels: on the CPU in any floating dtype."""

from __future__ import annotations

import torch

from hp_dtensor.platform.attention import GAMMA, MIX_1, MIX_2, BlockScores

Tensor = torch.Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def takes(query: Tensor, value: Tensor) -> bool:
    """Return whether the kernels take such tensors."""
    return query.device.type == "cpu" and 0 < query.shape[-1] == value.shape[-1] and query.numel() > 0


def takes_scores(scores: BlockScores) -> bool:
    """Return whether the kernels compute such scores; their own dropout does not know the places of entries."""
    return scores.soft_cap is None and scores.dropout is None


def dropout_factors(p: float, rows: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Compute `Platform.dropout_factors`, the same as `kept_entries` does, on the device of these int64 vectors."""
    numbers = rows
    for places in (heads, queries, keys):
        numbers = _mixed(numbers[..., None] + (places + 1) * _signed(GAMMA))
    kept = _shifted(numbers, 40) >= round(p * 2**24)
    return kept.float() / (1 - p) if p < 1 else torch.zeros_like(kept, dtype=torch.float32)


def _mixed(z: Tensor) -> Tensor:
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z = z.bitwise_xor_(_shifted(z, shift)).mul_(_signed(factor))
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift 64-bit numbers without a sign to the right; torch's int64 would shift its sign in."""
    return (z >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def block(query: Tensor, key: Tensor, value: Tensor, scores: BlockScores) -> tuple[Tensor, Tensor]:
    """Compute `Platform.attention_block` without a soft cap or dropout."""
    bias = _bias(scores.mask, query)
    out, lse = _forward(query, key, value, 0.0, scores.is_causal, attn_mask=bias, scale=scores.scale)
    if scores.mask is not None:
        # The kernel gives 0 for a query that sees no key.
        lse = lse.masked_fill(~scores.mask.any(-1), -torch.inf)
    return out, lse


def block_grad(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scores: BlockScores
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `Platform.attention_block_grad` without a soft cap or dropout."""
    bias = _bias(scores.mask, query)
    d_q, d_k, d_v = _backward(
        grad, query, key, value, out, lse, 0.0, scores.is_causal, attn_mask=bias, scale=scores.scale
    )
    return d_q, d_k, d_v


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return a mask as what is added to the scores, of the queries' dtype, as the kernels want it."""
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
    return bias.expand(query.shape[0], 1, *mask.shape)
