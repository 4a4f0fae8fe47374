"""The namespace `platform.ops`: torch's functions by the names of `hp_dtensor.platform.interface`, for any tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from hp_platform_torch.ops.attention import local_attention
from hp_platform_torch.ops.norms import rms_norm

Tensor = torch.Tensor
Number = int | float | bool


def build_ops(default_device: Callable[[], torch.device]) -> SimpleNamespace:
    """Return the namespace; its creation functions allocate on `default_device()`."""
    return SimpleNamespace(**_SAME_IN_TORCH, **_ADAPTED, **_creation(default_device))


def _creation(default_device: Callable[[], torch.device]) -> dict[str, Callable[..., Tensor]]:
    def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=default_device())

    def ones(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.ones(tuple(shape), dtype=dtype, device=default_device())

    def full(shape: Sequence[int], value: Number, dtype: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), value, dtype=dtype, device=default_device())

    def arange(end: int, dtype: torch.dtype) -> Tensor:
        return torch.arange(end, dtype=dtype, device=default_device())

    return {"zeros": zeros, "ones": ones, "full": full, "arange": arange}


def sum_(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    return torch.sum(x) if dim is None and not keepdim else torch.sum(x, dim, keepdim)


def mean(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    return torch.mean(x) if dim is None and not keepdim else torch.mean(x, dim, keepdim)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    # A DTensor comes to `local_attention` by its rule.
    attend = local_attention if type(query) is Tensor else F.scaled_dot_product_attention
    return attend(query, key, value, is_causal=is_causal, enable_gqa=enable_gqa)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits, targets, reduction=reduction)


def topk(x: Tensor, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(x, k, dim)
    return values, indices


def argsort(x: Tensor, dim: int = -1, stable: bool = True, descending: bool = False) -> Tensor:
    return torch.argsort(x, dim=dim, stable=stable, descending=descending)


def bincount(x: Tensor, minlength: int) -> Tensor:
    if type(x) is Tensor and x.is_cuda and 0 < minlength < 2**31 - 1:
        # torch.bincount waits for the device to read the largest value, which decides the length of its result.
        counts = torch.histc(x.int(), minlength + 1, 0, minlength)
        return counts[:minlength].long()
    if type(x) is Tensor and x.device.type == "npu" and minlength > 0:
        # As on CUDA: values out of range are counted in a bin at either end, and dropped.
        bins = torch.zeros(minlength + 2, dtype=torch.int64, device=x.device)
        places = x.long().clamp(-1, minlength) + 1
        return bins.scatter_add_(0, places, torch.ones_like(places))[1:-1]
    return torch.bincount(x, minlength=minlength)


_ADAPTED: dict[str, Callable[..., Any]] = {
    # Python's operators, because they also accept a number as the first operand
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "maximum": lambda x, y: torch.maximum(x, y) if isinstance(y, Tensor) else torch.clamp(x, min=y),
    "minimum": lambda x, y: torch.minimum(x, y) if isinstance(y, Tensor) else torch.clamp(x, max=y),
    "clamp": lambda x, min=None, max=None: torch.clamp(x, min=min, max=max),
    "cast": lambda x, dtype: x.to(dtype),
    "sum": sum_,
    "mean": mean,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "softmax": lambda x, dim: torch.softmax(x, dim),
    "log_softmax": lambda x, dim: torch.log_softmax(x, dim),
    "rms_norm": lambda x, weight, eps: rms_norm(x, (x.shape[-1],), weight, eps),
    "cross_entropy": cross_entropy,
    "embedding": F.embedding,
    "linear": F.linear,
    "silu": F.silu,
    "gelu": F.gelu,
    "one_hot": F.one_hot,
    "reshape": lambda x, shape: torch.reshape(x, tuple(shape)),
    "permute": lambda x, dims: torch.permute(x, tuple(dims)),
    "expand": lambda x, shape: x.expand(tuple(shape)),
    "split": lambda x, sizes, dim=0: torch.split(x, list(sizes), dim),
    "cat": lambda tensors, dim=0: torch.cat(tuple(tensors), dim),
    "stack": lambda tensors, dim=0: torch.stack(tuple(tensors), dim),
    "repeat_interleave": lambda x, repeats, dim: torch.repeat_interleave(x, repeats, dim),
    "index_put": lambda x, index, values: torch.index_put(x, (index,), values),
    "topk": topk,
    "argsort": argsort,
    "bincount": bincount,
}

_SAME_NAMES = """
    zeros_like ones_like eq ne lt le gt ge logical_and logical_or
    neg exp log sqrt rsqrt abs sin cos tanh sigmoid relu isfinite logical_not square
    where masked_fill clone amax amin argmax logsumexp cumsum matmul bmm
    transpose unsqueeze squeeze chunk narrow index_select gather
"""

_SAME_IN_TORCH: dict[str, Callable[..., Any]] = {name: getattr(torch, name) for name in _SAME_NAMES.split()}
