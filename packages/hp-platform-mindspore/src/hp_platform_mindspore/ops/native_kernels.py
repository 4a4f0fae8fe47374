"""MindSpore's own kernels on Ascend, where they exist and where a value must not go through the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, mint, ops

from hp_platform_mindspore.cpu_kernels import (
    convolutions,
    interpolation,
    ordering,
    pooling,
    scattering,
    selection,
    table,
)

F = mint.nn.functional


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    values, indices = mint.topk(x, k, dim, largest, sorted)
    return values, indices


def _sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = mint.sort(x, dim=dim, descending=descending, stable=stable)
    return values, indices


def _argsort(x: Tensor, dim: int = -1, stable: bool = True, descending: bool = False) -> Tensor:
    return _sort(x, dim, descending, stable)[1]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.rms_norm(x, weight, eps)[0]


_OWN = """
    all any count_nonzero max min argmin prod norm std var cumprod roll tril triu einsum median kthvalue cummax cummin
    bitwise_not logaddexp scatter scatter_add index_add masked_select nonzero unique_consecutive conv1d conv2d conv3d
    conv_transpose2d avg_pool1d avg_pool2d avg_pool3d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d batch_norm interpolate
"""
_ON_HOST = {"copysign", "fmin"} | {
    name
    for module in (ordering, scattering, selection, convolutions, pooling, interpolation)
    for name in module.KERNELS
    if name not in ("aminmax", "searchsorted", "bucketize")
}

KERNELS: dict[str, Callable[..., Any]] = {
    **{name: kernel for name, kernel in table.KERNELS.items() if name not in _ON_HOST},
    **{name: getattr(F, name, None) or getattr(mint, name) for name in _OWN.split()},
    "full": lambda shape, value, dtype: mint.full(tuple(shape), value, dtype=dtype),
    "arange": lambda end, dtype: mint.arange(end, dtype=dtype),
    "gelu": F.gelu,
    "argmax": mint.argmax,
    "logsumexp": mint.logsumexp,
    "cumsum": mint.cumsum,
    "log_softmax": F.log_softmax,
    "rms_norm": _rms_norm,
    "cross_entropy": lambda logits, targets, reduction="mean": F.cross_entropy(logits, targets, reduction=reduction),
    "embedding": F.embedding,
    "stack": lambda tensors, dim=0: mint.stack(list(tensors), dim),
    "index_select": mint.index_select,
    "topk": _topk,
    "sort": _sort,
    "argsort": _argsort,
    "bincount": lambda x, minlength: mint.bincount(x, minlength=minlength),
    "one_hot": F.one_hot,
}
"""By canonical name, as `hp_platform_mindspore.cpu_kernels.table.KERNELS`."""
