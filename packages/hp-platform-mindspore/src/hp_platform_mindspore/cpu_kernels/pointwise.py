"""Pointwise operations, views and losses for which the CPU has no kernel, from those that it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from hp_platform_mindspore.cpu_kernels import basic as kernels
from hp_platform_mindspore.cpu_kernels.basic import clamp, mean, total
from hp_platform_mindspore.cpu_kernels.empty import filled, is_empty, unless_empty
from hp_platform_mindspore.tensor import module
from hp_platform_mindspore.tensor.memory import numbers, share

where = kernels.CPU["where"]


# Numbers -------------------------------------------------------------------------------------------------


def bitwise_not(x: Tensor) -> Tensor:
    return share(~numbers(x))


def copysign(x: Tensor, y: Any) -> Tensor:
    negative = share(np.signbit(numbers(y) if isinstance(y, Tensor) else np.asarray(y)))
    size = mint.abs(x)
    return where(negative, kernels.mul(size, -1), size)


def fmin(x: Tensor, y: Tensor) -> Tensor:
    """The smaller one, or the one that is a number."""
    a, b = numbers(x), numbers(y)
    return where(share((a <= b) | np.isnan(b)), x, y)


def float_power(x: Any, y: Any) -> Tensor:
    return kernels.power(*(v.astype(ms.float64) if isinstance(v, Tensor) else float(v) for v in (x, y)))


def floor_divide(x: Any, y: Any) -> Tensor:
    return x // y


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    return where(x > 0, x, kernels.mul(x, negative_slope))


def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    difference = kernels.masked_fill(kernels.sub(x, y), x == y, 0.0)
    return kernels.maximum(x, y) + mint.log1p(mint.exp(-mint.abs(difference)))


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    x = x if eps is None else clamp(x, eps, 1 - eps)
    return mint.log(kernels.div(x, 1 - x))


def logsigmoid(x: Tensor) -> Tensor:
    """Without the overflow of the logarithm of a sigmoid."""
    return clamp(x, max=0.0) - mint.log1p(mint.exp(-mint.abs(x)))


def selu(x: Tensor) -> Tensor:
    """MindSpore's own has a wrong gradient on CPU."""
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    below = kernels.mul(mint.expm1(clamp(x, max=0.0)), alpha)
    return kernels.mul(where(x > 0, x, below), scale)


def threshold(x: Tensor, threshold: float, value: float) -> Tensor:
    return kernels.masked_fill(x, x <= threshold, value)


def full_like(x: Tensor, fill_value: Any, *, dtype: Any = None) -> Tensor:
    return kernels.full(tuple(x.shape), fill_value, dtype or x.dtype)


def empty_like(x: Tensor, *, dtype: Any = None) -> Tensor:
    return mint.empty(tuple(x.shape), dtype=dtype or x.dtype)


def new_full(x: Tensor, size: Sequence[int], fill_value: Any, *, dtype: Any = None) -> Tensor:
    return kernels.full(tuple(size), fill_value, dtype or x.dtype)


# Shapes --------------------------------------------------------------------------------------------------


def repeat(x: Tensor, *repeats: Any) -> Tensor:
    counts = tuple(repeats[0]) if len(repeats) == 1 and not isinstance(repeats[0], int) else repeats
    x = mint.reshape(x, (*(1,) * (len(counts) - x.ndim), *x.shape))
    shape = tuple(size for pair in zip(counts, x.shape, strict=True) for size in pair)
    between = tuple(size for extent in x.shape for size in (1, extent))
    result = tuple(count * size for count, size in zip(counts, x.shape, strict=True))
    return mint.reshape(kernels.expand(mint.reshape(x, between), shape), result)


def tile(x: Tensor, *repeats: Any) -> Tensor:
    counts = tuple(repeats[0]) if len(repeats) == 1 and not isinstance(repeats[0], int) else repeats
    return repeat(x, (*(1,) * (x.ndim - len(counts)), *counts))


def diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Diagonals in the last two dimensions."""
    length = x.shape[-1]
    size = length + abs(offset)
    places = np.full((size, size), length)
    steps = np.arange(length)
    places[steps + max(0, -offset), steps + max(0, offset)] = steps
    padded = kernels.cat([x, kernels.zeros((*x.shape[:-1], 1), x.dtype)], -1)
    square = kernels.index_select(padded, -1, share(places))
    return square if (dim1, dim2) == (-2, -1) else mint.transpose(square, -2, -1)


def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    order = [dim for dim in range(x.ndim) if dim not in (dim1 % x.ndim, dim2 % x.ndim)]
    rows, columns = x.shape[dim1], x.shape[dim2]
    length = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    steps = np.arange(length)
    places = (steps + max(0, -offset)) * columns + steps + max(0, offset)
    matrices = mint.permute(x, (*order, dim1 % x.ndim, dim2 % x.ndim))
    flat = mint.reshape(matrices, (*matrices.shape[:-2], rows * columns))
    return kernels.index_select(flat, -1, share(places))


def unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    dim %= x.ndim
    known = -math.prod(sizes)
    given = tuple(x.shape[dim] // known if size == -1 else size for size in sizes)
    return mint.reshape(x, (*x.shape[:dim], *given, *x.shape[dim + 1 :]))


# Losses --------------------------------------------------------------------------------------------------


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction must be none, sum or mean, got {reduction!r}")
    return (total if reduction == "sum" else mean)(losses)


def kl_div(x: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    if log_target:
        losses = kernels.mul(mint.exp(target), kernels.sub(target, x))
    else:
        zero = target == 0
        entropy = kernels.mul(target, mint.log(kernels.masked_fill(target, zero, 1.0)))
        losses = kernels.sub(entropy, kernels.mul(target, x))
    if reduction == "batchmean":
        return kernels.div(total(losses), x.shape[0])
    return _reduced(losses, reduction)


def soft_margin_loss(x: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    return _reduced(-logsigmoid(kernels.mul(x, target)), reduction)


def _elementwise(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduced(x: Tensor, target: Tensor, *args: Any, reduction: str = "mean", **more: Any) -> Tensor:
        if is_empty(x, target):
            return _reduced(filled(0, np.broadcast_shapes(x.shape, target.shape), x, target), reduction)
        return _reduced(loss(kernels.sub(x, target), *args, **more), reduction)

    return reduced


def _huber(d: Tensor, delta: float = 1.0) -> Tensor:
    size = mint.abs(d)
    return where(size <= delta, 0.5 * d * d, delta * (size - 0.5 * delta))


KERNELS: dict[str, Callable[..., Any]] = {
    "detach": module.detached,
    "bitwise_not": bitwise_not,
    "clamp_min": lambda x, min: clamp(x, min, None),
    "clamp_max": lambda x, max: clamp(x, None, max),
    "copysign": copysign,
    "fmin": fmin,
    "float_power": float_power,
    "floor_divide": unless_empty(floor_divide, "floor_divide"),
    "leaky_relu": leaky_relu,
    "logaddexp": logaddexp,
    "logit": logit,
    "logsigmoid": logsigmoid,
    "selu": selu,
    "threshold": threshold,
    "full_like": full_like,
    "empty_like": empty_like,
    "new_full": new_full,
    "repeat": repeat,
    "tile": tile,
    "diag_embed": diag_embed,
    "diagonal": diagonal,
    "unflatten": unflatten,
    "mT": lambda x: mint.transpose(x, -2, -1),
    "kl_div": kl_div,
    "soft_margin_loss": soft_margin_loss,
    "mse_loss": _elementwise(lambda d: d * d),
    "l1_loss": _elementwise(mint.abs),
    "huber_loss": _elementwise(_huber),
}
