"""Operations whose result has a shape that depends on values: mask selection, nonzero, unique."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor

from hp_platform_mindspore.cpu_kernels import indexing, scattering, shapes
from hp_platform_mindspore.tensor.memory import numbers, share

Array = np.ndarray[Any, Any]


def take_along_dim(x: Tensor, index: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return indexing.gather(scattering.flattened(x), 0, scattering.flattened(index))
    return indexing.gather(x, dim, index)


def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    shape = np.broadcast_shapes(x.shape, mask.shape)
    places = np.flatnonzero(np.broadcast_to(numbers(mask), shape))
    return indexing.index_select(scattering.flattened(shapes.expand(x, shape)), 0, share(places))


def nonzero(x: Tensor, as_tuple: bool = False) -> Any:
    found = np.nonzero(numbers(x))
    return tuple(share(f) for f in found) if as_tuple else share(np.stack(found, -1))


def unique(x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    """Return the sorted distinct values; on request where each element went, and how often each value occurs."""
    values, inverse, counts = np.unique(numbers(x), return_inverse=True, return_counts=True)
    return _chosen(values, inverse.reshape(x.shape), counts, return_inverse, return_counts)


def unique_consecutive(x: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: None = None) -> Any:
    if dim is not None:
        raise TypeError("unique_consecutive of DTensors takes no dim")
    flat = numbers(x).reshape(-1)
    first = np.ones(flat.size, np.bool_)
    first[1:] = flat[1:] != flat[:-1]
    inverse = np.cumsum(first) - 1
    return _chosen(flat[first], inverse.reshape(x.shape), np.bincount(inverse), return_inverse, return_counts)


def _chosen(values: Array, inverse: Array, counts: Array, with_inverse: bool, with_counts: bool) -> Any:
    extra = [array.astype(np.int64) for array, wanted in ((inverse, with_inverse), (counts, with_counts)) if wanted]
    found = [share(np.ascontiguousarray(array)) for array in (values, *extra)]
    return tuple(found) if extra else found[0]


KERNELS: dict[str, Callable[..., Any]] = {
    "take_along_dim": take_along_dim,
    "masked_select": masked_select,
    "nonzero": nonzero,
    "argwhere": nonzero,
    "unique": unique,
    "unique_consecutive": unique_consecutive,
}
