"""The namespace `platform.ops`: torch's functions by the names of `hp_dtensor.platform.interface`, for any tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

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


def maximum(x: Tensor, y: Tensor | Number) -> Tensor:
    return torch.maximum(x, y) if isinstance(y, Tensor) else torch.clamp(x, min=y)


def minimum(x: Tensor, y: Tensor | Number) -> Tensor:
    return torch.minimum(x, y) if isinstance(y, Tensor) else torch.clamp(x, max=y)


def clamp(x: Tensor, min: Number | None = None, max: Number | None = None) -> Tensor:
    return torch.clamp(x, min=min, max=max)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def sum_(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    return torch.sum(x) if dim is None and not keepdim else torch.sum(x, dim, keepdim)


def mean(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    return torch.mean(x) if dim is None and not keepdim else torch.mean(x, dim, keepdim)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=enable_gqa)


def softmax(x: Tensor, dim: int) -> Tensor:
    return torch.softmax(x, dim)


def log_softmax(x: Tensor, dim: int) -> Tensor:
    return torch.log_softmax(x, dim)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits, targets, reduction=reduction)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.reshape(x, tuple(shape))


def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    return torch.permute(x, tuple(dims))


def expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.expand(tuple(shape))


def split(x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    return torch.split(x, list(sizes), dim)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.cat(tuple(tensors), dim)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.stack(tuple(tensors), dim)


def repeat_interleave(x: Tensor, repeats: int, dim: int) -> Tensor:
    return torch.repeat_interleave(x, repeats, dim)


def index_put(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return torch.index_put(x, (index,), values)


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
    return torch.bincount(x, minlength=minlength)


_ADAPTED: dict[str, Callable[..., Any]] = {
    # Python's operators, because they also accept a number as the first operand
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "maximum": maximum,
    "minimum": minimum,
    "clamp": clamp,
    "cast": cast,
    "sum": sum_,
    "mean": mean,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "softmax": softmax,
    "log_softmax": log_softmax,
    "rms_norm": rms_norm,
    "cross_entropy": cross_entropy,
    "embedding": F.embedding,
    "linear": F.linear,
    "silu": F.silu,
    "gelu": F.gelu,
    "one_hot": F.one_hot,
    "reshape": reshape,
    "permute": permute,
    "expand": expand,
    "split": split,
    "cat": cat,
    "stack": stack,
    "repeat_interleave": repeat_interleave,
    "index_put": index_put,
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
