"""Blocks of attention by torch's flash kernels: on the CPU in any floating dtype."""

from __future__ import annotations

import torch

from hp_dtensor.platform.attention import BlockScores

Tensor = torch.Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def takes(query: Tensor, value: Tensor) -> bool:
    """Return whether the kernels take such tensors."""
    return query.device.type == "cpu" and 0 < query.shape[-1] == value.shape[-1] and query.numel() > 0


def block(query: Tensor, key: Tensor, value: Tensor, scores: BlockScores) -> tuple[Tensor, Tensor]:
    """Compute `Platform.attention_block` without a soft cap."""
    bias = _bias(scores.mask, query)
    out, lse = _forward(query, key, value, 0.0, scores.is_causal, attn_mask=bias, scale=scores.scale)
    if scores.mask is not None:
        # The kernel gives 0 for a query that sees no key.
        lse = lse.masked_fill(~scores.mask.any(-1), -torch.inf)
    return out, lse


def block_grad(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scores: BlockScores
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `Platform.attention_block_grad` without a soft cap."""
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
