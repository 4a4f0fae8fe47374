"""Operations along a dimension that keep it: cumulative ones and softmax, on whole and on cut dimensions.

Where the dimension is cut, only totals of parts travel, never the data; the result stays cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.comm import collectives
from hp_dtensor.rules.engine.factors import LINEAR, Factorization, LocalWork, PartialResults
from hp_dtensor.rules.engine.local_call import LocalCall
from hp_dtensor.rules.engine.notation import line
from hp_dtensor.rules.engine.registry import OpCall, Rule, RuleRegistry, names_for
from hp_dtensor.rules.partial_reductions import extreme_of_part, groups_of, lines
from hp_dtensor.rules.reductions import check_floating, reduced_dims

Tensor = Any


def register(registry: RuleRegistry) -> None:
    registry.register("cumsum", "input dim * dtype=None", _along(_cumulated("add"), linear=True))
    registry.register("cumprod", "input dim * dtype=None", _along(_cumulated("mul")))
    registry.register("logcumsumexp", "input dim", _along(lambda call: _carried(call)[0]))
    registry.register("cummax cummin", "input dim", _along(_carried, outputs=2))
    registry.register("cumsum_ cumprod_", "input dim * dtype=None", line("... dim! ... -> ... dim ..."), in_place=True)
    registry.register("softmax log_softmax softmin", "input dim=None dtype=None", _of_floating(_along(_softmax)))


def _along(local: Callable[[LocalCall], Any], linear: bool = False, outputs: int = 1) -> Rule:
    def rule(call: OpCall) -> Factorization:
        (spec,) = call.tensors
        dims, sizes = names_for("d", spec.shape)
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


def _of_floating(rule: Rule) -> Rule:
    def checked(call: OpCall) -> Factorization:
        check_floating(call, call["dtype"])
        return rule(call)

    return checked


def _dim_of(call: LocalCall) -> int:
    return int(call.arguments["dim"]) % len(call.arguments["input"].shape)


def _cumulated(combine: str) -> Callable[[LocalCall], Tensor]:
    """Each part by itself, combined with the total of the parts before it."""

    def local(call: LocalCall) -> Tensor:
        dim, x, ops = _dim_of(call), call.arguments["input"], call.platform.ops
        # The part alone, then what came before it: totals are one slice per part, whatever its length.
        result = call.on(x)
        total = ops.narrow(result, dim, max(0, result.shape[dim] - 1), min(1, result.shape[dim]))
        for _, group, lengths in lines(call, [dim]):
            counts = [min(1, n) for n in lengths]
            totals = collectives.all_gather_varying(total, group, dim, counts)
            # No rank of this line has an element.
            if not totals.shape[dim]:
                continue
            running, before = call.on(totals), sum(counts[: group.rank])
            if before:
                earlier = ops.narrow(running, dim, before - 1, 1)
            else:  # nothing before, but in the graph of the gather, whose backward is a collective too
                earlier = ops.sum(ops.narrow(running, dim, 0, 0), dim, True)
                earlier = ops.add(earlier, 1) if combine == "mul" else earlier
            result = getattr(ops, combine)(result, earlier)
            total = ops.narrow(running, dim, sum(counts) - 1, 1)
        return result

    return local


def _carried(call: LocalCall) -> tuple[Tensor, ...]:
    """A scan that no operation of two results gives: totals before each part are put in front of it, and scanned."""
    dim, ops, x = _dim_of(call), call.platform.ops, call.arguments["input"]
    # Integers have no gradient, and a custom node would ask for one.
    if not call.platform.is_floating(x.dtype) and not call.platform.is_complex(x.dtype):
        x = call.platform.detach(x)
    before = _totals_before(call, x, dim)
    length, rows = x.shape[dim], before[0].shape[dim]
    scanned = [ops.narrow(each, dim, rows, length) for each in _scanned(call, ops.cat([before[0], x], dim), dim)]
    if len(scanned) == 1:
        return tuple(scanned)
    start = call.spans[f"d{dim}"][0]
    values, where = scanned
    # Positions count in the whole: those in the part begin at `start`, and the rows in front are totals with positions
    # of their own.
    positions = ops.add(where, start - rows)
    if rows:
        earlier = ops.gather(before[1], dim, ops.clamp(where, max=rows - 1))
        positions = ops.where(ops.lt(where, rows), earlier, positions)
    return values, positions


def _totals_before(call: LocalCall, x: Tensor, dim: int) -> list[Tensor]:
    """The totals, with their positions where the operation has any, of what lies before this part: of other parts
    of the outermost cut first."""
    ops, (start, length) = call.platform.ops, call.spans[f"d{dim}"]
    totals = [ops.narrow(each, dim, max(0, length - 1), min(1, length)) for each in _scanned(call, x, dim)]
    totals[1:] = [ops.add(where, start) for where in totals[1:]]
    found = [[ops.narrow(total, dim, 0, 0) for total in totals]]
    for _, group, lengths in lines(call, [dim]):
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
    """The operation on a tensor that may be empty."""
    positions = call.name in ("cummax", "cummin")
    if x.shape[dim]:
        result = call.on(x)
        return list(result) if positions else [result]
    return [x, call.platform.ops.zeros(tuple(x.shape), call.platform.dtype("int64"))] if positions else [x]


def _softmax(call: LocalCall) -> Tensor:
    """Softmax, its logarithm, or softmin; in float32 for half precision, which does not hold the sum."""
    platform, ops, x = call.platform, call.platform.ops, call.arguments["input"]
    dim, wanted = _dim_of(call), platform.dtype_meant(call.arguments["dtype"]) or x.dtype
    x = ops.cast(x, platform.dtype("float32") if platform.itemsize(wanted) < 4 else wanted)
    if call.name == "softmin":
        x = ops.neg(x)
    groups = groups_of(call, [dim])
    # As in one device's softmax the maximum only keeps exponentials in range; it takes no part in the gradient.
    highest = extreme_of_part(call, platform.detach(x), "max", [dim])
    for group in groups:
        highest = collectives.all_reduce_data(highest, group, "max")
    # A row of minus infinities has no maximum to subtract: -inf less -inf is no number.
    shifted = ops.sub(x, ops.masked_fill(highest, ops.eq(highest, float("-inf")), 0.0))
    exponentials = ops.exp(shifted)
    total = ops.sum(exponentials, dim, True)
    for group in groups:
        total = collectives.all_reduce(total, group)
    if groups:
        # P -> R, then R -> V: each rank divides its own part by the total, so the total's gradient is a sum over the
        # ranks.
        total = collectives.vary(total, groups)
    result = ops.sub(shifted, ops.log(total)) if call.name == "log_softmax" else ops.div(exponentials, total)
    return ops.cast(result, wanted)
