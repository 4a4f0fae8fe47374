"""Indexing: basic, by tensors of positions, by masks, and assignment to what an index picks."""

from __future__ import annotations

import functools
import math
from typing import Any

from hp_dtensor.exceptions import IndexOutOfRangeError
from hp_dtensor.rules.engine.factors import LINEAR, Cuts, Dim, Dims, Factorization, LocalWork, uncut
from hp_dtensor.rules.engine.local_call import LocalCall
from hp_dtensor.rules.engine.registry import DATA_DEPENDENT, OpCall, RuleRegistry, names_for
from hp_dtensor.rules.indexing import index_tensors, slices
from hp_dtensor.spec.tensor_spec import TensorSpec

Item = Any


def register(registry: RuleRegistry) -> None:
    registry.register("getitem", "input index", _getitem, view=True, data_dependent=True)
    registry.register("setitem", "input index value", _setitem, in_place=True)


def _items(call: OpCall, ndim: int) -> list[Item]:
    """One item per dimension (a mask: for several), and the `None`s: integers, slices, specs of index tensors."""
    index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
    if any(not _is_item(item) for item in index):
        raise call.refuse(
            "only integers, slices, None, ..., lists, arrays and DTensors of positions or truth values index a DTensor"
        )
    if any(isinstance(item, TensorSpec) and _is_unclear(item) for item in index):
        raise call.refuse("uint8 in an index may be positions or truth values: convert it to int64 or bool")
    used = sum(_dims_taken(call, item) for item in index)
    if used > ndim:
        raise IndexOutOfRangeError(f"{call.name}: {used} indices for a {ndim}-dimensional tensor {call.tensors[0]!r}")
    rest = [slice(None)] * (ndim - used)
    where = next((i for i, item in enumerate(index) if item is Ellipsis), None)
    return [*index, *rest] if where is None else [*index[:where], *rest, *index[where + 1 :]]


def _is_unclear(item: TensorSpec) -> bool:
    platform = item.mesh.platform
    return not platform.masks_of_bytes and platform.dtype_name(item.dtype) == "uint8"


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
    output, kept, picked = slices.basic(call, items, dims, sizes)
    rule = Factorization(
        (dims,),
        (output,),
        sizes,
        cuts=Cuts(kept=kept),
        partial=LINEAR,
        work=LocalWork(localize=slices.localize_index(items, sizes, kept)),
    )
    return slices.from_owners(call, rule, picked, functools.partial(slices.picked_by_owners, items))


def _by_positions(call: OpCall, items: list[Item]) -> Factorization:
    """The picked dimensions are whole, those of the index tensors, broadcast together, parallel."""
    dims, sizes = names_for("d", call.tensors[0].shape)
    picked, result, fixed = _picked(call, items, dims, sizes)
    return Factorization((dims, *picked.indices), (result,), sizes, cuts=uncut(fixed), partial=LINEAR)


def _picked(
    call: OpCall, items: list[Item], dims: Dims, sizes: dict[str, int]
) -> tuple[index_tensors.Picked, Dims, set[str]]:
    """Return the dimensions that tensors of positions pick, those of the result, and the factors picked from."""
    picked = index_tensors.picked(call, items)
    output, fixed = _sliced_to_new_factors(call, items, dims, sizes)
    sizes |= picked.sizes
    return picked, picked.inserted([dim for dim in output if dim != ("tensor",)]), fixed


# Assignment --------------------------------------------------------------------------------------------------


def _setitem(call: OpCall) -> Factorization:
    """Each rank writes what it holds of the picked part; the value is whole along dimensions that are picked from."""
    target = call.tensors[0]
    items = _items(call, target.ndim)
    dims, sizes = names_for("d", target.shape)
    value = call["value"] if isinstance(call["value"], TensorSpec) else None
    if any(_is_mask(call, item) for item in items):
        return _where_true(call, items, value)
    if any(isinstance(item, TensorSpec) for item in items):
        return _setitem_by_positions(call, items, value)
    picked, fixed = _sliced_to_new_factors(call, items, dims, sizes)
    kept = [dim for dim in picked if dim and dim[0].startswith("d")]
    inputs: tuple[Dims, ...] = (dims,)
    if value is not None:
        shape = tuple(math.prod(sizes[f] for f in dim) for dim in picked)
        inputs = (dims, _aligned(call, value.shape, shape, tuple(picked)))
    written = [name for (name,) in dims if (name,) not in kept]
    fixed -= {name for (name,) in dims}
    return Factorization(
        inputs, (dims,), sizes, cuts=uncut(fixed), work=LocalWork(by_factor=dict.fromkeys(written, _assign_own_part))
    )


def _setitem_by_positions(call: OpCall, items: list[Item], value: TensorSpec | None) -> Factorization:
    """The index tensors are whole; each rank writes the rows that it has."""
    dims, sizes = names_for("d", call.tensors[0].shape)
    picked, result, fixed = _picked(call, items, dims, sizes)
    inputs: tuple[Dims, ...] = (dims, *picked.indices)
    if value is not None:
        shape = tuple(math.prod(sizes[f] for f in dim) for dim in result)
        inputs = (*inputs, _aligned(call, value.shape, shape, result))
    written = [name for (name,) in dims if (name,) not in result]
    fixed = (fixed | picked.sizes.keys()) - {name for (name,) in dims}
    local = functools.partial(index_tensors.assign_own, items, picked)
    return Factorization(
        inputs, (dims,), sizes, cuts=uncut(fixed), work=LocalWork(by_factor=dict.fromkeys(written, local))
    )


def _sliced_to_new_factors(
    call: OpCall, items: list[Item], dims: Dims, sizes: dict[str, int]
) -> tuple[list[Dim], set[str]]:
    """The dimensions of what is picked, those that are sliced by factors of their own, and all factors that are
    sliced or picked from, or come of it."""
    output, kept, picked = slices.basic(call, items, dims, sizes)
    names = {factor: f"o{factor}" for factor in kept}
    sizes |= {names[factor]: len(positions) for factor, positions in kept.items()}
    renamed: list[Dim] = [tuple(names.get(factor, factor) for factor in dim) for dim in output]
    return renamed, {*kept, *names.values(), *picked}


def _aligned(call: OpCall, shape: tuple[int, ...], whole: tuple[int, ...], names: Dims) -> Dims:
    extra = len(whole) - len(shape)
    if extra < 0 or any(n not in (1, whole[extra + i]) for i, n in enumerate(shape)):
        raise call.refuse(f"a value {list(shape)} does not fit the part {list(whole)} that is written")
    return tuple(names[extra + i] if n == whole[extra + i] else () for i, n in enumerate(shape))


def _where_true(call: OpCall, items: list[Item], value: TensorSpec | None) -> Factorization:
    """`x[mask] = number`, a mask over the leading dimensions."""
    mask, target = items[0], call.tensors[0]
    if (
        not _is_mask(call, mask)
        or len(call.tensors) > 2
        or value is not None
        or mask.shape != target.shape[: mask.ndim]
    ):
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
    index, taken = slices.own_index(_expanded(given, len(x.shape)), call.sizes, call.spans)
    ops = call.platform.ops
    if slices.ELSEWHERE in index:
        call.on(x, index=(slice(0, 0),), value=_none_of_value(ops, value))
    else:
        call.on(x, index=tuple(index), value=slices.part_of_value(ops, value, taken))
    return x


def _none_of_value(ops: Any, value: Any) -> Any:
    """A scalar in the graph of the value, whose gradient all ranks sum up together, writers or not."""
    if not hasattr(value, "shape") or not len(value.shape):
        return value
    return ops.sum(ops.narrow(value, 0, 0, 0))


def _expanded(index: tuple[Item, ...], ndim: int) -> list[Item]:
    used = sum(item is not None and item is not Ellipsis for item in index)
    rest = [slice(None)] * (ndim - used)
    where = next((i for i, item in enumerate(index) if item is Ellipsis), None)
    return [*index, *rest] if where is None else [*index[:where], *rest, *index[where + 1 :]]
