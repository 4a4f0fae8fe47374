"""Forms of torch's functions for local data, where its own fail on a part or check what only the whole can tell."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import batch_norm, group_norm, scaled_dot_product_attention

Tensor = torch.Tensor


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run torch's attention, also on a rank without heads, by whose number torch 2.11 divides in its fused kernel."""
    if query.numel():
        return scaled_dot_product_attention(query, key, value, *args, **kwargs)
    if query.shape[-3:-2] == (0,):
        kwargs = {**kwargs, "enable_gqa": False}
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(query, key, value, *args, **kwargs)


def _as_complex(x: Tensor) -> Tensor:
    """Run `torch.view_as_complex`, also of a part without elements, whose strides may be any."""
    return torch.view_as_complex(x if x.numel() else x.clone(memory_format=torch.contiguous_format))


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Run torch's group norm without its check of the batch, of which a rank may have one row."""
    return torch.group_norm(input, num_groups, weight, bias, eps, torch.backends.cudnn.enabled)


def _check_group_norm(input: Tensor, num_groups: int, *_: Any, **__: Any) -> None:
    _refuse_one_value(input.shape, num_groups)


def _check_batch_norm(
    input: Tensor, mean: Any, variance: Any, weight: Any = None, bias: Any = None, training: bool = False, **__: Any
) -> None:
    if training and input.ndim > 1:
        _refuse_one_value(input.shape, input.shape[1])


def _refuse_one_value(shape: torch.Size, statistics: int) -> None:
    if shape.numel() == statistics > 0:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(shape)}")


def _pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Run torch's `pad`; of a part without elements, which torch takes in mode `constant` only, pad zeros and cut."""
    if x.numel() or mode == "constant":
        return torch.nn.functional.pad(x, pad, mode, value)
    empty = [dim for dim, size in enumerate(x.shape) if not size]
    padded = torch.nn.functional.pad(x.sum(empty, keepdim=True), pad, mode)
    return padded[tuple(slice(0, size) if dim in empty else slice(None) for dim, size in enumerate(x.shape))]


def _contiguous(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Run torch's `contiguous`, but give dimensions of one element the strides of a contiguous tensor too.

    Random operations tell the order of the whole tensor's memory by them.
    """
    result = x.contiguous(memory_format=memory_format)
    if memory_format is not torch.contiguous_format or 1 not in result.shape:
        return result
    strides = tuple(itertools.accumulate(reversed(result.shape[1:]), operator.mul, initial=1))[::-1]
    return result if result.stride() == strides else result.view(-1).view(result.shape)


def _sgn(x: Tensor) -> Tensor:
    """Return torch's; of real numbers as `sign`, since the gradient of `sgn` has no storage that could be sent."""
    return torch.sgn(x) if x.is_complex() else torch.sign(x)


LOCAL_FORMS: dict[Callable[..., Any], Callable[..., Any]] = {
    scaled_dot_product_attention: _attention,
    torch.sgn: _sgn,
    torch.Tensor.sgn: _sgn,
    torch.view_as_complex: _as_complex,
    group_norm: _group_norm,
    torch.nn.functional.pad: _pad,
    torch.Tensor.contiguous: _contiguous,
}
# Checks that torch makes of the whole tensor; run before the rule, on every rank alike.
CHECKS: dict[Callable[..., Any], Callable[..., None]] = {group_norm: _check_group_norm, batch_norm: _check_batch_norm}
