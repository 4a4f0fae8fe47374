"""Fused operations of torch_npu on Ascend, for plain local tensors, within the limits that its documentation states.

Each has a predicate that says which tensors it takes; for others the caller uses torch's own operation. The signatures
and limits are those of https://gitcode.com/Ascend/op-plugin/tree/master/docs/context.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

Tensor = torch.Tensor
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_HEADS, _MOST_HEAD_DIM = 256, 768
_LEFT_UP_CAUSAL = 2
"""The `sparse_mode` in which query i sees the keys up to i, as with torch's `is_causal`, for all lengths."""


def takes(first: Tensor, *others: Tensor) -> bool:
    """Return whether fused operations support these tensors: on Ascend, not empty, of one dtype of 16 or 32 bits."""
    is_supported = first.device.type == "npu" and first.dtype in _DTYPES and first.numel() > 0
    return is_supported and all(x.device == first.device and x.dtype == first.dtype and x.numel() > 0 for x in others)


# Attention -----------------------------------------------------------------------------------------------


def takes_attention(query: Tensor, value: Tensor) -> bool:
    """Return whether `attention` supports these queries, and values and keys like `value`."""
    return (
        takes(query, value)
        and query.dim() == value.dim() == 4
        and query.shape[-1] == value.shape[-1] <= _MOST_HEAD_DIM
        and query.shape[1] <= _MOST_HEADS
        and query.shape[1] % value.shape[1] == 0
    )


def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    """Return the attention `[batch, heads, queries, head_dim]`; key-value heads may be shared. Differentiable."""
    import torch_npu

    mask = _upper_triangle(query.device) if is_causal else None
    result: Tensor = torch_npu.npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        "BNSD",
        atten_mask=mask,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        sparse_mode=_LEFT_UP_CAUSAL if is_causal else 0,
    )[0]
    return result


@functools.cache
def _upper_triangle(device: torch.device) -> Tensor:
    """Return the mask that the causal modes require, of this size for all lengths: True where a key is hidden."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)


# Normalization and rotary positions ----------------------------------------------------------------------


def takes_rms_norm(x: Tensor, weight: Tensor) -> bool:
    """Return whether `rms_norm` over the last dimension supports these operands."""
    return 2 <= x.dim() <= 8 and takes(x, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    import torch_npu

    result: Tensor = torch_npu.npu_rms_norm(x, weight, eps)[0]
    return result


def takes_rotary(x: Tensor, cos: Tensor) -> bool:
    """Return whether `rotary` supports `x` `[batch, length, heads, head_dim]` and tables of half its width."""
    return (
        takes(x, cos)
        and x.dim() == 4
        and x.shape[-1] == 2 * cos.shape[-1] < 896
        and x.shape[0] < 1000
        and x.shape[2] < 1000
    )


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of `x`. Differentiable with respect to `x`; tables are constants."""
    cos, sin = (torch.cat((each, each), -1) for each in (cos, sin))
    cos, sin = (each if each.dim() == 4 else each.unsqueeze(0) for each in (cos, sin))
    rotated: Tensor = _Rotary.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _Rotary(torch.autograd.Function):
    # torch_npu's own backward needs `x`, for gradients of the tables, and saves it.

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        import torch_npu

        ctx.save_for_backward(cos, sin)
        rotated: Tensor = torch_npu.npu_rotary_mul(x, cos, sin)
        return rotated

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # The transpose of a rotation is the rotation by the negative angle.
        return _Rotary.apply(grad.contiguous(), cos, -sin), None, None  # type: ignore[no-untyped-call]


# Experts -------------------------------------------------------------------------------------------------


def takes_grouped_matmul(x: Tensor, weight: Tensor) -> bool:
    """Return whether `grouped_matmul` supports `x` `[rows, in]` and `weight` `[groups, out, in]`."""
    groups, out_features, in_features = weight.shape
    return takes(x, weight) and groups <= 1024 and max(out_features, in_features, x.shape[0]) < 65536


def grouped_matmul(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """Multiply each group of rows by its matrix, `x[rows of group e] @ weight[e].T`. Differentiable.

    Args:
        sizes: int64 `[groups]`, rows of each group, on the device.
    """
    product: Tensor = _GroupedMatmul.apply(x, weight, sizes)  # type: ignore[no-untyped-call]
    return product


class _GroupedMatmul(torch.autograd.Function):
    # torch_npu's operation has no backward of its own.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
        ends = sizes.cumsum(0)
        ctx.save_for_backward(x, weight, sizes, ends)
        return _product(x.contiguous(), weight.transpose(1, 2), ends, _ROWS)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, sizes, ends = ctx.saved_tensors
        grad = grad.contiguous()
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            of_input = _product(grad, weight, ends, _ROWS)
        if ctx.needs_input_grad[1]:
            of_weight = _product(grad.t(), x.contiguous(), ends, _INNER).view(weight.shape)
            # The documentation does not say that the product of a group without rows is written.
            of_weight.masked_fill_((sizes == 0).view(-1, 1, 1), 0)
        return of_input, of_weight, None


_ROWS, _INNER = 0, 2
"""`group_type`: which dimension of `[m, k] @ [k, n]` is divided into groups, m or k."""


def _product(x: Tensor, weight: Tensor, ends: Tensor, group_type: int) -> Tensor:
    import torch_npu

    (product,) = torch_npu.npu_grouped_matmul(
        [x], [weight], group_list=ends, split_item=3, group_type=group_type, group_list_type=0
    )
    return product
