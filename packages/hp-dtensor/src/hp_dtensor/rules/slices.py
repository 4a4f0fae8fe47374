"""Rules of integers and slices as indices, `narrow` and `select`, along sharded dimensions. None of them communicates.

The result of a slice is ragged: each rank keeps a view of its own rows inside the slice. The result of an integer index
is partial: the owner returns the row, the other ranks return zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.exceptions import IndexOutOfRangeError
from hp_dtensor.rules.factors import (
    LINEAR,
    Dim,
    Dims,
    Factorization,
    LocalCall,
    LocalWork,
    ShardingLimits,
    Span,
    positions_in_span,
)
from hp_dtensor.rules.registry import OpCall, RuleRegistry, dim_factors

Item = Any
Tensor = Any


def register(registry: RuleRegistry) -> None:
    registry.register("narrow", "input dim start length", _narrow, view=True)
    registry.register("narrow_copy", "input dim start length", _narrow)
    registry.register("select", "input dim index", _select, view=True)


def out_of_range(call: OpCall, index: int, dim: int) -> IndexOutOfRangeError:
    """The error of a position that the dimension does not have."""
    (spec, *_) = call.tensors
    return IndexOutOfRangeError(
        f"{call.name}: index {index} is out of bounds for dimension {dim} with size {spec.shape[dim]} of {spec!r}"
    )


def check_position(call: OpCall, index: int, dim: int) -> None:
    size = call.tensors[0].shape[dim]
    if not -size <= index < size:
        raise out_of_range(call, index, dim)


# One dimension --------------------------------------------------------------------------------------------------


def _narrow(call: OpCall) -> Factorization:
    shape, dim = call.tensors[0].shape, call.dim(call["dim"])
    start, length = call["start"], call["length"]
    if not isinstance(start, int) or not isinstance(length, int):
        raise call.needs_replicated("its rule takes integers as start and length")
    first = start + shape[dim] if start < 0 else start
    if not (0 <= first <= shape[dim] and 0 <= length <= shape[dim] - first):
        raise IndexOutOfRangeError(
            f"narrow: start {start} and length {length} are out of bounds for dimension {dim} with size {shape[dim]} "
            f"of {call.tensors[0]!r}"
        )
    dims, sizes = dim_factors("d", shape)
    kept = range(first, first + length)

    def localize(shapes: Sequence[tuple[int, ...]], spans: Mapping[str, Span]) -> Mapping[str, Any]:
        if f"d{dim}" not in spans:
            return {}
        rows, count = _own_rows(kept, spans[f"d{dim}"])
        return {"start": rows.start, "length": count}

    return Factorization(
        (dims,),
        (dims,),
        sizes,
        limits=ShardingLimits(picked={f"d{dim}": kept}),
        partial=LINEAR,
        work=LocalWork(localize=localize),
    )


def _select(call: OpCall) -> Factorization:
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    dim, index = call.dim(call["dim"]), call["index"]
    if not isinstance(index, int):
        raise call.refuse("its index must be an integer; use index_select for positions in a tensor")
    check_position(call, index, dim)
    rule = Factorization((dims,), ((*dims[:dim], *dims[dim + 1 :]),), sizes, partial=LINEAR)
    return from_owners(call, rule, [f"d{dim}"], functools.partial(_selected_by_owner, dim, index % sizes[f"d{dim}"]))


def from_owners(
    call: OpCall, rule: Factorization, factors: Sequence[str], local: Callable[[LocalCall], Any]
) -> Factorization:
    """The rule with `factors`, of which outputs have one position, cut: partial results. Truth values have no sum."""
    if call.tensors[0].mesh.platform.dtype_name(call.tensors[0].dtype) == "bool":
        return replace(rule, limits=replace(rule.limits, fixed=rule.limits.fixed | {*factors}))
    return replace(
        rule,
        partial=replace(rule.partial, reduced=dict.fromkeys(factors, "sum")),
        work=replace(rule.work, by_factor=dict.fromkeys(factors, local)),
    )


def _selected_by_owner(dim: int, index: int, call: LocalCall) -> Tensor:
    ops, x = call.platform.ops, call.arguments["input"]
    start, length = call.spans[f"d{dim}"]
    if start <= index < start + length:
        return call.on(x, index=index - start)
    return _nothing_of(ops, ops.narrow(x, dim, 0, 0), dim)


def _nothing_of(ops: Any, x: Tensor, dim: int) -> Tensor:
    """Zeros for an empty dimension, in the graph of `x`."""
    return ops.cast(ops.sum(x, dim), x.dtype)


# An index of integers, slices and None --------------------------------------------------------------------------


def basic(
    call: OpCall, items: Sequence[Item], dims: Dims, sizes: Mapping[str, int]
) -> tuple[tuple[Dim, ...], dict[str, range], list[str]]:
    """The dimensions of what an index of one item per dimension picks (a tensor's one is `("tensor",)`), the kept
    positions of those that are sliced, and the factors of which one position is picked."""
    output: list[Dim] = []
    kept: dict[str, range] = {}
    picked: list[str] = []
    taken = [item for item in items if item is not None]
    position = 0
    for item in items:
        if item is None:
            output.append(())
            continue
        (factor,) = dims[position]
        if isinstance(item, slice):
            output.append((factor,))
            if item != slice(None):
                kept[factor] = kept_by(call, item, sizes[factor])
        elif isinstance(item, int):
            check_position(call, item, position)
            picked.append(factor)
        else:
            picked.append(factor)
            output.append(("tensor",))
        position += 1
    assert len(taken) == position
    return tuple(output), kept, picked


def kept_by(call: OpCall, item: slice, size: int) -> range:
    """The positions of a dimension that a slice keeps."""
    if item.step is not None and item.step <= 0:
        raise call.refuse(f"a slice needs a step greater than zero, got {item.step}")
    return range(*item.indices(size))


def localize_index(
    items: Sequence[Item], sizes: Mapping[str, int], kept: Mapping[str, range]
) -> Callable[[Sequence[tuple[int, ...]], Mapping[str, Span]], Mapping[str, Any]]:
    """The index of each rank's own part, where a dimension that it slices is cut."""

    def localize(shapes: Sequence[tuple[int, ...]], spans: Mapping[str, Span]) -> Mapping[str, Any]:
        return {"index": tuple(own_index(items, sizes, spans)[0])} if kept.keys() & spans.keys() else {}

    return localize


def picked_by_owners(items: Sequence[Item], call: LocalCall) -> Tensor:
    """Return this rank's share of the picked part: zeros for a position that another rank has."""
    index, _ = own_index(items, call.sizes, call.spans)
    result = call.on(call.arguments["input"], index=tuple(slice(0, 0) if item is ELSEWHERE else item for item in index))
    dims = [item for item in index if not isinstance(item, int)]
    for dim in reversed([i for i, item in enumerate(dims) if item is ELSEWHERE]):
        result = _nothing_of(call.platform.ops, result, dim)
    return result


ELSEWHERE = object()
"""In place of a position that another rank has."""


def own_index(
    items: Sequence[Item], sizes: Mapping[str, int], spans: Mapping[str, Span]
) -> tuple[list[Item], list[Span | None]]:
    """An index within this rank's part, and along each dimension of what the whole index picks, which (start, length)
    of it that is; None: all of it."""
    index: list[Item] = []
    taken: list[Span | None] = []
    position = 0
    for item in items:
        if item is None:
            index.append(None)
            taken.append(None)
            continue
        size = sizes[f"d{position}"]
        start, length = part = spans.get(f"d{position}", (0, size))
        position += 1
        if isinstance(item, slice):
            kept = range(*item.indices(size))
            rows, _ = _own_rows(kept, part)
            index.append(rows)
            taken.append(None if item == slice(None) else positions_in_span(kept, part))
        else:
            index.append(item % size - start if 0 <= item % size - start < length else ELSEWHERE)
    return index, taken


def _own_rows(kept: range, part: Span) -> tuple[slice, int]:
    """Return the rows of a part that are kept, as a slice of the part, and their number."""
    low, count = positions_in_span(kept, part)
    start = kept.start + low * kept.step - part[0] if count else 0
    return slice(start, start + count * kept.step, kept.step), count


def value_on_span(ops: Any, value: Any, taken: Sequence[Span | None]) -> Any:
    """Return the share of an assigned value that belongs to this rank's part, as `own_index` says."""
    if not hasattr(value, "shape") or not len(value.shape):
        return value
    for dim, part in enumerate(taken[len(taken) - len(value.shape) :]):
        if part is not None and value.shape[dim] != 1:
            value = ops.narrow(value, dim, *part)
    return value
