"""Sums, means, norms and other reductions over dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops

from hp_platform_mindspore.cpu_kernels import pointwise
from hp_platform_mindspore.cpu_kernels.empty import as_saved, filled, is_empty, result_dtype
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
    gone = {d % x.ndim for d in ((dims,) if isinstance(dims, int) else dims)}
    return tuple(1 if i in gone else size for i, size in enumerate(x.shape) if keepdim or i not in gone)


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
        return as_saved(filled(-math.inf, reduced_shape(x, dim, keepdim), x))
    return ops.logsumexp(x, dim, keepdim)


def prod(x: Tensor, dim: int | None = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    x = x if dtype is None else x.astype(dtype)
    if is_empty(x):
        return as_saved(filled(1, reduced_shape(x, dim, keepdim), x))
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


def count_nonzero(x: Tensor, dim: Dims = None) -> Tensor:
    return share(np.asarray(np.count_nonzero(numbers(x), axis=_axes(dim)), np.int64))


def norm(x: Tensor, p: Any = "fro", dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """Compute the vector norm of order `p`; its gradient at 0 is 0, as torch's."""
    x = x if dtype is None else x.astype(dtype)
    p = 2.0 if p == "fro" else float(p)
    dims = tuple(range(x.ndim)) if dim is None else dim
    if math.isinf(p):
        return (amax if p > 0 else amin)(mint.abs(x), dims, keepdim)
    if p == 0:
        return total((x != 0).astype(x.dtype), dims, keepdim)
    if p == 1:
        return total(mint.abs(x), dims, keepdim)
    powers = total(x * x if p == 2 else mint.abs(x) ** p, dims, keepdim)
    # The derivative of a root at 0 is infinite, and torch gives 0: the root is taken of 1 there, and the result set to
    # 0, so that no gradient passes.
    nothing = powers == 0
    safe = pointwise.masked_fill(powers, nothing, 1.0)
    return pointwise.masked_fill(mint.sqrt(safe) if p == 2 else safe ** (1.0 / p), nothing, 0.0)


def spread(name: str) -> Callable[..., Any]:
    """Make `std`, `var`, `std_mean` or `var_mean`."""

    def found(
        x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, correction: float | None = 1
    ) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        dims = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        count = math.prod(x.shape[d] for d in dims)
        degrees = count - ((1 if correction is None else correction) if unbiased else 0)
        average = mean(x, dims, True)
        centered = x - average
        squares = total(centered * centered, dims, keepdim)
        result = squares / degrees if degrees > 0 else squares * math.nan
        if name.startswith("std"):
            nothing = result == 0
            result = pointwise.masked_fill(mint.sqrt(pointwise.masked_fill(result, nothing, 1.0)), nothing, 0.0)
        return (result, mean(x, dims, keepdim)) if name.endswith("mean") else result

    return found


def nanmean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    x = x if dtype is None else x.astype(dtype)
    there = ~np.isnan(numbers(x))
    axes = dim if dim is None or isinstance(dim, int) else tuple(dim)
    counts = np.asarray(there.sum(axis=axes, keepdims=keepdim)).astype(HOST_DTYPES[x.dtype])
    return pointwise.div(total(pointwise.masked_fill(x, share(~there), 0.0), dim, keepdim), share(counts))


def bincount(x: Tensor, minlength: int) -> Tensor:
    return share(np.bincount(numbers(x), minlength=minlength).astype(np.int64, copy=False))


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
    "count_nonzero": count_nonzero,
    "norm": norm,
    "linalg_vector_norm": lambda x, p=2, dim=None, keepdim=False: norm(x, p, dim, keepdim),
    **{name: spread(name) for name in ("std", "var", "std_mean", "var_mean")},
    "bincount": bincount,
}
