"""Rules of integers and slices as indices, `narrow` and `select`, along sharded dimensions. None of them communicates.

The result of a slice is ragged: each rank keeps a view of its own rows inside the slice. The result of an integer index
is partial: the owner returns the row, the other ranks return zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.exceptions import IndexOutOfRangeError
from hp_dtensor.rules.factors import (
    Dim,
    Dims,
    Factorization,
    LocalCall,
    LocalWork,
    ShardingLimits,
    Span,
    linear_rule,
    positions_in_span,
)
from hp_dtensor.rules.registry import OpCall, RuleRegistry, dim_factors

Item = Any
Tensor = Any


def register(registry: RuleRegistry) -> None:
    registry.register("narrow", "input dim start length", _narrow, view=True, variants="_copy")
    registry.register("select", "input dim index", _select, view=True)


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
    """Return `rule` with partial results over `factors`, of which one position is picked, except for booleans."""
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


def basic(
    call: OpCall, items: Sequence[Item], dims: Dims, sizes: Mapping[str, int]
) -> tuple[tuple[Dim, ...], dict[str, range], list[str]]:
    """Parse an index: return its output dimensions, sliced factor -> positions, and the factors of single positions.

    Args:
        items: one item per dimension, and `None`s. The output dimension of a tensor item is `("tensor",)`.
    """
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
