"""Blocks of attention by torch's flash kernels: on the CPU in any floating dtype."""

from __future__ import annotations

import torch

from hp_dtensor.platform.attention import GAMMA, LOWEST, MIX_1, MIX_2, TINY, BlockScores

Tensor = torch.Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_STRIP, _MOST_IN_STRIPS = 256, 1024
"""Keys of a strip of a causal square in backward, and the longest square that is cut: in longer ones adding up the
strips takes more time than they save."""


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
    if (
        scores.is_causal
        and _STRIP < query.shape[2] <= _MOST_IN_STRIPS
        and query.dtype in (torch.float32, torch.float64)
    ):
        return _causal_grad(grad, query, key, value, out, lse, scores.scale)
    bias = _bias(scores.mask, query)
    d_q, d_k, d_v = _backward(
        grad, query, key, value, out, lse, 0.0, scores.is_causal, attn_mask=bias, scale=scores.scale
    )
    return d_q, d_k, d_v


def _causal_grad(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `block_grad` of a causal square, keys strip by strip.

    The kernel computes whole blocks of 512 keys, also where most of them are not seen. Given the keys of a strip, and
    the queries from its first one on, it computes but the strip's own corner in vain.
    """
    d_q, d_k, d_v = query, [], []
    for start in range(0, query.shape[2], _STRIP):
        g, q, o = (x[:, :, start:] for x in (grad, query, out))
        k, v = (x[:, :, start : start + _STRIP] for x in (key, value))
        found = _backward(g, q, k, v, o, lse[:, :, start:], 0.0, True, scale=scale)
        if start == 0:
            d_q = found[0]
        else:
            d_q[:, :, start:].add_(found[0])
        d_k.append(found[1])
        d_v.append(found[2])
    return d_q, torch.cat(d_k, 2), torch.cat(d_v, 2)


def merge(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute `Platform.merge_attention` in the memory of `one`."""
    (out, lse), (more, of_more) = one, other
    highest = torch.maximum(lse, of_more).clamp_(min=LOWEST)
    weight = torch.exp(of_more - highest)
    total = torch.exp(lse - highest).add_(weight)
    out.lerp_(more, weight.div_(total.clamp(min=TINY)).unsqueeze_(-1))
    torch.add(highest, total.log_(), out=lse)
    return one


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return a mask as what is added to the scores, of the queries' dtype, as the kernels want it."""
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
    return bias.expand(query.shape[0], 1, *mask.shape)
