"""Sorting, extremes, medians and quantiles.

NumPy finds the positions on the host, where the order of equal elements is defined; a differentiable gather then picks
the values, so positions need no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor, mint

from hp_platform_mindspore.cpu_kernels import indexing, pointwise, reductions
from hp_platform_mindspore.tensor.memory import HOST_DTYPES, numbers, share

Array = np.ndarray[Any, Any]
Position = Callable[[Array, int], Array]


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Return the `k` largest (or smallest) values in order and their indices; of equal values the lower index."""
    order = np.take(order_of(x, dim, largest), np.arange(k), axis=dim)
    # Positions are found on the host and have no gradient; the gather that picks the values has the right one.
    indices = share(order)
    return indexing.gather(x, dim, indices), indices


def argsort(x: Tensor, dim: int = -1, stable: bool = True, descending: bool = False) -> Tensor:
    return share(order_of(x, dim, descending))


def order_of(x: Tensor, dim: int, descending: bool) -> np.ndarray[Any, Any]:
    """Return the indices (int64) that sort along `dim`; equal elements keep their order."""
    values = numbers(x)
    if not descending:
        return np.argsort(values, axis=dim, kind="stable")
    # Flipped before and after, so that equal elements keep their order although the sort is downwards.
    backward = np.flip(np.argsort(np.flip(values, dim), axis=dim, kind="stable"), dim)
    return values.shape[dim] - 1 - backward if values.ndim else backward


def argmax(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return share(np.asarray(np.argmax(numbers(x), axis=dim, keepdims=keepdim), np.int64))


def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return share(np.asarray(np.argmin(numbers(x), axis=dim, keepdims=keepdim), np.int64))


def sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Tensor, Tensor]:
    order = argsort(x, dim, True, descending)
    return indexing.gather(x, dim, order), order


def extreme(name: str) -> Callable[..., Any]:
    """Make `max` or `min`: of everything, along a dimension with positions, or of two tensors."""
    own = getattr(mint, name)
    position = np.argmax if name == "max" else np.argmin

    def found(x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return own(x)
        if isinstance(dim, Tensor):
            return pointwise.maximum(x, dim) if name == "max" else pointwise.minimum(x, dim)
        where = share(np.asarray(np.expand_dims(position(numbers(x), axis=dim), dim), np.int64))
        values = indexing.gather(x, dim, where)
        return (values, where) if keepdim else (mint.squeeze(values, dim), mint.squeeze(where, dim))

    return found


def flattened(x: Tensor) -> Tensor:
    return mint.reshape(x, (-1,))


def _picked(x: Tensor, dim: int, position: Array, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Pick the values at positions `[..., 1, ...]` along `dim`, and return both."""
    where = share(position.astype(np.int64))
    values = indexing.gather(x, dim, where)
    return (values, where) if keepdim else (mint.squeeze(values, dim), mint.squeeze(where, dim))


def by_position(find: Position, alone: bool = True) -> Callable[..., Any]:
    """Make an operation that finds one element along a dimension.

    With `alone`, a call without a dimension gives the value among all elements, without its position.
    """

    def found(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None and alone:
            return _picked(flattened(x), 0, find(numbers(flattened(x)), 0), False)[0]
        dim = -1 if dim is None else dim
        return _picked(x, dim, find(numbers(x), dim), keepdim)

    return found


def _median(values: Array, dim: int) -> Array:
    """Find the median, the lower one of two; a NaN where there is one, as torch."""
    order = np.argsort(values, axis=dim, kind="stable")
    nans = np.isnan(values).sum(axis=dim, keepdims=True)
    # Sorted, NaNs are last: the first of them where there is one.
    rank = np.where(nans > 0, values.shape[dim] - nans, (values.shape[dim] - 1) // 2)
    return np.take_along_axis(order, rank, dim)


def _nanmedian(values: Array, dim: int) -> Array:
    order = np.argsort(values, axis=dim, kind="stable")
    count = (~np.isnan(values)).sum(axis=dim, keepdims=True)
    return np.take_along_axis(order, np.maximum(count - 1, 0) // 2, dim)


def _mode(values: Array, dim: int) -> Array:
    """Find the most frequent value (the smallest of several), at its last place, as torch."""
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


def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = tuple(range(x.ndim)) if dim is None else dim
    return reductions.amin(x, dims, keepdim), reductions.amax(x, dims, keepdim)


def quantile(skip_nan: bool) -> Callable[..., Tensor]:
    """Make `quantile` or `nanquantile` for one number `q`."""

    def found(
        x: Tensor, q: float, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
    ) -> Tensor:
        if dim is None:
            shape = (1,) * x.ndim if keepdim else ()
            return mint.reshape(found(flattened(x), q, 0, interpolation=interpolation), shape)
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
    # At a whole place there is no rank above, of which the last place has none at all.
    return low, low + (weight > 0)


def _interpolated(place: Array, how: str) -> tuple[Array, Array]:
    """Return the rank below a fractional place, and the weight of the rank above."""
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
    return pointwise.add(low, pointwise.mul(pointwise.sub(high, low), weight))


KERNELS: dict[str, Callable[..., Any]] = {
    "topk": topk,
    "argsort": argsort,
    "sort": sort,
    "argmax": argmax,
    "argmin": argmin,
    "max": extreme("max"),
    "min": extreme("min"),
    "aminmax": aminmax,
    "median": by_position(_median),
    "nanmedian": by_position(_nanmedian),
    "mode": by_position(_mode, alone=False),
    "kthvalue": kthvalue,
    "quantile": quantile(False),
    "nanquantile": quantile(True),
    "searchsorted": lambda boundaries, x, right=False: mint.searchsorted(boundaries, x, right=right),
    "bucketize": lambda x, boundaries, right=False: mint.searchsorted(boundaries, x, right=right),
}
