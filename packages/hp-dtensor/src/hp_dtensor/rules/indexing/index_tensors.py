"""Indices that are tensors of positions: what they pick, and writing the rows that a rank has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from hp_dtensor.exceptions import IndexOutOfRangeError
from hp_dtensor.rules.engine.factors import Dim, Dims
from hp_dtensor.rules.engine.local_call import LocalCall
from hp_dtensor.rules.engine.registry import OpCall, broadcast_shape
from hp_dtensor.rules.indexing import slices
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.dtensor import DTensor

Item = Any
Tensor = Any
Array = numpy.ndarray


@dataclass(frozen=True)
class Picked:
    """The dimensions and factors that positions pick.

    Attributes:
        shape: the index tensors broadcast together.
        start: where these dimensions are among those of the result.
        indices: factors of each index tensor.
    """

    shape: tuple[int, ...]
    start: int
    indices: tuple[Dims, ...]

    @property
    def sizes(self) -> Mapping[str, int]:
        return {f"x{i}": size for i, size in enumerate(self.shape)}

    def inserted(self, rest: Sequence[Dim]) -> Dims:
        """The dimensions of the result, from those that come of slices and `None`."""
        return (*rest[: self.start], *((name,) for name in self.sizes), *rest[self.start :])


def picked(call: OpCall, items: Sequence[Item]) -> Picked:
    """Analyse an index of one item per dimension, of which some are specs of tensors of positions."""
    tensors = [item for item in items if isinstance(item, TensorSpec)]
    try:
        shape = broadcast_shape([tensor.shape for tensor in tensors])
    except ValueError as error:
        raise call.refuse(str(error)) from None
    indices = tuple(
        tuple(
            (f"x{len(shape) - tensor.ndim + i}",) if size == shape[len(shape) - tensor.ndim + i] else ()
            for i, size in enumerate(tensor.shape)
        )
        for tensor in tensors
    )
    if call.tensors[0].mesh.platform.picks_integers_first:
        items = [item for item in items if not _is_integer(item)]
    return Picked(shape, _start(_places(items)), indices)


def _is_integer(item: Item) -> bool:
    """Tell if an item picks one position: a tensor without dimensions does, as a number does."""
    return isinstance(item, int) or (isinstance(item, TensorSpec) and item.ndim == 0)


def _places(items: Sequence[Item]) -> list[int]:
    """Return the dimensions whose items are integers and tensors, which together pick positions."""
    return [i for i, item in enumerate(items) if isinstance(item, (int, TensorSpec))]


def _start(places: Sequence[int]) -> int:
    """Return the place of the picked dimensions in the result: the first one if the items stand apart."""
    return places[0] if places and places[-1] - places[0] < len(places) else 0


def assign_own(items: Sequence[Item], picked: Picked, call: LocalCall) -> Tensor:
    """`x[index] = value` where a dimension that is picked from is cut: the rows in this rank's part.

    The positions are looked at on the host. A rank that has none writes nothing, in the graph of the value.
    """
    platform, x = call.platform, call.arguments["input"]
    places = _places(items)
    index, taken = slices.own_index(
        [0 if i in places else item for i, item in enumerate(items)], call.sizes, call.spans
    )
    dims = {place: sum(item is not None for item in items[:place]) for place in places}
    rows = {place: _rows(call, place, items, dim, picked.shape) for place, dim in dims.items()}
    spans = {place: call.spans.get(f"d{dim}", (0, call.sizes[f"d{dim}"])) for place, dim in dims.items()}
    inside = [(rows[place] >= start) & (rows[place] < start + length) for place, (start, length) in spans.items()]
    own = numpy.flatnonzero(numpy.logical_and.reduce(inside))
    for place in places:
        index[place] = platform.from_numpy(rows[place][own] - spans[place][0], platform.device_of(x))
    taken = [*taken[: picked.start], None, *taken[picked.start :]]
    value = slices.part_of_value(platform.ops, _rows_of_value(call, picked, len(taken), own), taken)
    call.on(x, index=tuple(index), value=_moved(platform.ops, value, picked.start, _start(places), len(taken)))
    return x


def _moved(ops: Any, value: Any, source: int, target: int, ndim: int) -> Any:
    """The value whose dimension of picked rows is where an index of tensors alone has it."""
    if source == target or not hasattr(value, "shape"):
        return value
    value = ops.reshape(value, (1,) * (ndim - len(value.shape)) + tuple(value.shape))
    order = [dim for dim in range(ndim) if dim != source]
    return ops.permute(value, (*order[:target], source, *order[target:]))


def _rows(call: LocalCall, place: int, items: Sequence[Item], dim: int, shape: tuple[int, ...]) -> Array:
    """The positions along a dimension that the item at `place` gives, as many as are picked."""
    found = numpy.asarray(items[place]) if isinstance(items[place], int) else _on_host(call, items, place)
    return numpy.broadcast_to(counted_from_front(call.name, found, dim, call.sizes[f"d{dim}"]), shape).ravel()


def counted_from_front(what: str, found: Array, dim: int, size: int) -> Array:
    """Positions along a dimension of `size`, those counted from its end counted from its front.

    Raises:
        IndexOutOfRangeError: there is no such position in `what`.
    """
    found = found.astype(numpy.int64)  # one byte does not hold the size
    outside = found[(found < -size) | (found >= size)]
    if outside.size:
        raise IndexOutOfRangeError(
            f"{what}: index {outside.flat[0]} is out of bounds for dimension {dim} with size {size}"
        )
    return numpy.where(found < 0, found + size, found)


def _on_host(call: LocalCall, items: Sequence[Item], place: int) -> Array:
    index = call.arguments["index"]
    tensors = [item for item in (index if isinstance(index, tuple) else (index,)) if hasattr(item, "shape")]
    number = sum(isinstance(item, TensorSpec) for item in items[:place])
    local = tensors[number]
    return call.platform.to_numpy(call.platform.unwrap(local) if isinstance(local, DTensor) else local)


def _rows_of_value(call: LocalCall, picked: Picked, ndim: int, own: Array) -> Any:
    """The value for the picked positions `own`, which are one dimension now; `ndim`: with it, those of the result."""
    value, ops = call.arguments["value"], call.platform.ops
    behind = ndim - 1 - picked.start
    if not hasattr(value, "shape") or len(value.shape) <= behind:
        return value
    count = len(picked.shape)
    shape = (1,) * (ndim - 1 + count - len(value.shape)) + tuple(value.shape)
    before, after = shape[: picked.start], shape[picked.start + count :]
    value = ops.expand(ops.reshape(value, shape), (*before, *picked.shape, *after))
    value = ops.reshape(value, (*before, math.prod(picked.shape), *after))
    return ops.index_select(value, picked.start, call.platform.from_numpy(own, call.platform.device_of(value)))
