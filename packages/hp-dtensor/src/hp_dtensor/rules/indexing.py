"""Rules of `x[index]`, `x[index] = value`, `narrow` and `select`: integers, slices, tensors of positions, masks."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from hp_dtensor.exceptions import IndexOutOfRangeError, ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.rules.factors import (
    LINEAR,
    Dim,
    Dims,
    Factorization,
    LocalCall,
    LocalWork,
    ShardingLimits,
    Span,
    linear_rule,
    positions_in_span,
    unsharded,
)
from hp_dtensor.rules.registry import DATA_DEPENDENT, OpCall, RuleRegistry, dim_factors
from hp_dtensor.spec.placements import Replicate
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.dtensor import DTensor

Item = Any
Tensor = Any


def register(registry: RuleRegistry) -> None:
    registry.register("narrow", "input dim start length", _narrow, view=True, variants="_copy")
    registry.register("select", "input dim index", _select, view=True)
    registry.register("getitem", "input index", _getitem, view=True, data_dependent=True)
    registry.register("setitem", "input index value", _setitem, in_place=True)


def check_position(call: OpCall, index: int, dim: int) -> None:
    """Raise an IndexOutOfRangeError if `index` is outside dimension `dim`."""
    spec = call.tensors[0]
    size = spec.shape[dim]
    if not -size <= index < size:
        raise IndexOutOfRangeError(
            f"{call.name}: index {index} is out of bounds for dimension {dim} with size {size} of {spec!r}"
        )


def _narrow(call: OpCall) -> Factorization:
    shape, dim = call.tensors[0].shape, call.dim(call["dim"])
    start, length = call["start"], call["length"]
    if not isinstance(start, int) or not isinstance(length, int):
        raise call.needs_replicated("its rule needs integers as start and length")
    first = start + shape[dim] if start < 0 else start
    if not (0 <= first <= shape[dim] and 0 <= length <= shape[dim] - first):
        raise IndexOutOfRangeError(
            f"narrow: start {start} and length {length} are out of bounds for dimension {dim} with size {shape[dim]} "
            f"of {call.tensors[0]!r}"
        )
    dims, sizes = dim_factors("d", shape)
    sliced = range(first, first + length)

    def localize(shapes: Sequence[tuple[int, ...]], spans: Mapping[str, Span]) -> Mapping[str, Any]:
        if f"d{dim}" not in spans:
            return {}
        rows, count = _rows_in_span(sliced, spans[f"d{dim}"])
        return {"start": rows.start, "length": count}

    # `picked` leaves each rank its own rows of the slice: a view, as on one device, instead of a balanced result that
    # would cost an exchange and the aliasing. torch's rule gathers the dimension instead.
    rule = linear_rule(dims, (dims,), sizes, work=LocalWork(localize=localize))
    return replace(rule, limits=ShardingLimits(picked={f"d{dim}": sliced}))


def _select(call: OpCall) -> Factorization:
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    dim, index = call.dim(call["dim"]), call["index"]
    if not isinstance(index, int):
        raise call.refuse("expected an integer index; use index_select for a tensor of positions")
    check_position(call, index, dim)
    position = index % sizes[f"d{dim}"]

    def select_from_owner(local: LocalCall) -> Tensor:
        x = local.arguments["input"]
        start, length = local.spans[f"d{dim}"]
        if start <= position < start + length:
            return local.on(x, index=position - start)
        return _zeros_from(local.platform.ops, local.platform.ops.narrow(x, dim, 0, 0), dim)

    rule = linear_rule(dims, ((*dims[:dim], *dims[dim + 1 :]),), sizes)
    return partial_from_owners(call, rule, [f"d{dim}"], select_from_owner)


def partial_from_owners(
    call: OpCall, rule: Factorization, factors: Sequence[str], local: Callable[[LocalCall], Any]
) -> Factorization:
    """Return `rule` with `factors`, each picked at one position, reduced by sum; for booleans they are unsharded."""
    # The owner's row plus zeros is the row, so the result is a partial sum, and backward gives the owner its gradient.
    if call.is_bool:
        return replace(rule, limits=replace(rule.limits, fixed=rule.limits.fixed | {*factors}))
    return replace(
        rule,
        partial=replace(rule.partial, reduced=dict.fromkeys(factors, "sum")),
        work=replace(rule.work, by_factor=dict.fromkeys(factors, local)),
    )


def _zeros_from(ops: Any, x: Tensor, dim: int) -> Tensor:
    """Return zeros without dimension `dim`, in which `x` is empty. They depend on `x`, for autograd."""
    # Without the dependency this rank's backward would skip the collectives of the others. Sums of integers are int64.
    return ops.cast(ops.sum(x, dim), x.dtype)


def parse_index(
    call: OpCall, items: Sequence[Item], dims: Dims, sizes: Mapping[str, int]
) -> tuple[tuple[Dim, ...], dict[str, range], list[str]]:
    """Return an index's output dimensions (`("tensor",)` for tensors), sliced factor -> positions, picked factors."""
    # An integer or tensor removes its dimension, whose factor the output lacks; a slice keeps it, shortened (`picked`).
    output: list[Dim] = []
    sliced: dict[str, range] = {}
    picked: list[str] = []
    position = 0
    for item in items:
        if item is None:
            output.append(())
            continue
        (factor,) = dims[position]
        if isinstance(item, slice):
            output.append((factor,))
            if item.step is not None and item.step <= 0:
                raise call.refuse(f"a slice needs a step greater than zero, got {item.step}")
            if item != slice(None):
                sliced[factor] = range(*item.indices(sizes[factor]))
        elif isinstance(item, int):
            check_position(call, item, position)
            picked.append(factor)
        else:
            picked.append(factor)
            output.append(("tensor",))
        position += 1
    return tuple(output), sliced, picked


def localize_index(
    items: Sequence[Item], sizes: Mapping[str, int], sliced: Mapping[str, range]
) -> Callable[[Sequence[tuple[int, ...]], Mapping[str, Span]], Mapping[str, Any]]:
    """Return the `LocalWork.localize` of an index: slices of sharded dimensions become relative to the shard."""

    def localize(shapes: Sequence[tuple[int, ...]], spans: Mapping[str, Span]) -> Mapping[str, Any]:
        return {"index": tuple(local_index(items, sizes, spans)[0])} if sliced.keys() & spans.keys() else {}

    return localize


def pick_from_owners(items: Sequence[Item], call: LocalCall) -> Tensor:
    """Return the indexed elements of this rank's shard, with zeros for positions that another rank owns."""
    index, _ = local_index(items, call.sizes, call.spans)
    result = call.on(call.arguments["input"], index=tuple(slice(0, 0) if item is ELSEWHERE else item for item in index))
    # The empty slices in place of foreign positions are dimensions of size 0; their sum has zeros and a gradient.
    dims = [item for item in index if not isinstance(item, int)]
    for dim in reversed([i for i, item in enumerate(dims) if item is ELSEWHERE]):
        result = _zeros_from(call.platform.ops, result, dim)
    return result


ELSEWHERE = object()
"""Stands for a position that another rank owns."""


def local_index(
    items: Sequence[Item], sizes: Mapping[str, int], spans: Mapping[str, Span]
) -> tuple[list[Item], list[Span | None]]:
    """Return the index relative to the shard, and its span of each output dimension; None: all of the dimension."""
    index: list[Item] = []
    taken: list[Span | None] = []
    position = 0
    for item in items:
        if item is None:
            index.append(None)
            taken.append(None)
            continue
        size = sizes[f"d{position}"]
        start, length = span = spans.get(f"d{position}", (0, size))
        position += 1
        if isinstance(item, slice):
            sliced = range(*item.indices(size))
            rows, _ = _rows_in_span(sliced, span)
            index.append(rows)
            taken.append(None if item == slice(None) else positions_in_span(sliced, span))
        else:
            index.append(item % size - start if 0 <= item % size - start < length else ELSEWHERE)
    return index, taken


def _rows_in_span(sliced: range, span: Span) -> tuple[slice, int]:
    """Return the sliced positions inside `span`, as a slice relative to its start, and their number."""
    low, count = positions_in_span(sliced, span)
    # An empty slice starts at 0: its true start may be negative, which would count from the end of the shard.
    start = sliced.start + low * sliced.step - span[0] if count else 0
    return slice(start, start + count * sliced.step, sliced.step), count


def value_on_span(ops: Any, value: Any, taken: Sequence[Span | None]) -> Any:
    """Return the slice of an assigned value that belongs to this rank's shard; `taken` is that of `local_index`."""
    if not hasattr(value, "shape") or not len(value.shape):
        return value
    for dim, span in enumerate(taken[len(taken) - len(value.shape) :]):
        # A dimension of size 1 is broadcast to every rank's rows.
        if span is not None and value.shape[dim] != 1:
            value = ops.narrow(value, dim, *span)
    return value


Array = numpy.ndarray


def _items(call: OpCall, ndim: int) -> list[Item]:
    """Return the index with one item per dimension (a mask covers several), `None`s included and `...` expanded."""
    index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
    if any(
        not (item is None or item is Ellipsis or type(item) in (int, slice) or isinstance(item, TensorSpec))
        for item in index
    ):
        raise call.refuse(
            "expected integers, slices, None, ..., or lists, arrays and DTensors of positions or booleans as an index"
        )
    dtypes = [call.platform.dtype_name(item.dtype) for item in index if isinstance(item, TensorSpec)]
    # NumPy and JAX take bytes for positions, torch for a mask.
    if "uint8" in dtypes and not call.platform.masks_of_bytes:
        raise call.refuse("a uint8 index is ambiguous (positions or a mask); convert it to int64 or bool")
    used = sum(item.ndim if _is_mask(item) else item is not None and item is not Ellipsis for item in index)
    if used > ndim:
        raise IndexOutOfRangeError(f"{call.name}: {used} indices for a {ndim}-dimensional tensor {call.tensors[0]!r}")
    return _expanded(index, ndim - used)


def _expanded(index: tuple[Item, ...], missing: int) -> list[Item]:
    """Return an index with `...`, or else its end, replaced by `missing` full slices."""
    rest = [slice(None)] * missing
    where = next((i for i, item in enumerate(index) if item is Ellipsis), None)
    return [*index, *rest] if where is None else [*index[:where], *rest, *index[where + 1 :]]


def _is_mask(item: Item) -> bool:
    return isinstance(item, TensorSpec) and item.mesh.platform.dtype_name(item.dtype) in ("bool", "uint8")


def _getitem(call: OpCall) -> Factorization:
    shape = call.tensors[0].shape
    items = _items(call, len(shape))
    if any(_is_mask(item) for item in items):
        raise call.refuse(DATA_DEPENDENT)
    dims, sizes = dim_factors("d", shape)
    if any(isinstance(item, TensorSpec) for item in items):
        # Indexed dimensions are unsharded. Those of the index tensors, broadcast together, are parallel.
        positions, result, fixed = _picked(call, items, dims, sizes)
        return Factorization((dims, *positions.indices), (result,), sizes, limits=unsharded(fixed), partial=LINEAR)
    output, sliced, picked = parse_index(call, items, dims, sizes)
    rule = Factorization(
        (dims,),
        (output,),
        sizes,
        limits=ShardingLimits(picked=sliced),
        partial=LINEAR,
        work=LocalWork(localize=localize_index(items, sizes, sliced)),
    )
    return partial_from_owners(call, rule, picked, functools.partial(pick_from_owners, items))


def _picked(call: OpCall, items: list[Item], dims: Dims, sizes: dict[str, int]) -> tuple[Picked, Dims, set[str]]:
    """Return the index's tensors, the factors of the result, and the factors of the indexed dimensions."""
    # Index tensors stand for one group of dimensions of the result, wherever their items are.
    picked = tensor_index(call, items)
    output, fixed = _output_factors(call, items, dims, sizes)
    sizes |= picked.sizes
    return picked, picked.inserted([dim for dim in output if dim != ("tensor",)]), fixed


def _setitem(call: OpCall) -> Factorization:
    """Write the indexed elements of each rank's shard, from a value that is unsharded along indexed dimensions."""
    target = call.tensors[0]
    items = _items(call, target.ndim)
    dims, sizes = dim_factors("d", target.shape)
    value = call["value"] if isinstance(call["value"], TensorSpec) else None
    if any(_is_mask(item) for item in items):
        return _assign_by_mask(call, items, value)
    if any(isinstance(item, TensorSpec) for item in items):
        return _setitem_by_positions(call, items, value)
    picked, fixed = _output_factors(call, items, dims, sizes)
    sliced = [dim for dim in picked if dim and dim[0].startswith("d")]
    inputs: tuple[Dims, ...] = (dims,)
    if value is not None:
        inputs = (dims, _value_factors(call, value, picked, sizes))
    written = [name for (name,) in dims if (name,) not in sliced]
    fixed -= {name for (name,) in dims}
    return Factorization(
        inputs,
        (dims,),
        sizes,
        limits=unsharded(fixed),
        work=LocalWork(by_factor=dict.fromkeys(written, _assign_to_shard)),
    )


def _setitem_by_positions(call: OpCall, items: list[Item], value: TensorSpec | None) -> Factorization:
    """Write the rows of each rank's shard at replicated positions."""
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    picked, result, fixed = _picked(call, items, dims, sizes)
    inputs: tuple[Dims, ...] = (dims, *picked.indices)
    if value is not None:
        inputs = (*inputs, _value_factors(call, value, result, sizes))
    written = [name for (name,) in dims if (name,) not in result]
    fixed = (fixed | picked.sizes.keys()) - {name for (name,) in dims}
    local = functools.partial(assign_to_shard, items, picked)
    return Factorization(
        inputs, (dims,), sizes, limits=unsharded(fixed), work=LocalWork(by_factor=dict.fromkeys(written, local))
    )


def _output_factors(call: OpCall, items: list[Item], dims: Dims, sizes: dict[str, int]) -> tuple[list[Dim], set[str]]:
    """Return the dimensions of `x[index]`, with new factors for sliced ones, and all factors that the index affects."""
    output, sliced, picked = parse_index(call, items, dims, sizes)
    names = {factor: f"o{factor}" for factor in sliced}
    sizes |= {names[factor]: len(positions) for factor, positions in sliced.items()}
    renamed: list[Dim] = [tuple(names.get(factor, factor) for factor in dim) for dim in output]
    return renamed, {*sliced, *names.values(), *picked}


def _value_factors(call: OpCall, value: TensorSpec, names: Sequence[Dim], sizes: Mapping[str, int]) -> Dims:
    """Return the factors of an assigned value, which broadcasts to the indexed elements."""
    full = tuple(math.prod(sizes[factor] for factor in dim) for dim in names)
    return call.broadcast_factors("the value's shape", value.shape, full, tuple(names), to="the part that is written")


def _assign_by_mask(call: OpCall, items: list[Item], value: TensorSpec | None) -> Factorization:
    """Return the rule of `x[mask] = number`, with a mask over the leading dimensions."""
    mask, target = items[0], call.tensors[0]
    if not _is_mask(mask) or len(call.tensors) > 2 or value is not None or mask.shape != target.shape[: mask.ndim]:
        raise call.refuse(
            "assignment with a mask takes one mask over the leading dimensions and a number; use where, masked_scatter "
            "or index_put on unsharded dimensions"
        )
    # The number at each element does not depend on how many elements the mask selects, so every dimension is parallel.
    dims, sizes = dim_factors("d", target.shape)
    return Factorization((dims, dims[: mask.ndim]), (dims,), sizes)


def _assign_to_shard(call: LocalCall) -> Any:
    """Write the indexed elements of this rank's shard."""
    arguments = call.arguments
    x, value = arguments["input"], arguments["value"]
    given = arguments["index"] if isinstance(arguments["index"], tuple) else (arguments["index"],)
    used = sum(item is not None and item is not Ellipsis for item in given)
    index, taken = local_index(_expanded(given, len(x.shape) - used), call.sizes, call.spans)
    ops = call.platform.ops
    if ELSEWHERE in index:
        # A rank that writes nothing assigns an empty slice. The zero depends on the value, so that the rank joins the
        # sum of its gradient.
        has_gradient = hasattr(value, "shape") and len(value.shape)
        zero = ops.sum(ops.narrow(value, 0, 0, 0)) if has_gradient else value
        call.on(x, index=(slice(0, 0),), value=zero)
    else:
        call.on(x, index=tuple(index), value=value_on_span(ops, value, taken))
    return x


INDEXING = frozenset({"getitem", "setitem"})


@dataclass(frozen=True)
class Picked:
    """The tensors of positions in an index, which are broadcast together.

    Attributes:
        shape: shape of the index tensors broadcast together.
        start: index of their first dimension in the result.
        indices: factors of each index tensor.
    """

    shape: tuple[int, ...]
    start: int
    indices: tuple[Dims, ...]

    @property
    def sizes(self) -> Mapping[str, int]:
        return {f"x{i}": size for i, size in enumerate(self.shape)}

    def inserted(self, rest: Sequence[Dim]) -> Dims:
        """Return the dimensions of the result, given those of slices and `None`."""
        return (*rest[: self.start], *((name,) for name in self.sizes), *rest[self.start :])


def tensor_index(call: OpCall, items: Sequence[Item]) -> Picked:
    """Return the tensors of an index with one item per dimension."""
    tensors = [item for item in items if isinstance(item, TensorSpec)]
    shape = call.broadcast_shape(tensors)
    names, _ = dim_factors("x", shape)
    indices = tuple(call.broadcast_factors("the index's shape", tensor.shape, shape, names) for tensor in tensors)
    if call.platform.picks_integers_first:
        # Integers and tensors without dimensions are applied first there, and do not count as adjacent to the others.
        items = [x for x in items if not (isinstance(x, int) or (isinstance(x, TensorSpec) and x.ndim == 0))]
    return Picked(shape, _start(_places(items)), indices)


def _places(items: Sequence[Item]) -> list[int]:
    """Return the indices of the items that are integers or tensors, which are broadcast together."""
    return [i for i, item in enumerate(items) if isinstance(item, (int, TensorSpec))]


def _start(places: Sequence[int]) -> int:
    """Return the first dimension of positions in the result: by NumPy's rule, 0 if their items are not adjacent."""
    return places[0] if places and places[-1] - places[0] < len(places) else 0


def assign_to_shard(items: Sequence[Item], picked: Picked, call: LocalCall) -> Tensor:
    """Run `x[index] = value` on this rank's shard, for an index of positions in a sharded dimension.

    Positions are read on the host, which waits for the device: the number of those that a rank owns is a shape. A rank
    that owns none writes an empty slice of the value, which keeps the value in its autograd graph.
    """
    platform, x = call.platform, call.arguments["input"]
    places = _places(items)
    index, taken = local_index([0 if i in places else item for i, item in enumerate(items)], call.sizes, call.spans)
    dims = {place: sum(item is not None for item in items[:place]) for place in places}
    rows = {place: _rows(call, place, items, dim, picked.shape) for place, dim in dims.items()}
    spans = {place: call.spans.get(f"d{dim}", (0, call.sizes[f"d{dim}"])) for place, dim in dims.items()}
    inside = [(rows[place] >= start) & (rows[place] < start + length) for place, (start, length) in spans.items()]
    own = numpy.flatnonzero(numpy.logical_and.reduce(inside))
    for place in places:
        index[place] = platform.from_numpy(rows[place][own] - spans[place][0], platform.device_of(x))
    taken = [*taken[: picked.start], None, *taken[picked.start :]]
    value = value_on_span(platform.ops, _rows_of_value(call, picked, len(taken), own), taken)
    # The local index has a one-dimensional tensor for every integer, so its dimension of positions may be elsewhere
    # than that of the global index, for which the value was made.
    source, target, ndim = picked.start, _start(places), len(taken)
    if source != target and hasattr(value, "shape"):
        value = platform.ops.reshape(value, (1,) * (ndim - len(value.shape)) + tuple(value.shape))
        order = [dim for dim in range(ndim) if dim != source]
        value = platform.ops.permute(value, (*order[:target], source, *order[target:]))
    call.on(x, index=tuple(index), value=value)
    return x


def _rows(call: LocalCall, place: int, items: Sequence[Item], dim: int, shape: tuple[int, ...]) -> Array:
    """Return the flattened positions in dimension `dim` of item number `place`, on the host, broadcast to `shape`."""
    if isinstance(items[place], int):
        found = numpy.asarray(items[place])
    else:
        index = call.arguments["index"]
        tensors = [item for item in (index if isinstance(index, tuple) else (index,)) if hasattr(item, "shape")]
        local = tensors[sum(isinstance(item, TensorSpec) for item in items[:place])]
        found = call.platform.to_numpy(call.platform.unwrap(local) if isinstance(local, DTensor) else local)
    return numpy.broadcast_to(counted_from_front(call.name, found, dim, call.sizes[f"d{dim}"]), shape).ravel()


def counted_from_front(what: str, found: Array, dim: int, size: int) -> Array:
    """Return positions with negative ones counted from the front. Invalid ones raise an IndexOutOfRangeError."""
    found = found.astype(numpy.int64)  # int8 and uint8 cannot hold the sum with `size`
    outside = found[(found < -size) | (found >= size)]
    if outside.size:
        raise IndexOutOfRangeError(
            f"{what}: index {outside.flat[0]} is out of bounds for dimension {dim} with size {size}"
        )
    return numpy.where(found < 0, found + size, found)


def _rows_of_value(call: LocalCall, picked: Picked, ndim: int, own: Array) -> Any:
    """Return the rows of the assigned value at the positions `own`, as one of the result's `ndim` dimensions."""
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


def with_positions(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of `getitem` or `setitem` with lists and arrays, also masks, as DTensors of positions."""
    x, index, *rest = args
    if not isinstance(x, DTensor):  # refused later, with any index
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
    """Return a list, range, array or NumPy scalar as an array of integers or booleans; None for other items."""
    platform = x.spec.mesh.platform
    if not isinstance(item, (list, range, Array, numpy.generic)) or _holds_tensor(platform, item):
        return None
    try:
        # NumPy's default for an empty list is float64.
        empty = isinstance(item, (list, range)) and not len(item)
        array = numpy.asarray(item, numpy.int64) if empty else numpy.asarray(item)
    except ValueError:  # lists of different lengths
        return None
    if isinstance(item, Array) and array.dtype == numpy.uint8:
        if not platform.masks_of_bytes:
            raise ShardingRuleError(
                f"an array of uint8 as the index of a DTensor {x.spec!r}: NumPy takes it for positions, torch for a "
                "mask. Write index.astype(bool) or index.astype(numpy.int64)."
            )
        array = array.astype(bool)
    if array.dtype.kind not in "iub" or (array.dtype.kind == "b" and not array.ndim):
        if isinstance(item, (list, range)):
            return None
        kind = "a single boolean" if array.dtype.kind == "b" else f"an array of {array.dtype}"
        raise ShardingRuleError(
            f"{kind} as the index of a DTensor {x.spec!r}: expected integers, or a mask of at least one dimension"
        )
    return array


def _holds_tensor(platform: Platform, item: Any) -> bool:
    if isinstance(item, list):
        return any(_holds_tensor(platform, each) for each in item)
    return isinstance(item, (DTensor, platform.Tensor))


def _resolved(x: DTensor, items: Sequence[Any], known: Sequence[Array | None]) -> list[Any]:
    """Return the index with each array replaced by an integer or by replicated DTensors of positions."""
    taken = [_dims_of_item(item, array) for item, array in zip(items, known, strict=True)]
    if sum(taken) > len(x.spec.shape):
        raise IndexOutOfRangeError(f"{sum(taken)} indices for a {len(x.spec.shape)}-dimensional tensor {x.spec!r}")
    # `dim` is the dimension that an item indexes: a mask takes several, `...` all that no other item takes.
    index: list[Any] = []
    dim = 0
    for item, array, count in zip(items, known, taken, strict=True):
        if item is Ellipsis:
            count = len(x.spec.shape) - sum(taken)
        if array is None:
            index.append(item)
        elif array.dtype.kind == "b":
            full = x.spec.shape[dim : dim + array.ndim]
            if array.shape != full:
                raise IndexOutOfRangeError(
                    f"a mask of shape {list(array.shape)} does not fit {x.spec!r} from dimension {dim} on: expected "
                    f"{list(full)}"
                )
            index += [_replicated(x, places) for places in numpy.nonzero(array)]
        elif not array.ndim:
            index.append(operator.index(array[()]))
        else:
            index.append(_replicated(x, counted_from_front(repr(x.spec), array, dim, x.spec.shape[dim])))
        dim += count
    return index


def _dims_of_item(item: Any, array: Array | None) -> int:
    """Return the number of dimensions that an item indexes."""
    if array is not None and array.dtype.kind == "b":
        return array.ndim
    if isinstance(item, DTensor) and item.spec.mesh.platform.dtype_name(item.spec.dtype) in ("bool", "uint8"):
        return len(item.spec.shape)
    return 0 if item is None or item is Ellipsis else 1


def _replicated(x: DTensor, positions: Array) -> Any:
    mesh = x.spec.mesh
    platform = mesh.platform
    local = platform.from_numpy(positions.astype(numpy.int64))
    return platform.wrap(local, TensorSpec(mesh, (Replicate(),) * mesh.ndim, positions.shape, local.dtype))
