"""Extremes, medians and quantiles: positions come from NumPy on the host, values are picked by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor, mint

from hp_platform_mindspore.cpu_kernels import basic as kernels
from hp_platform_mindspore.cpu_kernels.basic import gather
from hp_platform_mindspore.tensor.memory import HOST_DTYPES, numbers, share

Array = np.ndarray[Any, Any]
Position = Callable[[Array, int], Array]


def _flat(x: Tensor) -> Tensor:
    return mint.reshape(x, (-1,))


def _picked(x: Tensor, dim: int, position: Array, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Values and positions (`[..., 1, ...]`)."""
    where = share(position.astype(np.int64))
    values = gather(x, dim, where)
    return (values, where) if keepdim else (mint.squeeze(values, dim), mint.squeeze(where, dim))


def by_position(find: Position, alone: bool = True) -> Callable[..., Any]:
    """An operation that finds one element along a dimension; with `alone` of everything too, without position."""

    def found(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None and alone:
            return _picked(_flat(x), 0, find(numbers(_flat(x)), 0), False)[0]
        dim = -1 if dim is None else dim
        return _picked(x, dim, find(numbers(x), dim), keepdim)

    return found


def _median(values: Array, dim: int) -> Array:
    """The lower one of two; NaN where there is one."""
    order = np.argsort(values, axis=dim, kind="stable")
    nans = np.isnan(values).sum(axis=dim, keepdims=True)
    rank = np.where(nans > 0, values.shape[dim] - nans, (values.shape[dim] - 1) // 2)
    return np.take_along_axis(order, rank, dim)


def _nanmedian(values: Array, dim: int) -> Array:
    order = np.argsort(values, axis=dim, kind="stable")
    count = (~np.isnan(values)).sum(axis=dim, keepdims=True)
    return np.take_along_axis(order, np.maximum(count - 1, 0) // 2, dim)


def _mode(values: Array, dim: int) -> Array:
    """The most frequent value, the smallest of several; the last place where it is."""
    moved = np.moveaxis(values, dim, -1)
    rows = moved.reshape(-1, moved.shape[-1])
    found = np.empty(len(rows), np.int64)
    for i, row in enumerate(rows):
        distinct, counts = np.unique(row, return_counts=True)
        found[i] = np.flatnonzero(row == distinct[np.argmax(counts)])[-1]
    return np.moveaxis(found.reshape(*moved.shape[:-1], 1), -1, dim)


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    order = np.argsort(numbers(x), axis=dim, kind="stable")
    return _picked(x, dim, np.take(order, [k - 1], axis=dim), keepdim)


def cumulative_extreme(better: Callable[[Array, Array], Array]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`cummax` or `cummin`, with the last position of several equal ones."""

    def found(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        values = np.moveaxis(numbers(x), dim, 0)
        position = np.zeros(values.shape, np.int64)
        for i in range(1, len(values)):
            best = np.take_along_axis(values, position[i - 1 : i], 0)[0]
            position[i] = np.where(better(values[i], best) | np.isnan(values[i]), i, position[i - 1])
        where = share(np.ascontiguousarray(np.moveaxis(position, 0, dim)))
        return gather(x, dim, where), where

    return found


def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = tuple(range(x.ndim)) if dim is None else dim
    return kernels.amin(x, dims, keepdim), kernels.amax(x, dims, keepdim)


def quantile(skip_nan: bool) -> Callable[..., Tensor]:
    """`quantile` or `nanquantile` of one number `q`."""

    def found(
        x: Tensor, q: float, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
    ) -> Tensor:
        if dim is None:
            shape = (1,) * x.ndim if keepdim else ()
            return mint.reshape(found(_flat(x), q, 0, interpolation=interpolation), shape)
        values = numbers(x)
        order, nans = np.argsort(values, axis=dim, kind="stable"), np.isnan(values).sum(axis=dim, keepdims=True)
        last = values.shape[dim] - 1 - (nans if skip_nan else 0)
        place = np.where(nans * (not skip_nan) > 0, values.shape[dim] - 1.0, q * np.maximum(last, 0))
        low, weight = _interpolated(place, interpolation)
        pair = [_picked(x, dim, np.take_along_axis(order, rank, dim), keepdim)[0] for rank in _ranks(low, weight)]
        shape = tuple(pair[0].shape)
        return _between(*pair, share(weight.reshape(shape).astype(HOST_DTYPES[x.dtype])))

    return found


def _ranks(low: Array, weight: Array) -> tuple[Array, Array]:
    return low, low + (weight > 0)


def _interpolated(place: Array, how: str) -> tuple[Array, Array]:
    """The rank below a place, and the weight of the one above."""
    low = np.floor(place).astype(np.int64)
    part = place - low
    rounded = {
        "lower": 0.0 * part,
        "higher": np.ceil(part),
        "nearest": np.round(place) - low,
        "midpoint": 0.5 * (part > 0),
    }
    if how != "linear" and how not in rounded:
        raise ValueError(f"quantile: interpolation must be linear or one of {', '.join(rounded)}, got {how!r}")
    return low, rounded.get(how, part)


def _between(low: Tensor, high: Tensor, weight: Tensor) -> Tensor:
    return kernels.add(low, kernels.mul(kernels.sub(high, low), weight))


def nanmean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    x = x if dtype is None else x.astype(dtype)
    there = ~np.isnan(numbers(x))
    axes = dim if dim is None or isinstance(dim, int) else tuple(dim)
    counts = np.asarray(there.sum(axis=axes, keepdims=keepdim)).astype(HOST_DTYPES[x.dtype])
    return kernels.div(kernels.total(kernels.masked_fill(x, share(~there), 0.0), dim, keepdim), share(counts))


KERNELS: dict[str, Callable[..., Any]] = {
    "median": by_position(_median),
    "nanmedian": by_position(_nanmedian),
    "mode": by_position(_mode, alone=False),
    "kthvalue": kthvalue,
    "cummax": cumulative_extreme(np.greater_equal),
    "cummin": cumulative_extreme(np.less_equal),
    "aminmax": aminmax,
    "quantile": quantile(False),
    "nanquantile": quantile(True),
    "nanmean": nanmean,
}
