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
    """Return the error of an index outside a dimension."""
    (spec, *_) = call.tensors
    return IndexOutOfRangeError(
        f"{call.name}: index {index} is out of bounds for dimension {dim} with size {spec.shape[dim]} of {spec!r}"
    )


def check_position(call: OpCall, index: int, dim: int) -> None:
    size = call.tensors[0].shape[dim]
    if not -size <= index < size:
        raise out_of_range(call, index, dim)


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

    return Factorization(
        (dims,),
        (dims,),
        sizes,
        limits=ShardingLimits(picked={f"d{dim}": sliced}),
        partial=LINEAR,
        work=LocalWork(localize=localize),
    )


def _select(call: OpCall) -> Factorization:
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    dim, index = call.dim(call["dim"]), call["index"]
    if not isinstance(index, int):
        raise call.refuse("expected an integer index; use index_select for a tensor of positions")
    check_position(call, index, dim)
    rule = Factorization((dims,), ((*dims[:dim], *dims[dim + 1 :]),), sizes, partial=LINEAR)
    return partial_from_owners(
        call, rule, [f"d{dim}"], functools.partial(_select_from_owner, dim, index % sizes[f"d{dim}"])
    )


def partial_from_owners(
    call: OpCall, rule: Factorization, factors: Sequence[str], local: Callable[[LocalCall], Any]
) -> Factorization:
    """Return `rule` with partial results over `factors`, of which one position is picked, except for booleans."""
    if call.tensors[0].mesh.platform.dtype_name(call.tensors[0].dtype) == "bool":
        return replace(rule, limits=replace(rule.limits, fixed=rule.limits.fixed | {*factors}))
    return replace(
        rule,
        partial=replace(rule.partial, reduced=dict.fromkeys(factors, "sum")),
        work=replace(rule.work, by_factor=dict.fromkeys(factors, local)),
    )


def _select_from_owner(dim: int, index: int, call: LocalCall) -> Tensor:
    ops, x = call.platform.ops, call.arguments["input"]
    start, length = call.spans[f"d{dim}"]
    if start <= index < start + length:
        return call.on(x, index=index - start)
    return _zeros_from(ops, ops.narrow(x, dim, 0, 0), dim)


def _zeros_from(ops: Any, x: Tensor, dim: int) -> Tensor:
    """Return zeros without dimension `dim`, in which `x` is empty. They depend on `x`, for autograd."""
    return ops.cast(ops.sum(x, dim), x.dtype)


def basic(
    call: OpCall, items: Sequence[Item], dims: Dims, sizes: Mapping[str, int]
) -> tuple[tuple[Dim, ...], dict[str, range], list[str]]:
    """Return the output dimensions of an index, the positions of sliced factors, and the factors of single positions.

    Args:
        items: one item per dimension, and `None`s. The output dimension of a tensor item is `("tensor",)`.
    """
    output: list[Dim] = []
    sliced: dict[str, range] = {}
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
                sliced[factor] = sliced_positions(call, item, sizes[factor])
        elif isinstance(item, int):
            check_position(call, item, position)
            picked.append(factor)
        else:
            picked.append(factor)
            output.append(("tensor",))
        position += 1
    assert len(taken) == position
    return tuple(output), sliced, picked


def sliced_positions(call: OpCall, item: slice, size: int) -> range:
    """Return the positions of a dimension that a slice contains."""
    if item.step is not None and item.step <= 0:
        raise call.refuse(f"a slice needs a step greater than zero, got {item.step}")
    return range(*item.indices(size))


def localize_index(
    items: Sequence[Item], sizes: Mapping[str, int], sliced: Mapping[str, range]
) -> Callable[[Sequence[tuple[int, ...]], Mapping[str, Span]], Mapping[str, Any]]:
    """Return the `localize` function of an index, which changes the slices of sharded dimensions."""

    def localize(shapes: Sequence[tuple[int, ...]], spans: Mapping[str, Span]) -> Mapping[str, Any]:
        return {"index": tuple(local_index(items, sizes, spans)[0])} if sliced.keys() & spans.keys() else {}

    return localize


def pick_from_owners(items: Sequence[Item], call: LocalCall) -> Tensor:
    """Return the indexed elements of this rank's shard, with zeros for positions that another rank owns."""
    index, _ = local_index(items, call.sizes, call.spans)
    result = call.on(call.arguments["input"], index=tuple(slice(0, 0) if item is ELSEWHERE else item for item in index))
    dims = [item for item in index if not isinstance(item, int)]
    for dim in reversed([i for i, item in enumerate(dims) if item is ELSEWHERE]):
        result = _zeros_from(call.platform.ops, result, dim)
    return result


ELSEWHERE = object()
"""Stands for a position that another rank owns."""


def local_index(
    items: Sequence[Item], sizes: Mapping[str, int], spans: Mapping[str, Span]
) -> tuple[list[Item], list[Span | None]]:
    """Return the index relative to this rank's shard, and the span of each output dimension that the shard contributes.

    A span of None is the full output dimension.
    """
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
    start = sliced.start + low * sliced.step - span[0] if count else 0
    return slice(start, start + count * sliced.step, sliced.step), count


def value_on_span(ops: Any, value: Any, taken: Sequence[Span | None]) -> Any:
    """Return the slice of an assigned value that belongs to this rank's shard; `taken` is that of `local_index`."""
    if not hasattr(value, "shape") or not len(value.shape):
        return value
    for dim, span in enumerate(taken[len(taken) - len(value.shape) :]):
        if span is not None and value.shape[dim] != 1:
            value = ops.narrow(value, dim, *span)
    return value
