"""Attention: blocks by torch's flash kernel for CPUs, multi-head attention composed of operations with rules, routing.

`multi_head_attention` lets `nn.MultiheadAttention` and the layers of `nn.Transformer` take DTensors. Dropout draws its
random numbers in the shapes in which torch draws them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hp_dtensor.exceptions import AttentionError, ShardingRuleError
from hp_dtensor.platform.attention import GAMMA, LOWEST, MIX_1, MIX_2, TINY, BlockScores
from hp_platform_torch.ops import ascend

Tensor = torch.Tensor


_aten = torch.ops.aten.scaled_dot_product_attention
_ROUTED = (F.scaled_dot_product_attention, _aten, _aten.default)


class RoutedAttention(TorchFunctionMode):
    """`Platform.route_attention`: calls of `scaled_dot_product_attention` within the context, of this thread only.

    Those of `nn.MultiheadAttention` are among them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(func is each for each in _ROUTED):
            result = self._call(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is F.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs)
        return func(*args, **kwargs)

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(multi_head_attention).bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["need_weights"] or (given.arguments["training"] and given.arguments["dropout_p"]):
            raise AttentionError(
                "context parallelism: nn.MultiheadAttention with need_weights=True or dropout attends to one rank's "
                "tokens; call it with need_weights=False and without dropout, or call hp_dtensor.attention"
            )
        # Torch's function calls attention while modes are off; within this one they are on.
        with self:
            return multi_head_attention(*args, **kwargs)

    def _call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        # Attention of hp_dtensor always shares key-value heads, torch's only a single one (by broadcasting).
        if not enable_gqa and query.dim() == key.dim() == 4 and key.shape[1] not in (1, query.shape[1]):
            raise AttentionError(
                f"scaled_dot_product_attention: expected equally many heads, got queries {list(query.shape)} and keys "
                f"{list(key.shape)}; pass enable_gqa=True to share key-value heads"
            )
        return self._function(query, key, value, attn_mask, dropout_p, is_causal, scale)


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return torch's scaled dot-product attention of local tensors, by torch_npu's fused operation where it fits."""
    fits = attn_mask is None and dropout_p == 0 and (enable_gqa or query.shape[-3:-2] == key.shape[-3:-2])
    if fits and ascend.takes_attention(query, value):
        return ascend.attention(*(x.as_subclass(Tensor) for x in (query, key, value)), is_causal, scale)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_NARROW_STRIP, _WIDE_STRIP, _LONGEST_NARROW = 128, 256, 1024
"""Keys per strip of a causal square in backward, and the longest square with narrow ones. The narrower strips are, the
fewer masked scores are computed, and the more gradients of queries are added up."""


def takes(query: Tensor, value: Tensor) -> bool:
    """Return whether the kernels support these tensors."""
    return query.device.type == "cpu" and 0 < query.shape[-1] == value.shape[-1] and query.numel() > 0


def takes_scores(scores: BlockScores) -> bool:
    """Return whether the kernels support these scores; their own dropout ignores the global positions of entries."""
    return scores.soft_cap is None and scores.dropout is None


def dropout_factors(p: float, rows: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Compute `Platform.dropout_factors` on the device of these int64 vectors."""
    numbers = rows
    # A counter-based generator (SplitMix64): each factor depends on the global indices only, so every sharding draws
    # the same ones.
    for places in (heads, queries, keys):
        numbers = _mixed(numbers[..., None] + (places + 1) * _signed(GAMMA))
    # The upper 24 bits, which is what float32 can represent exactly.
    survives = _shifted(numbers, 40) >= round(p * 2**24)
    return survives.float() / (1 - p) if p < 1 else torch.zeros_like(survives, dtype=torch.float32)


def _mixed(z: Tensor) -> Tensor:
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z = z.bitwise_xor_(_shifted(z, shift)).mul_(_signed(factor))
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right as unsigned 64-bit numbers; torch's int64 would shift the sign in."""
    return (z >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def block(query: Tensor, key: Tensor, value: Tensor, scores: BlockScores) -> tuple[Tensor, Tensor]:
    """Compute `Platform.attention_block` without a soft cap or dropout."""
    bias = _bias(scores.mask, query)
    out, lse = _forward(query, key, value, 0.0, scores.is_causal, attn_mask=bias, scale=scores.scale)
    if scores.mask is not None:
        # The kernel returns 0 for a query without visible keys.
        lse = lse.masked_fill(~scores.mask.any(-1), -torch.inf)
    return out, lse


def block_grad(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scores: BlockScores
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `Platform.attention_block_grad` without a soft cap or dropout."""
    if scores.is_causal and query.dtype in (torch.float32, torch.float64):
        length = query.shape[2]
        strip = _NARROW_STRIP if length <= _LONGEST_NARROW else _WIDE_STRIP
        if strip < length:
            return _causal_grad(grad, query, key, value, out, lse, scores.scale, strip)
    bias = _bias(scores.mask, query)
    d_q, d_k, d_v = _backward(
        grad, query, key, value, out, lse, 0.0, scores.is_causal, attn_mask=bias, scale=scores.scale
    )
    return d_q, d_k, d_v


def _causal_grad(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, strip: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `block_grad` of a causal square in strips of `strip` keys.

    The kernel computes full blocks of 512 keys, even where most are masked. Given one strip of keys, and the queries
    from its first position on, it wastes only the strip's own masked corner.
    """
    # `d_q` is replaced in the first strip, whose queries are all of them.
    d_q, d_k, d_v = query, [], []
    for start in range(0, query.shape[2], strip):
        g, q, o = (x[:, :, start:] for x in (grad, query, out))
        k, v = (x[:, :, start : start + strip] for x in (key, value))
        found = _backward(g, q, k, v, o, lse[:, :, start:], 0.0, True, scale=scale)
        if start == 0:
            d_q = found[0]
        else:
            d_q[:, :, start:].add_(found[0])
        d_k.append(found[1])
        d_v.append(found[2])
    return d_q, torch.cat(d_k, 2), torch.cat(d_v, 2)


def merge_blocks_in_place(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Merge the second pair of attention and log-sum-exp into the first (`Platform.merge_blocks_in_place`)."""
    (out, lse), (more, of_more) = one, other
    # Log-sum-exp relative to the larger value; clamped, because -inf - -inf is NaN for a query without visible keys.
    highest = torch.maximum(lse, of_more).clamp_(min=LOWEST)
    weight = torch.exp(of_more - highest)
    total = torch.exp(lse - highest).add_(weight)
    # out + w (more - out) with w = exp(lse_2) / (exp(lse_1) + exp(lse_2)): both outputs are normalized already.
    out.lerp_(more, weight.div_(total.clamp(min=TINY)).unsqueeze_(-1))
    torch.add(highest, total.log_(), out=lse)
    return one


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return a mask as a bias of the scores in the queries' dtype, as the kernels require."""
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
    return bias.expand(query.shape[0], 1, *mask.shape)


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
            where weights are requested.
    """
    if any(x is not None for x in (bias_k, bias_v, static_k, static_v)) or add_zero_attn:
        raise ShardingRuleError(
            "multi_head_attention_forward of DTensors takes no bias_k, bias_v, add_zero_attn, static_k or static_v"
        )
    # Torch packs the three projections into one matrix where their sizes are equal.
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight.chunk(3)  # type: ignore[union-attr]
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    batched = query.dim() == 3
    inputs = (query, key, value) if batched else tuple(x.unsqueeze(1) for x in (query, key, value))
    projected = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
    q, k, v = (x.reshape(*x.shape[:2], num_heads, -1).permute(1, 2, 0, 3) for x in projected)
    dropout_p = dropout_p if training else 0.0
    explicit = need_weights or dropout_p > 0  # the rule of the fused operation has no dropout
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
    """Merge both masks into one bias of the scores `[batch, heads, length, keys]`."""
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
