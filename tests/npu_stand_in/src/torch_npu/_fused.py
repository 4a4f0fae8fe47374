"""The fused operations that hp_platform_torch calls, with torch_npu's signatures, composed of torch's operations.

Sources: https://gitcode.com/Ascend/op-plugin/tree/master/docs/context, one page per operation. What the pages exclude
is refused; what they leave open is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"the stand-in for torch_npu: {what}")


def _check_operands(*tensors: Tensor) -> None:
    for x in tensors:
        _check(type(x) in (Tensor, torch.nn.Parameter), f"expected a plain tensor, got {type(x).__name__}")
        _check(x.device.type == "npu", f"expected tensors on npu, got {x.device}")
        _check(x.dtype in _DTYPES and x.dtype is tensors[0].dtype, f"got dtypes {[x.dtype for x in tensors]}")


def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    scale: Any = None,
    offset: Any = None,
    antiquant_scale: Any = None,
    antiquant_offset: Any = None,
    per_token_scale: Any = None,
    group_list: Tensor | None = None,
    activation_input: Any = None,
    activation_quant_scale: Any = None,
    activation_quant_offset: Any = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
    output_dtype: torch.dtype | None = None,
    tuning_config: Any = None,
) -> list[Tensor]:
    """Multiply one tensor by groups. Without a backward, as the original: the result requires no gradient."""
    only_ends = (bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale, act_type, output_dtype)
    _check(not any(only_ends), "npu_grouped_matmul has no bias, quantization or activation here")
    _check(
        len(x) == len(weight) == 1 and split_item in (2, 3), "npu_grouped_matmul takes one x, one weight, one result"
    )
    _check(isinstance(group_list, Tensor) and group_list.dtype is torch.int64, "group_list is an int64 tensor")
    _check(group_list_type in (0, 1), f"got group_list_type {group_list_type}")
    (rows,), (matrices,) = x, weight
    _check_operands(rows, matrices)
    _check(max(*rows.shape, *matrices.shape[-2:]) < 65536, "inner dimensions are below 65536")
    _check(group_list.device == rows.device, f"group_list is on {group_list.device}")
    with torch.no_grad():
        ends = (group_list if group_list_type == 0 else group_list.cumsum(0)).cpu().tolist()
        _check(ends == sorted(ends), "group_list does not decrease")
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        if group_type == 0:
            _check(rows.is_contiguous() and matrices.dim() == 3, "x is not transposed, and weight has 3 dimensions")
            _check(ends[-1] == rows.shape[0], f"the groups have {ends[-1]} rows, and x {rows.shape[0]}")
            return [torch.cat([rows[a:b] @ matrices[e] for e, (a, b) in enumerate(spans)])]
        _check(group_type == 2, f"got group_type {group_type}")
        _check(rows.dim() == matrices.dim() == 2 and rows.t().is_contiguous(), "x is transposed, and weight is 2-D")
        _check(ends[-1] == rows.shape[1], f"the groups have {ends[-1]} columns, and x {rows.shape[1]}")
        unwritten = torch.full((rows.shape[0], matrices.shape[1]), float("nan"), dtype=rows.dtype, device=rows.device)
        return [torch.stack([rows[:, a:b] @ matrices[a:b] if a < b else unwritten for a, b in spans])]


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Return attention, the maximum and the sum of each row of the softmax, and what dropout would need."""
    _check(input_layout == "BNSD" and query.dim() == 4, f"got input_layout {input_layout!r}; BNSD is here")
    _check(
        pse is None and padding_mask is None and prefix is None and keep_prob == 1, "no pse, padding or dropout here"
    )
    _check(head_num == query.shape[1] and head_num % key.shape[1] == 0, "heads do not fit")
    _check(key.shape == value.shape and query.shape[-1] <= 768, "keys and values have one shape, heads at most 768")
    _check_operands(query, key, value)
    shared = head_num // key.shape[1]
    k, v = (each.repeat_interleave(shared, 1).float() for each in (key, value))
    scores = query.float() @ k.transpose(-2, -1) * scale
    if atten_mask is not None:
        scores = scores.masked_fill(_hidden(atten_mask, sparse_mode, scores), -torch.inf)
    highest = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    attended = (weights / total @ v).to(query.dtype)
    rows = (*query.shape[:3], 8)
    empty = torch.empty(0, device=query.device)
    return attended, highest.expand(rows), total.detach().expand(rows), empty, 0, 0, 0


def _hidden(mask: Tensor, sparse_mode: int, scores: Tensor) -> Tensor:
    _check(
        mask.device == scores.device and mask.dtype in (torch.bool, torch.uint8), "atten_mask is bool, on the device"
    )
    queries, keys = scores.shape[-2:]
    if sparse_mode == 0:
        _check(mask.shape[-2:] == (queries, keys), f"got atten_mask {list(mask.shape)}")
        return mask.bool()
    # The mask of these modes is compressed: a triangle of this size, for all lengths.
    _check(sparse_mode in (2, 3) and mask.shape == (2048, 2048), f"sparse_mode {sparse_mode}, {list(mask.shape)}")
    _check(bool((mask.bool() == torch.ones_like(mask, dtype=torch.bool).triu(1)).all()), "atten_mask is no triangle")
    diagonal = 1 if sparse_mode == 2 else 1 + keys - queries
    return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(diagonal)


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """Return the normalized tensor, and the reciprocal root mean square of each row in float32."""
    _check(2 <= self.dim() <= 8 and gamma.shape == self.shape[-gamma.dim() :], "npu_rms_norm takes 2 to 8 dimensions")
    _check_operands(self, gamma)
    dims = tuple(range(-gamma.dim(), 0))
    wide = self.float()
    reciprocal = torch.rsqrt(wide.square().mean(dims, keepdim=True) + epsilon)
    return (wide * reciprocal * gamma.float()).to(self.dtype), reciprocal.detach()


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    _check(input.dim() == r1.dim() == r2.dim() == 4 and r1.shape == r2.shape, "npu_rotary_mul takes 4 dimensions")
    _check(rotary_mode == "half", "interleaved pairs are not here")
    _check(input.shape[-1] % 2 == 0 and input.shape[-1] < 896 and input.shape[0] < 1000, f"got {list(input.shape)}")
    _check_operands(input, r1, r2)
    first, second = input.chunk(2, -1)
    return r1 * input + r2 * torch.cat((-second, first), -1)
