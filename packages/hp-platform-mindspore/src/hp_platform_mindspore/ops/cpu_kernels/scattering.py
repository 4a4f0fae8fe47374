"""Writing by index, and operations whose result shape depends on values: masks, nonzero, unique.

The CPU has no kernel for these, or none with int64 indices. NumPy computes which elements an index selects, as indices
into the flattened tensor, which have no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops

from hp_dtensor.exceptions import CapabilityError
from hp_platform_mindspore.ops.cpu_kernels import creation, pointwise, reductions, shapes
from hp_platform_mindspore.ops.cpu_kernels.empty import filled, is_empty
from hp_platform_mindspore.tensor.memory import numbers, share

Array = np.ndarray[Any, Any]


def _along(shape: tuple[int, ...], dim: int, index: Array) -> Array:
    """Return the flat indices of `x[..., index[i], ...]` for an index of the shape of what is written."""
    # All dimensions index themselves, except `dim`.
    grids = np.indices(index.shape)
    grids[dim] = np.where(index < 0, index + shape[dim], index)
    _check_inside(grids[dim], shape[dim])
    return np.ravel_multi_index(tuple(grids), shape)


def _rows(shape: tuple[int, ...], dim: int, index: Array) -> Array:
    """Return the flat indices of `x.index_select(dim, index)`."""
    index = np.where(index < 0, index + shape[dim], index)
    _check_inside(index, shape[dim])
    return np.take(np.arange(math.prod(shape)).reshape(shape), index, axis=dim)


def _check_inside(index: Array, size: int) -> None:
    if index.size and (index.min() < 0 or index.max() >= size):
        raise IndexError(f"an index is outside a dimension of {size}")


def _replaced(x: Tensor, places: Array, values: Tensor) -> Tensor:
    """Write `values` into a copy of `x` at flat indices; of several values for one element the last wins."""
    if is_empty(values, x):
        return pointwise.add(x, filled(0, x.shape, values)) if x.dtype == values.dtype else pointwise.clone(x)
    # Inverted to the value for each element of `x`, so that one gather does it, whose gradient is right. Of several
    # values the last assignment wins, as in a loop.
    last = np.zeros(x.size, np.int64) - 1
    last[places.reshape(-1)] = np.arange(places.size)
    source = share(np.maximum(last, 0))
    picked = mint.reshape(ops.gather(reductions.flattened(pointwise.cast(values, x.dtype)), source, 0), x.shape)
    return pointwise.where(share((last >= 0).reshape(x.shape)), picked, x)


def _added(x: Tensor, places: Array, values: Tensor) -> Tensor:
    """Add all `values` at their flat indices to a copy of `x`."""
    if is_empty(values, x):
        return pointwise.add(x, filled(0, x.shape, values))
    # A segment sum adds the values for one element, and its gradient is a gather.
    sums = ops.unsorted_segment_sum(reductions.flattened(values), share(places.reshape(-1).astype(np.int32)), x.size)
    return pointwise.add(x, mint.reshape(sums, x.shape))


def scatter(x: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None, reduce: Any = None) -> Tensor:
    if reduce not in (None, "add"):
        raise CapabilityError(
            f"scatter with reduce={reduce!r} is not composed for MindSpore's CPU, only 'add' is; run it on the torch "
            "platform"
        )
    given = value if src is None else src
    if not isinstance(given, Tensor):
        given = creation.full(index.shape, given, x.dtype)
    if reduce == "add":
        return scatter_add(x, dim, index, given)
    places = _along(tuple(x.shape), dim % x.ndim, numbers(index))
    return _replaced(x, places, _leading(given, places.shape))


def _leading(src: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Crop a source to the part that an index of `shape` covers."""
    for dim, size in enumerate(shape):
        src = src if src.shape[dim] == size else mint.narrow(src, dim, 0, size)
    return src


def scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    places = _along(tuple(x.shape), dim % x.ndim, numbers(index))
    return _added(x, places, _leading(src, places.shape))


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    return _added(x, _rows(tuple(x.shape), dim, numbers(index)), source if alpha == 1 else source * alpha)


def index_put(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    picked = (indices,) if isinstance(indices, Tensor) else tuple(indices)
    return put(x, picked, values, accumulate)


def put(x: Tensor, index: Any, value: Any, accumulate: bool = False) -> Tensor:
    """Return `x` as it is after `x[index] = value` (or `+=`), for any index that NumPy supports."""
    # NumPy indexes an array of element numbers: its rules for mixed indices are torch's, so they need no code here.
    places = np.arange(x.size).reshape(x.shape)[_host_index(index)]
    if not isinstance(value, Tensor):
        value = creation.full((), value, x.dtype)
    value = pointwise.cast(value, x.dtype)
    # As NumPy and torch do, drop leading dimensions of one element of the assigned value.
    while value.ndim > places.ndim and value.shape[0] == 1:
        value = mint.squeeze(value, 0)
    values = shapes.expand(value, places.shape)
    return _added(x, places, values) if accumulate else _replaced(x, places, values)


def _host_index(index: Any) -> Any:
    if isinstance(index, (tuple, list)):
        return type(index)(_host_index(item) for item in index)
    return numbers(index) if isinstance(index, Tensor) else index


def take_along_dim(x: Tensor, index: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return shapes.gather(reductions.flattened(x), 0, reductions.flattened(index))
    return shapes.gather(x, dim, index)


def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    shape = np.broadcast_shapes(x.shape, mask.shape)
    places = np.flatnonzero(np.broadcast_to(numbers(mask), shape))
    return shapes.index_select(reductions.flattened(shapes.expand(x, shape)), 0, share(places))


def nonzero(x: Tensor, as_tuple: bool = False) -> Any:
    found = np.nonzero(numbers(x))
    return tuple(share(f) for f in found) if as_tuple else share(np.stack(found, -1))


def unique(x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    """Return the sorted distinct values; on request the index of each element's value, and the counts."""
    values, inverse, counts = np.unique(numbers(x), return_inverse=True, return_counts=True)
    return _chosen(values, inverse.reshape(x.shape), counts, return_inverse, return_counts)


def _chosen(values: Array, inverse: Array, counts: Array, with_inverse: bool, with_counts: bool) -> Any:
    extra = [array.astype(np.int64) for array, wanted in ((inverse, with_inverse), (counts, with_counts)) if wanted]
    found = [share(np.ascontiguousarray(array)) for array in (values, *extra)]
    return tuple(found) if extra else found[0]


def index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    mask = np.zeros(x.shape, np.bool_)
    mask.reshape(-1)[_rows(tuple(x.shape), dim, numbers(index)).reshape(-1)] = True
    if not isinstance(value, Tensor):
        return pointwise.masked_fill(x, share(mask), value)
    # MindSpore's kernel has no gradient of the value.
    return pointwise.where(share(mask), shapes.expand(pointwise.cast(value, x.dtype), x.shape), x)


KERNELS: dict[str, Callable[..., Any]] = {
    "scatter": scatter,
    "scatter_add": scatter_add,
    "index_add": index_add,
    "index_fill": index_fill,
    "index_put_": index_put,
    "take_along_dim": take_along_dim,
    "masked_select": masked_select,
    "nonzero": nonzero,
    "argwhere": nonzero,
    "unique": unique,
}
