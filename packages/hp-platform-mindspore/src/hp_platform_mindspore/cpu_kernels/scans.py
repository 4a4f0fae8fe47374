"""Cumulative operations along one dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops

from hp_platform_mindspore.cpu_kernels import indexing, pointwise
from hp_platform_mindspore.cpu_kernels.empty import is_empty
from hp_platform_mindspore.tensor.autograd import custom_function, is_recording
from hp_platform_mindspore.tensor.memory import numbers, share

Array = np.ndarray[Any, Any]


def cumsum(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    x = x if dtype is None else pointwise.cast(x, dtype)
    return ops.cumsum(x, dim) if x.size else pointwise.clone(x)


def cumprod(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Multiply cumulatively; the gradient is right at zeros too, by which MindSpore's own divides."""
    x = x if dtype is None else x.astype(dtype)
    if is_empty(x):
        return pointwise.clone(x)
    if not is_recording(x):
        return mint.cumprod(x, dim)
    factors = np.moveaxis(numbers(x).copy(), dim, 0)

    # From the end: d x[i] = (product of what is before i) * (sum of later gradients, each times the factors between).
    # No division, so zeros among the factors do no harm.
    def gradient(grad: Tensor) -> Tensor:
        before = np.ones_like(factors)
        np.cumprod(factors[:-1], 0, out=before[1:])
        later = np.moveaxis(numbers(grad).copy(), dim, 0)
        for i in reversed(range(len(later) - 1)):
            later[i] += factors[i + 1] * later[i + 1]
        return share(np.ascontiguousarray(np.moveaxis(before * later, 0, dim)))

    return custom_function(lambda t: mint.cumprod(t, dim), gradient, x)


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    return ops.logcumsumexp(x, dim) if x.size else pointwise.clone(x)


def cumulative_extreme(better: Callable[[Array, Array], Array]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make `cummax` or `cummin`, which give the last position of several equal values, as torch."""

    def found(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        values = np.moveaxis(numbers(x), dim, 0)
        position = np.zeros(values.shape, np.int64)
        for i in range(1, len(values)):
            best = np.take_along_axis(values, position[i - 1 : i], 0)[0]
            # `>=`: of equal values the later position; a NaN stays the best once it has come.
            position[i] = np.where(better(values[i], best) | np.isnan(values[i]), i, position[i - 1])
        where = share(np.ascontiguousarray(np.moveaxis(position, 0, dim)))
        return indexing.gather(x, dim, where), where

    return found


KERNELS: dict[str, Callable[..., Any]] = {
    "cumsum": cumsum,
    "cumprod": cumprod,
    "logcumsumexp": logcumsumexp,
    "cummax": cumulative_extreme(np.greater_equal),
    "cummin": cumulative_extreme(np.less_equal),
}
