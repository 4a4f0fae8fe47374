"""Reductions along cut dimensions: each rank reduces its part, then the small results are merged.

Every function here is called in place of the operation (`LocalWork.by_factor`) and leaves the whole result on
every rank. A rank whose part is empty takes part with nothing, so no value stands for "nothing".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hp_dtensor.comm import collectives
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.saved_tensors import Kept
from hp_dtensor.rules.engine.local_call import LocalCall

Tensor = Any
Local = Callable[[LocalCall], Any]


def lines(call: LocalCall, dims: Sequence[int]) -> Iterator[tuple[int, ProcessGroup, tuple[int, ...]]]:
    """(dimension, group, lengths of its ranks' parts) of every cut of these dimensions, innermost cuts first."""
    for dim in dims:
        groups, lengths = call.groups.get(f"d{dim}", ()), call.lengths.get(f"d{dim}", ())
        for group, line in reversed(list(zip(groups, lengths, strict=True))):
            yield dim, group, line


def groups_of(call: LocalCall, dims: Sequence[int]) -> list[ProcessGroup]:
    return [group for _, group, _ in lines(call, dims)]


def static_dims(dims: Sequence[int]) -> Any:
    """As an argument: one dimension as a number."""
    return dims[0] if len(dims) == 1 else tuple(dims)


def without(call: LocalCall, x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """`x`, of length 1 in `dims`, as the operation returns it."""
    if keepdim:
        return x
    return call.platform.ops.reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in dims))


def merged(gone: Sequence[int], keepdim: bool) -> Local:
    """The operation on the part, then on the results of parts; for one with f(f(a), f(b)) = f(a, b)."""

    def local(call: LocalCall) -> Tensor:
        x = call.arguments["input"]
        result = _of_part(call, x, gone)
        for dim, group, lengths in lines(call, gone):
            # Parts without an element send none, so that no neutral element has to be invented for them.
            result = collectives.all_gather(result, group, dim, [min(1, n) for n in lengths])
            if result.shape[dim] > 1 and 0 not in [result.shape[d] for d in gone]:
                result = call.on(result, dim=dim, keepdim=True)
            # Of another dimension nothing is there: the results are empty, and one of them is as good as all.
            elif result.shape[dim] > 1:
                result = call.platform.ops.narrow(result, dim, 0, 1)
        return without(call, result, gone, keepdim)

    return local


def _of_part(call: LocalCall, x: Tensor, gone: Sequence[int]) -> Tensor:
    """The operation with its dimensions kept, of length 0 where this rank has nothing."""
    if all(x.shape[dim] for dim in gone):
        for dim in gone:  # some take but one
            x = call.on(x, dim=dim, keepdim=True)
        return x
    ops, wanted = call.platform.ops, call.arguments.get("dtype")
    result = ops.sum(x if wanted is None else ops.cast(x, wanted), tuple(gone), True)
    for dim in gone:
        if not x.shape[dim]:
            result = ops.narrow(result, dim, 0, 0)
    return result


def truth(name: str, gone: Sequence[int], keepdim: bool) -> Local:
    """`any` and `all`, by counting."""

    def local(call: LocalCall) -> Tensor:
        platform, ops = call.platform, call.platform.ops
        x = call.arguments["input"]
        counted = (ops.ne if name == "any" else ops.eq)(ops.cast(x, platform.dtype("int64")), 0)
        if platform.is_floating(x.dtype):
            counted = (ops.ne if name == "any" else ops.eq)(x, 0.0)
        # Counted, since groups do not reduce truth values; sums of int64 are exact.
        count = ops.sum(ops.cast(counted, platform.dtype("int64")), tuple(gone), keepdim)
        for group in groups_of(call, gone):
            count = collectives.all_reduce_data(count, group)
        result = ops.gt(count, 0) if name == "any" else ops.eq(count, 0)
        return ops.cast(result, x.dtype) if platform.dtype_name(x.dtype) == "uint8" else result

    return local


# Extremes without positions ------------------------------------------------------------------------------


def extremes(which: Sequence[str], gone: Sequence[int], keepdim: bool) -> Local:
    """Maximum (`max`) or minimum (`min`), or both; the gradient goes in equal shares to all elements that tie."""

    def local(call: LocalCall) -> Any:
        found = tuple(_extreme(call, call.arguments["input"], op, gone, keepdim) for op in which)
        return found[0] if len(found) == 1 else found

    return local


def extreme_of_magnitudes(op: str, gone: Sequence[int], keepdim: bool) -> Local:
    """The norm of order inf (`max`) or -inf (`min`), with the gradient of `extremes`."""

    def local(call: LocalCall) -> Tensor:
        ops, x, wanted = call.platform.ops, call.arguments["input"], call.arguments["dtype"]
        x = x if wanted is None else ops.cast(x, call.platform.dtype_meant(wanted))
        return _extreme(call, ops.abs(x), op, gone, keepdim)

    return local


def _extreme(call: LocalCall, x: Tensor, op: str, gone: Sequence[int], keepdim: bool) -> Tensor:
    platform, ops = call.platform, call.platform.ops
    groups = groups_of(call, gone)
    kept: list[Kept] = []

    def forward(data: Tensor) -> Tensor:
        whole = extreme_of_part(call, data, op, gone)
        for group in groups:
            whole = collectives.all_reduce_data(whole, group, op)
        kept[:] = [Kept(platform, data, whole)]
        return without(call, whole, gone, keepdim)

    def backward(grad: Tensor) -> list[Tensor]:
        data, whole = kept[0].tensors
        # Ties over all ranks share the gradient, as `amax` of one device has it.
        winners = ops.cast(ops.eq(data, whole), grad.dtype)
        count = ops.sum(winners, tuple(gone), True)
        for group in groups:
            count = collectives.all_reduce_data(count, group)
        return [ops.mul(winners, ops.div(ops.reshape(grad, tuple(whole.shape)), count))]

    return platform.custom_function(forward, backward, x) if platform.requires_grad(x) else forward(x)


def extreme_of_part(call: LocalCall, x: Tensor, op: str, gone: Sequence[int]) -> Tensor:
    """amax or amin (dimensions kept) of data that may be empty: then the value that never wins."""
    platform, ops = call.platform, call.platform.ops
    if all(x.shape[i] for i in gone):
        return (ops.amax if op == "max" else ops.amin)(x, static_dims(gone), True)
    shape = tuple(1 if i in gone else n for i, n in enumerate(x.shape))
    if platform.is_floating(x.dtype):
        return ops.full(shape, float("-inf" if op == "max" else "inf"), x.dtype)
    limits = np.iinfo(platform.dtype_name(x.dtype))
    return ops.full(shape, int(limits.min if op == "max" else limits.max), x.dtype)


# Candidates: values and their positions --------------------------------------------------------------------


def candidates_are_fewer(call: Any, dim: int, count: int) -> bool:
    """Whether `count` values with their positions (int64) of each part are fewer bytes than the parts."""
    (spec,) = call.tensors
    axes = zip(spec.mesh.shape, spec.placements, strict=True)
    parts = math.prod(n for n, p in axes if p.is_shard() and getattr(p, "dim", None) == dim)
    itemsize = spec.mesh.platform.itemsize(spec.dtype)
    # From each part `count` values travel with their positions; the alternative is to gather the parts themselves.
    return bool(count * (itemsize + 8) <= itemsize * spec.shape[dim] / parts)


def best_of_parts(dim: int, keepdim: bool) -> Local:
    """`max` and `min` with positions: each part's best, then the best of these."""

    def local(call: LocalCall) -> Any:
        values, where = _candidates(call, dim, lambda x, count: call.on(x, dim=dim, keepdim=True), 1)
        return without(call, values, [dim], keepdim), without(call, where, [dim], keepdim)

    return local


def position_of_best(dim: int, keepdim: bool) -> Local:
    """`argmax` and `argmin`."""

    def local(call: LocalCall) -> Any:
        ops = call.platform.ops

        def best(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
            where = call.on(x, dim=dim, keepdim=True)
            return ops.gather(x, dim, where), where

        _, where = _candidates(call, dim, best, 1)
        return without(call, where, [dim], keepdim)

    return local


def first_k_of_parts(dim: int, k: int) -> Local:
    """`topk`: the k best of each part, then of these."""

    def local(call: LocalCall) -> Any:
        return _candidates(call, dim, lambda x, count: call.on(x, k=count, dim=dim), k)

    return local


def _candidates(
    call: LocalCall, dim: int, pick: Callable[[Tensor, int], tuple[Tensor, Tensor]], count: int
) -> tuple[Tensor, Tensor]:
    """`pick(x, n)` gives the best n values of `x` along `dim` with their positions; here of all parts together."""
    platform, ops, x = call.platform, call.platform.ops, call.arguments["input"]
    if not platform.is_floating(x.dtype):
        x = platform.detach(x)
    # Values are gathered in the graph, so their gradient goes back to the rank that had them; positions have none.
    values, where = x, None
    if x.shape[dim]:
        values, where = pick(x, min(count, x.shape[dim]))
    if where is None:
        where = ops.zeros(tuple(values.shape), platform.dtype("int64"))
    where = ops.add(ops.cast(where, platform.dtype("int64")), call.spans[f"d{dim}"][0])
    for _, group, lengths in lines(call, [dim]):
        found = [min(count, n) for n in lengths]
        values = collectives.all_gather(values, group, dim, found)
        where = collectives.gather_data(where, group, dim, found)
        if values.shape[dim]:
            values, chosen = pick(values, min(count, sum(lengths)))
            where = ops.gather(where, dim, ops.cast(chosen, platform.dtype("int64")))
    return values, where


# Spread -------------------------------------------------------------------------------------------------------


def spread(name: str, gone: Sequence[int], keepdim: bool, correction: float) -> Local:
    """Variance or standard deviation in two passes, the mean with it where the name has `mean`."""

    def local(call: LocalCall) -> Any:
        ops, x = call.platform.ops, call.arguments["input"]
        count = math.prod(call.sizes[f"d{dim}"] for dim in gone)
        groups = groups_of(call, gone)
        # Two passes: E[x^2] - E[x]^2 in one would cancel where the mean is large beside the spread. Two small
        # all-reduces for it.
        mean = ops.div(_sum_over(ops.sum(x, tuple(gone), True), groups), float(count))
        # R -> V: every rank subtracts the mean from its own part, so the mean's gradient is a sum over ranks.
        centered = ops.sub(x, collectives.vary(mean, groups) if groups else mean)
        squares = _sum_over(ops.sum(ops.mul(centered, centered), tuple(gone), True), groups)
        degrees = max(0.0, count - correction)
        result = ops.div(squares, degrees) if degrees else ops.mul(squares, math.nan)
        if name.startswith("std"):
            result = _root(ops, result)
        result = without(call, result, gone, keepdim)
        return (result, without(call, mean, gone, keepdim)) if name.endswith("mean") else result

    return local


def _sum_over(x: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    for group in groups:
        x = collectives.all_reduce(x, group)
    return x


def _root(ops: Any, x: Tensor) -> Tensor:
    """The square root, of which 0 gets the gradient 0, as in the frameworks' standard deviations."""
    nothing = ops.eq(x, 0.0)
    return ops.masked_fill(ops.sqrt(ops.masked_fill(x, nothing, 1.0)), nothing, 0.0)
