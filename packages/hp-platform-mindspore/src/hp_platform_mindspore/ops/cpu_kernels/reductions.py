"""Reductions over dimensions, cumulative operations and sorting: sums, norms, largest and smallest values.

For sorting NumPy finds the indices on the host, where the order of equal elements is defined. A differentiable
gather then selects the values, so indices need no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hp_platform_mindspore.ops.cpu_kernels import pointwise, shapes
from hp_platform_mindspore.ops.cpu_kernels.empty import filled, is_empty, marked_as_saving, result_dtype
from hp_platform_mindspore.tensor.autograd import custom_function, is_recording
from hp_platform_mindspore.tensor.memory import HOST_DTYPES, numbers, share

Dims = int | Sequence[int] | None


def total(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    if is_empty(x):
        return filled(0, reduced_shape(x, dim, keepdim), x, dtype=result_dtype(mint.sum, x))
    return mint.sum(x, dim=_all_dims(x, dim), keepdim=keepdim)


def mean(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    if is_empty(x):
        return filled(math.nan, reduced_shape(x, dim, keepdim), x, dtype=result_dtype(mint.mean, x))
    return mint.mean(x, dim=_all_dims(x, dim), keepdim=keepdim)


def reduced_shape(x: Tensor, dim: Dims, keepdim: bool) -> tuple[int, ...]:
    dims = _all_dims(x, dim)
    removed = {d % x.ndim for d in ((dims,) if isinstance(dims, int) else dims)}
    return tuple(1 if i in removed else size for i, size in enumerate(x.shape) if keepdim or i not in removed)


def _all_dims(x: Tensor, dim: Dims) -> int | tuple[int, ...]:
    if dim is None:
        return tuple(range(x.ndim))
    return dim if isinstance(dim, int) else tuple(dim)


def amax(x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    return mint.amax(x, dim if isinstance(dim, int) else tuple(dim), keepdim)


def amin(x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    return mint.amin(x, dim if isinstance(dim, int) else tuple(dim), keepdim)


def logsumexp(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    if is_empty(x):
        return marked_as_saving(filled(-math.inf, reduced_shape(x, dim, keepdim), x))
    return ops.logsumexp(x, dim, keepdim)


def prod(x: Tensor, dim: int | None = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    x = x if dtype is None else x.astype(dtype)
    if is_empty(x):
        return marked_as_saving(filled(1, reduced_shape(x, dim, keepdim), x))
    return mint.prod(x) if dim is None else mint.prod(x, dim, keepdim)


def nansum(x: Tensor, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    x = x if dtype is None else x.astype(dtype)
    return total(x, dim, keepdim) if is_empty(x) else mint.nansum(x, dim, keepdim)


def every(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    # Truth values have no gradient; NumPy's reduction takes every dtype and empty tensors, MindSpore's does not.
    return share(np.asarray(numbers(x).astype(bool).all(axis=_axes(dim), keepdims=keepdim)))


def some(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return share(np.asarray(numbers(x).astype(bool).any(axis=_axes(dim), keepdims=keepdim)))


def _axes(dim: Dims) -> Any:
    return dim if dim is None or isinstance(dim, int) else tuple(dim)


def norm(x: Tensor, p: Any = "fro", dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """Compute the vector norm of order `p`, in float32 for half precision; its gradient at 0 is 0, as in torch."""
    x = x if dtype is None else x.astype(dtype)
    dims = tuple(range(x.ndim)) if dim is None else dim
    return pointwise.narrowed(_norm(pointwise.widened(x), 2.0 if p == "fro" else float(p), dims, keepdim), x.dtype)


def _norm(x: Tensor, p: float, dims: int | Sequence[int], keepdim: bool) -> Tensor:
    if math.isinf(p):
        return (amax if p > 0 else amin)(mint.abs(x), dims, keepdim)
    if p == 0:
        return total((x != 0).astype(x.dtype), dims, keepdim)
    if p == 1:
        return total(mint.abs(x), dims, keepdim)
    powers = total(x * x if p == 2 else mint.abs(x) ** p, dims, keepdim)
    # The derivative of a root at 0 is infinite, but torch's gradient is 0. So the root is taken of 1 there and the
    # result masked to 0, which stops the gradient.
    nothing = powers == 0
    safe = pointwise.masked_fill(powers, nothing, 1.0)
    return pointwise.masked_fill(mint.sqrt(safe) if p == 2 else safe ** (1.0 / p), nothing, 0.0)


def std_or_var(name: str) -> Callable[..., Any]:
    """Return `std`, `var`, `std_mean` or `var_mean`."""

    def found(
        x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, correction: float | None = 1
    ) -> Any:
        # torch also takes `x.std(unbiased)`, with the flag in the place of the dimension.
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        # As torch: the mean of integers would be rounded.
        if not x.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point tensor, got {x.dtype}; convert it first")
        dims = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        count = math.prod(x.shape[d] for d in dims)
        # Bessel's correction by default, as in torch.
        degrees = count - ((1 if correction is None else correction) if unbiased else 0)
        wide = pointwise.widened(x)
        centered = wide - mean(wide, dims, True)
        squares = total(centered * centered, dims, keepdim)
        # As torch: NaN where no degree of freedom is left.
        result = squares / degrees if degrees > 0 else squares * math.nan
        if name.startswith("std"):
            nothing = result == 0
            result = pointwise.masked_fill(mint.sqrt(pointwise.masked_fill(result, nothing, 1.0)), nothing, 0.0)
        result = pointwise.narrowed(result, x.dtype)
        return (result, mean(x, dims, keepdim)) if name.endswith("mean") else result

    return found


def nanmean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    x = x if dtype is None else x.astype(dtype)
    # Masks and counts have no gradient, so NumPy computes them.
    there = ~np.isnan(numbers(x))
    wide = pointwise.widened(x)
    counts = np.asarray(there.sum(axis=_axes(dim), keepdims=keepdim)).astype(HOST_DTYPES[wide.dtype])
    average = pointwise.div(total(pointwise.masked_fill(wide, share(~there), 0.0), dim, keepdim), share(counts))
    return pointwise.narrowed(average, x.dtype)


def bincount(x: Tensor, minlength: int) -> Tensor:
    return share(np.bincount(numbers(x), minlength=minlength).astype(np.int64, copy=False))


Array = np.ndarray[Any, Any]


def cumsum(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    # As torch: `ops.cumsum` adds up integers in their own dtype, where sums overflow, and refuses booleans.
    dtype = result_dtype(mint.sum, x) if dtype is None else dtype
    x = x if dtype is None else pointwise.cast(x, dtype)
    # Added up in float32: sums of ones in float16 stop at 2048.
    return pointwise.narrowed(ops.cumsum(pointwise.widened(x), dim), x.dtype) if x.size else pointwise.clone(x)


def cumprod(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Multiply cumulatively; MindSpore's own gradient divides by the factors, and is wrong at zeros."""
    x = x if dtype is None else x.astype(dtype)
    if is_empty(x):
        return pointwise.clone(x)
    if not is_recording(x):
        return mint.cumprod(x, dim)
    factors = np.moveaxis(numbers(x).copy(), dim, 0)

    # From the end: d x[i] = (product of factors before i) * (sum of later gradients, each times the factors between).
    # There is no division, so zeros among the factors are handled.
    def gradient(grad: Tensor) -> Tensor:
        before = np.ones_like(factors)
        np.cumprod(factors[:-1], 0, out=before[1:])
        later = np.moveaxis(numbers(grad).copy(), dim, 0)
        for i in reversed(range(len(later) - 1)):
            later[i] += factors[i + 1] * later[i + 1]
        return share(np.ascontiguousarray(np.moveaxis(before * later, 0, dim)))

    return custom_function(lambda t: mint.cumprod(t, dim), gradient, x)


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Return the `k` largest (or smallest) values in order and their indices; of equal values the lower index."""
    if k < 0:
        raise IndexError(f"topk: expected a number of values from 0 on, got {k}")
    order = np.take(sorting_indices(x, dim, largest), np.arange(k), axis=dim)
    # Indices are found on the host and have no gradient; the gather that selects the values has the right one.
    indices = share(order)
    return shapes.gather(x, dim, indices), indices


def argsort(x: Tensor, dim: int = -1, stable: bool = True, descending: bool = False) -> Tensor:
    return share(sorting_indices(x, dim, descending))


def sorting_indices(x: Tensor, dim: int, descending: bool) -> np.ndarray[Any, Any]:
    """Return the indices (int64) that sort along `dim`; equal elements keep their order."""
    values = numbers(x)
    if not descending:
        return np.argsort(values, axis=dim, kind="stable")
    # Flipped before and after, so that equal elements keep their order in a descending sort.
    backward = np.flip(np.argsort(np.flip(values, dim), axis=dim, kind="stable"), dim)
    return values.shape[dim] - 1 - backward if values.ndim else backward


def argmax(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return share(np.asarray(np.argmax(numbers(x), axis=dim, keepdims=keepdim), np.int64))


def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return share(np.asarray(np.argmin(numbers(x), axis=dim, keepdims=keepdim), np.int64))


def sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Tensor, Tensor]:
    order = argsort(x, dim, True, descending)
    return shapes.gather(x, dim, order), order


def max_or_min(name: str) -> Callable[..., Any]:
    """Return `max` or `min`: of all elements, along a dimension with indices, or of two tensors."""
    own = getattr(mint, name)
    position = np.argmax if name == "max" else np.argmin

    def found(x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return own(x)
        # `max(x, y)`: the elementwise form, which has the second tensor in the place of the dimension.
        if isinstance(dim, Tensor):
            return pointwise.maximum(x, dim) if name == "max" else pointwise.minimum(x, dim)
        return _selected(x, dim, np.expand_dims(position(numbers(x), axis=dim), dim), keepdim)

    return found


def flattened(x: Tensor) -> Tensor:
    return mint.reshape(x, (-1,))


def _selected(x: Tensor, dim: int, position: Array, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Return the values at indices `[..., 1, ...]` along `dim`, and the indices."""
    where = share(position.astype(np.int64))
    values = shapes.gather(x, dim, where)
    return (values, where) if keepdim else (mint.squeeze(values, dim), mint.squeeze(where, dim))


def median(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return `median` or `nanmedian` of MindSpore with torch's arguments; without a dimension, the value of all."""

    def found(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return found(flattened(x), 0)[0]
        if is_empty(x):
            shape = reduced_shape(x, dim, keepdim)
            return filled(0, shape, x), mint.zeros(shape, dtype=ms.int64)
        values, places = operation(pointwise.widened(x), dim, keepdim)
        return pointwise.narrowed(values, x.dtype), places

    return found


def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = tuple(range(x.ndim)) if dim is None else dim
    return amin(x, dims, keepdim), amax(x, dims, keepdim)


ORDER_KERNELS: dict[str, Callable[..., Any]] = {
    "topk": topk,
    "argsort": argsort,
    "sort": sort,
    "argmax": argmax,
    "argmin": argmin,
    "max": max_or_min("max"),
    "min": max_or_min("min"),
    "aminmax": aminmax,
    "median": median(ops.median),
    "nanmedian": median(ops.nanmedian),
    "searchsorted": lambda boundaries, x, right=False: mint.searchsorted(boundaries, x, right=right),
    "bucketize": lambda x, boundaries, right=False: mint.searchsorted(boundaries, x, right=right),
}

KERNELS: dict[str, Callable[..., Any]] = {
    "sum": total,
    "mean": mean,
    "amax": amax,
    "amin": amin,
    "logsumexp": logsumexp,
    "prod": prod,
    "nansum": nansum,
    "nanmean": nanmean,
    "all": every,
    "any": some,
    "count_nonzero": lambda x, dim=None: share(np.asarray(np.count_nonzero(numbers(x), axis=_axes(dim)), np.int64)),
    "norm": norm,
    "linalg_vector_norm": lambda x, p=2, dim=None, keepdim=False: norm(x, p, dim, keepdim),
    **{name: std_or_var(name) for name in ("std", "var", "std_mean", "var_mean")},
    "bincount": bincount,
    "cumsum": cumsum,
    "cumprod": cumprod,
    "logcumsumexp": lambda x, dim: ops.logcumsumexp(x, dim) if x.size else pointwise.clone(x),
    **ORDER_KERNELS,
}
