"""Rules of cumulative operations, softmax, sorting, searching and counting.

Along a sharded dimension, cumulative operations and softmax communicate only one total per shard, and the result stays
sharded. Sorting needs the dimension unsharded; `topk` sends only the best elements of each shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hp_dtensor.comm import collectives
from hp_dtensor.rules import reductions
from hp_dtensor.rules.cat_split_pad_roll import with_lengths
from hp_dtensor.rules.factors import LINEAR, Factorization, LocalCall, LocalWork, PartialResults, unsharded
from hp_dtensor.rules.notation import by_argument, line
from hp_dtensor.rules.reductions import (
    check_floating,
    extreme_of_shard,
    groups_of,
    reduce_data_over,
    reduced_dims,
    sharded_axes,
    sum_over,
)
from hp_dtensor.rules.registry import OpCall, Rule, RuleRegistry, dim_factors

Tensor = Any


def register(registry: RuleRegistry) -> None:
    registry.register("cumsum", "input dim * dtype=None", _along(_cumulative("add"), linear=True))
    registry.register("cumprod", "input dim * dtype=None", _along(_cumulative("mul")))
    registry.register("logcumsumexp", "input dim", _along(lambda call: _scan(call)[0]))
    registry.register("cummax cummin", "input dim", _along(_scan, outputs=2))
    registry.register("cumsum_ cumprod_", "input dim * dtype=None", line("... dim! ... -> ... dim ..."), in_place=True)
    registry.register("softmax log_softmax softmin", "input dim=None dtype=None", _along(_softmax, floating=True))
    registry.register("topk", "input k dim=-1 largest=True sorted=True", _topk)
    registry.register(
        "sort", "input dim=-1 descending=False * stable=False", line("... dim! ... -> ... dim ..., ... dim ...")
    )
    registry.register("argsort", "input dim=-1 descending=False * stable=False", line("... dim! ... -> ... dim ..."))
    registry.register("one_hot", "input num_classes=-1", _one_hot, data_dependent=True)
    registry.register("bincount", "input weights=None minlength=0", _bincount, data_dependent=True)
    registry.register(
        "searchsorted",
        "sorted_sequence input * out_int32=False right=False side=None sorter=None",
        by_argument("sorter", {None: line("bounds!, ... -> ...")}),
    )
    registry.register("bucketize", "input boundaries * out_int32=False right=False", line("..., bounds! -> ..."))


def _along(local: Callable[[LocalCall], Any], linear: bool = False, outputs: int = 1, floating: bool = False) -> Rule:
    """Return the rule of an operation along `dim` that keeps the shape; `local` runs where that dimension is sharded.

    Args:
        floating: refuse integers.
    """

    def rule(call: OpCall) -> Factorization:
        if floating:
            check_floating(call, call["dtype"])
        (spec,) = call.tensors
        dims, sizes = dim_factors("d", spec.shape)
        if not isinstance(call["dim"], int):
            raise call.refuse(f"it needs one dimension, got dim={call['dim']!r}")
        along = [f"d{dim}" for dim in reduced_dims(call, spec.ndim)]
        return Factorization(
            (dims,),
            (dims,) * outputs,
            sizes,
            partial=LINEAR if linear else PartialResults(),
            work=LocalWork(by_factor=dict.fromkeys(along, local)),
        )

    return rule


def _dim_of(call: LocalCall) -> int:
    return int(call.arguments["dim"]) % len(call.arguments["input"].shape)


def _cumulative(combine: str) -> Callable[[LocalCall], Tensor]:
    """Return the local function of `cumsum` (`add`) or `cumprod` (`mul`): scan the shard, add earlier totals."""

    def local(call: LocalCall) -> Tensor:
        dim, x, ops = _dim_of(call), call.arguments["input"], call.platform.ops
        # Only one slice per shard is communicated, its total, however long the shard is.
        result = call.on(x)
        total = ops.narrow(result, dim, max(0, result.shape[dim] - 1), min(1, result.shape[dim]))
        for _, group, lengths in sharded_axes(call, [dim]):
            counts = [min(1, n) for n in lengths]
            totals = collectives.all_gather_varying(total, group, dim, counts)
            # All shards along this mesh axis are empty.
            if not totals.shape[dim]:
                continue
            running, before = call.on(totals), sum(counts[: group.rank])
            if before:
                earlier = ops.narrow(running, dim, before - 1, 1)
            else:  # a zero that depends on the gather, whose backward is a collective that all ranks must join
                earlier = ops.sum(ops.narrow(running, dim, 0, 0), dim, True)
                earlier = ops.add(earlier, 1) if combine == "mul" else earlier
            result = getattr(ops, combine)(result, earlier)
            total = ops.narrow(running, dim, sum(counts) - 1, 1)
        return result

    return local


def _scan(call: LocalCall) -> tuple[Tensor, ...]:
    """Scan the totals of preceding shards and then the shard, for scans that no binary operation combines."""
    dim, ops, x = _dim_of(call), call.platform.ops, call.arguments["input"]
    # Integers have no gradient, but a custom autograd node would ask for one.
    if not call.platform.is_floating(x.dtype) and not call.platform.is_complex(x.dtype):
        x = call.platform.detach(x)
    before = _preceding_totals(call, x, dim)
    length, rows = x.shape[dim], before[0].shape[dim]
    scanned = [ops.narrow(each, dim, rows, length) for each in _scanned(call, ops.cat([before[0], x], dim), dim)]
    if len(scanned) == 1:
        return tuple(scanned)
    start = call.spans[f"d{dim}"][0]
    values, where = scanned
    # Positions refer to the global tensor: those of the shard start at `start`, and the totals in front have positions
    # of their own.
    positions = ops.add(where, start - rows)
    if rows:
        earlier = ops.gather(before[1], dim, ops.clamp(where, max=rows - 1))
        positions = ops.where(ops.lt(where, rows), earlier, positions)
    return values, positions


def _preceding_totals(call: LocalCall, x: Tensor, dim: int) -> list[Tensor]:
    """Return the totals of the elements before this shard, outermost mesh axis first, and their positions if any."""
    ops, (start, length) = call.platform.ops, call.spans[f"d{dim}"]
    totals = [ops.narrow(each, dim, max(0, length - 1), min(1, length)) for each in _scanned(call, x, dim)]
    totals[1:] = [ops.add(where, start) for where in totals[1:]]
    found = [[ops.narrow(total, dim, 0, 0) for total in totals]]
    for _, group, lengths in sharded_axes(call, [dim]):
        counts = [min(1, n) for n in lengths]
        gathered = collectives.all_gather_varying(totals[0], group, dim, counts)
        places = [collectives.gather_data(where, group, dim, counts) for where in totals[1:]]
        running = _scanned(call, gathered, dim)
        running[1:] = [ops.gather(place, dim, chosen) for place, chosen in zip(places, running[1:], strict=True)]
        before = sum(counts[: group.rank])
        found.insert(0, [ops.narrow(each, dim, max(0, before - 1), min(1, before)) for each in running])
        totals = [ops.narrow(each, dim, max(0, sum(counts) - 1), min(1, sum(counts))) for each in running]
    return [ops.cat(list(each), dim) for each in zip(*found, strict=True)]


def _scanned(call: LocalCall, x: Tensor, dim: int) -> list[Tensor]:
    """Scan a tensor that may be empty: return values, and positions if the operation has them."""
    positions = call.name in ("cummax", "cummin")
    if x.shape[dim]:
        result = call.on(x)
        return list(result) if positions else [result]
    return [x, call.platform.ops.zeros(tuple(x.shape), call.platform.dtype("int64"))] if positions else [x]


def _softmax(call: LocalCall) -> Tensor:
    """Compute softmax, log-softmax or softmin; half precision in float32, because it cannot hold the sum."""
    platform, ops, x = call.platform, call.platform.ops, call.arguments["input"]
    dim, wanted = _dim_of(call), platform.dtype_meant(call.arguments["dtype"]) or x.dtype
    x = ops.cast(x, platform.dtype("float32") if platform.itemsize(wanted) < 4 else wanted)
    if call.name == "softmin":
        x = ops.neg(x)
    groups = groups_of(call, [dim])
    # The maximum only keeps the exponentials in range. The result does not depend on it, so it needs no gradient.
    highest = reduce_data_over(extreme_of_shard(call, platform.detach(x), "max", [dim]), groups, "max")
    # For a row of minus infinities nothing is subtracted, since -inf - (-inf) is NaN.
    shifted = ops.sub(x, ops.masked_fill(highest, ops.eq(highest, float("-inf")), 0.0))
    exponentials = ops.exp(shifted)
    # Each rank divides its own shard by the total, so the total's gradient is a sum over ranks (`vary`).
    total = sum_over(ops.sum(exponentials, dim, True), groups, vary=True)
    result = ops.sub(shifted, ops.log(total)) if call.name == "log_softmax" else ops.div(exponentials, total)
    return ops.cast(result, wanted)


def _topk(call: OpCall) -> Factorization:
    """Along a sharded dimension, take the k best of each shard and then of these, if that sends fewer bytes."""
    if not call.tensors[0].shape:
        raise call.needs_replicated("a tensor without dimensions")
    dim, k = call.dim(call["dim"]), call["k"]
    rule = with_lengths(call, dim, [k])
    rule = replace(rule, outputs=rule.outputs * 2)
    if k > call.tensors[0].shape[dim] or not reductions.candidates_are_fewer(call, dim, k):
        return rule
    factor = frozenset({f"d{dim}"})
    local = {f"d{dim}": reductions.first_k_of_shards(dim, k)}
    return replace(
        rule,
        limits=replace(rule.limits, fixed=rule.limits.fixed - factor),
        partial=replace(rule.partial, complete=factor),
        work=replace(rule.work, by_factor=local),
    )


def _one_hot(call: OpCall) -> Factorization:
    if call["num_classes"] < 0:
        raise call.refuse("num_classes must be given, since the default depends on the data of all ranks")
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    return Factorization(
        (dims,), ((*dims, ("classes",)),), sizes | {"classes": call["num_classes"]}, limits=unsharded({"classes"})
    )


def _bincount(call: OpCall) -> Factorization:
    (spec,) = call.tensors[:1]
    if spec.is_replicated():
        raise call.refuse("the number of bins depends on data")  # of replicated operands: it runs as on one device
    if not call["minlength"] or call["weights"] is not None:
        raise call.refuse("bincount of a sharded DTensor needs a minlength greater than every value, and no weights")
    dims, sizes = dim_factors("d", spec.shape)
    return Factorization(
        (dims,),
        ((("bins",),),),
        sizes | {"bins": call["minlength"]},
        limits=unsharded({"bins"}),
        partial=PartialResults(reduced=dict.fromkeys(sizes, "sum")),
        work=LocalWork(by_factor=dict.fromkeys(sizes, functools.partial(_local_bins, call))),
    )


def _local_bins(refused: OpCall, call: LocalCall) -> Any:
    """Count the shard's values. All ranks raise if any rank has a value beyond the last bin."""
    platform, bins = call.platform, call.sizes["bins"]
    counts = call.on(call.arguments["input"])
    most = platform.ops.full((), int(counts.shape[0]), platform.dtype("int64"))
    # A rank that raised alone would leave the others waiting in the next collective.
    most = reduce_data_over(most, call.groups["d0"], "max")
    highest = int(platform.to_numpy(most)) - 1
    if highest >= bins:
        raise refused.refuse(f"a value {highest} is beyond minlength={bins}")
    return counts
