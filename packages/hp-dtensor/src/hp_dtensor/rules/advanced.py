"""Indexing: basic, by tensors of positions, by masks, and assignment to what an index picks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hp_dtensor.rules.factors import Dim, Dims, Factorization
from hp_dtensor.rules.registry import OpCall, RuleRegistry, broadcast_shape, names_for
from hp_dtensor.spec import TensorSpec

if TYPE_CHECKING:
    from hp_dtensor.dispatch import LocalCall

LINEAR = (frozenset({0}),)
Item = Any
DATA_DEPENDENT = (
    "the shape of its result depends on data of all ranks; make it whole first: redistribute to Replicate()"
)


def register(registry: RuleRegistry) -> None:
    registry.register("getitem", "input index", _getitem, view=True, data_dependent=True)
    registry.register("setitem", "input index value", _setitem, in_place=True)


def _items(call: OpCall, ndim: int) -> list[Item]:
    """One item per dimension (a mask: for several), and the `None`s: integers, slices, specs of index tensors."""
    index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
    if any(not _is_item(item) for item in index):
        raise call.refuse(
            "only integers, slices, None, ... and DTensors of positions or truth values index a DTensor; for a list, "
            "distribute it first, or use index_select or gather"
        )
    used = sum(_dims_taken(call, item) for item in index)
    if used > ndim:
        raise call.refuse(f"{used} indices for a {ndim}-dimensional tensor")
    rest = [slice(None)] * (ndim - used)
    where = next((i for i, item in enumerate(index) if item is Ellipsis), None)
    return [*index, *rest] if where is None else [*index[:where], *rest, *index[where + 1 :]]


def _is_item(item: Item) -> bool:
    return item is None or item is Ellipsis or type(item) in (int, slice) or isinstance(item, TensorSpec)


def _dims_taken(call: OpCall, item: Item) -> int:
    return 0 if item is None or item is Ellipsis else item.ndim if _is_mask(call, item) else 1


def _is_mask(call: OpCall, item: Item) -> bool:
    return isinstance(item, TensorSpec) and item.mesh.platform.dtype_name(item.dtype) in ("bool", "uint8")


def _getitem(call: OpCall) -> Factorization:
    shape = call.tensors[0].shape
    items = _items(call, len(shape))
    if any(_is_mask(call, item) for item in items):
        raise call.refuse(DATA_DEPENDENT)
    if any(isinstance(item, TensorSpec) for item in items):
        return _by_positions(call, items)
    dims, sizes = names_for("d", shape)
    output, fixed = _basic(items, dims, shape, sizes)
    return Factorization((dims,), (tuple(output),), sizes, fixed=frozenset(fixed), terms=LINEAR)


def _basic(items: list[Item], dims: Dims, shape: tuple[int, ...], sizes: dict[str, int]) -> tuple[list[Dim], set[str]]:
    """Dimensions of the result, of which those of index tensors are `("tensor",)`, and the factors to be whole."""
    output: list[Dim] = []
    fixed = set()
    position = 0
    for item in items:
        if item is None:
            output.append(())
            continue
        if item == slice(None):
            output.append(dims[position])
        elif isinstance(item, slice):
            sizes[f"o{position}"] = len(range(*item.indices(shape[position])))
            fixed |= {f"d{position}", f"o{position}"}
            output.append((f"o{position}",))
        else:
            fixed.add(f"d{position}")
            if isinstance(item, TensorSpec):
                output.append(("tensor",))
        position += 1
    return output, fixed


def _by_positions(call: OpCall, items: list[Item]) -> Factorization:
    """The picked dimensions are whole, those of the index tensors, broadcast together, parallel."""
    tensors = [item for item in items if isinstance(item, TensorSpec)]
    places = [i for i, item in enumerate(items) if isinstance(item, (int, TensorSpec))]
    try:
        picked = broadcast_shape([tensor.shape for tensor in tensors])
    except ValueError as error:
        raise call.refuse(str(error)) from None
    shape = call.tensors[0].shape
    dims, sizes = names_for("d", shape)
    output, fixed = _basic(items, dims, shape, sizes)
    names = tuple((f"x{i}",) for i in range(len(picked)))
    sizes |= {f"x{i}": size for i, size in enumerate(picked)}
    rest = [dim for dim in output if dim != ("tensor",)]
    together = places == list(range(places[0], places[-1] + 1))  # apart their dimensions come first
    start = sum(item is None or isinstance(item, slice) for item in items[: places[0]]) if together else 0
    result = (*rest[:start], *names, *rest[start:])
    indices = tuple(
        tuple(
            (f"x{len(picked) - tensor.ndim + i}",) if size == picked[len(picked) - tensor.ndim + i] else ()
            for i, size in enumerate(tensor.shape)
        )
        for tensor in tensors
    )
    return Factorization((dims, *indices), (result,), sizes, fixed=frozenset(fixed), terms=LINEAR)


# Assignment --------------------------------------------------------------------------------------------------


def _setitem(call: OpCall) -> Factorization:
    """Each rank writes what it holds of the picked part; the value is whole along dimensions that are picked from."""
    target = call.tensors[0]
    items = _items(call, target.ndim)
    dims, sizes = names_for("d", target.shape)
    value = call["value"] if isinstance(call["value"], TensorSpec) else None
    masks = [item for item in items if isinstance(item, TensorSpec)]
    if masks:
        return _where_true(call, items, value)
    picked, _ = _basic(items, dims, target.shape, sizes)
    kept = [dim for dim in picked if dim and dim[0].startswith("d")]
    inputs: tuple[Dims, ...] = (dims,)
    fixed = {dim[0] for dim in picked if dim and not dim[0].startswith("d")}
    if value is not None:
        shape = tuple(math.prod(sizes[f] for f in dim) for dim in picked)
        inputs = (dims, _aligned(call, value.shape, shape, tuple(picked)))
    written = [name for (name,) in dims if (name,) not in kept]
    return Factorization(inputs, (dims,), sizes, fixed=frozenset(fixed), local=dict.fromkeys(written, _assign_own_part))


def _aligned(call: OpCall, shape: tuple[int, ...], whole: tuple[int, ...], names: Dims) -> Dims:
    extra = len(whole) - len(shape)
    if extra < 0 or any(n not in (1, whole[extra + i]) for i, n in enumerate(shape)):
        raise call.refuse(f"a value {list(shape)} does not fit the part {list(whole)} that is written")
    return tuple(names[extra + i] if n == whole[extra + i] else () for i, n in enumerate(shape))


def _where_true(call: OpCall, items: list[Item], value: TensorSpec | None) -> Factorization:
    """`x[mask] = number`, a mask over the leading dimensions."""
    mask, target = items[0], call.tensors[0]
    if not _is_mask(call, mask) or value is not None or mask.shape != target.shape[: mask.ndim]:
        raise call.refuse(
            "by DTensors it takes one mask over the leading dimensions and a number; use where, masked_scatter or "
            "index_put with whole dimensions"
        )
    dims, sizes = names_for("d", target.shape)
    return Factorization((dims, dims[: mask.ndim]), (dims,), sizes)


def _assign_own_part(call: LocalCall) -> Any:
    """Write the intersection of the picked part and this rank's."""
    arguments = call.arguments
    x, value = arguments["input"], arguments["value"]
    given = arguments["index"] if isinstance(arguments["index"], tuple) else (arguments["index"],)
    own = _own_index(call, _expanded(given, len(x.shape)))
    if own is not None:
        index, taken = own
        call.on(x, index=tuple(index), value=_part_of_value(call.platform.ops, value, taken))
    return x


def _own_index(call: LocalCall, items: list[Item]) -> tuple[list[Item], list[tuple[int, int] | None]] | None:
    """The index within this rank's part, and what to take of the value along each dimension; None: nothing."""
    index: list[Item] = []
    taken: list[tuple[int, int] | None] = []
    position = 0
    for item in items:
        if item is None:
            index.append(None)
            taken.append(None)
            continue
        size = call.sizes[f"d{position}"]
        start, length = call.spans.get(f"d{position}", (0, size))
        position += 1
        if isinstance(item, slice):
            own, part = _own_slice(item, size, start, length)
            index.append(own)
            taken.append(None if item == slice(None) else part)
        elif 0 <= item % size - start < length:
            index.append(item % size - start)
        else:
            return None
    return index, taken


def _part_of_value(ops: Any, value: Any, taken: list[tuple[int, int] | None]) -> Any:
    if not hasattr(value, "shape") or not len(value.shape):
        return value
    for dim, part in enumerate(taken[len(taken) - len(value.shape) :]):
        if part is not None and value.shape[dim] != 1:
            value = ops.narrow(value, dim, *part)
    return value


def _expanded(index: tuple[Item, ...], ndim: int) -> list[Item]:
    used = sum(item is not None and item is not Ellipsis for item in index)
    rest = [slice(None)] * (ndim - used)
    where = next((i for i, item in enumerate(index) if item is Ellipsis), None)
    return [*index, *rest] if where is None else [*index[:where], *rest, *index[where + 1 :]]


def _own_slice(item: slice, size: int, start: int, length: int) -> tuple[slice, tuple[int, int]]:
    """A slice of a dimension within a part of it, and (start, length) of what it is of the slice."""
    first, stop, step = item.indices(size)
    count = len(range(first, stop, step))
    low = min(count, max(0, -(-(start - first) // step)))
    high = max(low, min(count, -(-(start + length - first) // step)))
    begin = first + low * step - start
    return slice(begin, begin + (high - low) * step if high > low else begin, step), (low, high - low)
