"""Lists, ranges and NumPy arrays as indices of DTensors: every rank has them whole, as replicated DTensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy

from hp_dtensor.exceptions import IndexOutOfRangeError, ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.rules.indexing.index_tensors import counted_from_front
from hp_dtensor.spec.placements import Replicate
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.dtensor import DTensor

Array = numpy.ndarray
INDEXING = frozenset({"getitem", "setitem"})


def with_positions(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `getitem` or `setitem`, with DTensors of positions for lists, ranges and arrays in the index.

    Truth values become the positions of the true ones, since they are the same on all ranks.

    Raises:
        IndexOutOfRangeError: a position that the tensor does not have, truth values of another shape, or more of all
            than it has dimensions.
        ShardingRuleError: a list of lists by itself or an array of bytes, which frameworks understand differently; an
            array of anything but integers and truth values, or of one truth value.
    """
    x, index, *rest = args
    if not isinstance(x, DTensor):  # which is refused, whatever the index
        return args
    if type(index) is list and any(isinstance(item, (list, tuple, range, Array)) for item in index):
        raise ShardingRuleError(
            f"a list of lists as the index of a DTensor {x.spec!r}: NumPy takes it for an array, torch for a tuple. "
            "Write x[numpy.array(index)] or x[tuple(index)]."
        )
    items = index if isinstance(index, tuple) else (index,)
    known = [_array(x, item) for item in items]
    if all(array is None for array in known):
        return args
    return x, tuple(_resolved(x, items, known)), *rest


def _array(x: DTensor, item: Any) -> Array | None:
    """A list, range, array or NumPy number as an array of integers or truth values; None for anything else."""
    array = _as_array(x.spec.mesh.platform, item)
    if array is not None and isinstance(item, Array) and array.dtype == numpy.uint8:
        array = _of_bytes(x, array)
    if array is not None and (array.dtype.kind not in "iub" or (array.dtype.kind == "b" and not array.ndim)):
        if isinstance(item, (list, range)):
            return None
        kind = "a single truth value" if array.dtype.kind == "b" else f"an array of {array.dtype}"
        raise ShardingRuleError(
            f"{kind} as the index of a DTensor {x.spec!r}: expected integers, or truth values of one dimension or more"
        )
    return array


def _of_bytes(x: DTensor, array: Array) -> Array:
    if x.spec.mesh.platform.masks_of_bytes:
        return array.astype(bool)
    raise ShardingRuleError(
        f"an array of uint8 as the index of a DTensor {x.spec!r}: NumPy takes it for positions, torch for a mask. "
        "Write index.astype(bool) or index.astype(numpy.int64)."
    )


def _as_array(platform: Platform, item: Any) -> Array | None:
    if not isinstance(item, (list, range, Array, numpy.generic)) or _holds_tensor(platform, item):
        return None
    array = numpy.asarray(item, numpy.int64) if isinstance(item, (list, range)) and not len(item) else None
    try:
        return numpy.asarray(item) if array is None else array
    except ValueError:  # lists of different lengths
        return None


def _holds_tensor(platform: Platform, item: Any) -> bool:
    if isinstance(item, list):
        return any(_holds_tensor(platform, each) for each in item)
    return isinstance(item, (DTensor, platform.Tensor))


def _resolved(x: DTensor, items: Sequence[Any], known: Sequence[Array | None]) -> list[Any]:
    taken = [_dims_taken(item, array) for item, array in zip(items, known, strict=True)]
    if sum(taken) > len(x.spec.shape):
        raise IndexOutOfRangeError(f"{sum(taken)} indices for a {len(x.spec.shape)}-dimensional tensor {x.spec!r}")
    index: list[Any] = []
    dim = 0
    for item, array, count in zip(items, known, taken, strict=True):
        if item is Ellipsis:
            count = len(x.spec.shape) - sum(taken)
        if array is None:
            index.append(item)
        elif array.dtype.kind == "b":
            index += [_replicated(x, places) for places in numpy.nonzero(_mask(x, array, dim))]
        elif not array.ndim:
            index.append(operator.index(array[()]))
        else:
            index.append(_replicated(x, counted_from_front(repr(x.spec), array, dim, x.spec.shape[dim])))
        dim += count
    return index


def _dims_taken(item: Any, array: Array | None) -> int:
    if array is not None and array.dtype.kind == "b":
        return array.ndim
    if isinstance(item, DTensor) and item.spec.mesh.platform.dtype_name(item.spec.dtype) in ("bool", "uint8"):
        return len(item.spec.shape)
    return 0 if item is None or item is Ellipsis else 1


def _mask(x: DTensor, mask: Array, dim: int) -> Array:
    if mask.shape != x.spec.shape[dim : dim + mask.ndim]:
        raise IndexOutOfRangeError(
            f"truth values {list(mask.shape)} do not fit dimension {dim} and on of {x.spec!r}: expected "
            f"{list(x.spec.shape[dim : dim + mask.ndim])}"
        )
    return mask


def _replicated(x: DTensor, positions: Array) -> Any:
    mesh = x.spec.mesh
    platform = mesh.platform
    local = platform.from_numpy(positions.astype(numpy.int64))
    return platform.wrap(local, TensorSpec(mesh, (Replicate(),) * mesh.ndim, positions.shape, local.dtype))
