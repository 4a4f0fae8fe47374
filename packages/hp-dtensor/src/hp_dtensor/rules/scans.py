"""Operations along a dimension that keep it: cumulative ones and softmax, on whole and on cut dimensions.

Where the dimension is cut, only totals of parts travel, never the data; the result stays cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hp_dtensor import collectives
from hp_dtensor.rules.factors import Factorization
from hp_dtensor.rules.parts import extreme_of_part, groups_of, lines
from hp_dtensor.rules.reductions import LINEAR, reduced_dims
from hp_dtensor.rules.registry import OpCall, Rule, RuleRegistry, names_for

if TYPE_CHECKING:
    from hp_dtensor.dispatch import LocalCall

Tensor = Any


def register(registry: RuleRegistry) -> None:
    registry.register("cumsum", "input dim * dtype=None", _along(_cumulated("add"), linear=True))
    registry.register("cumprod", "input dim * dtype=None", _along(_cumulated("mul")))
    registry.register("logcumsumexp", "input dim", _along(None))
    registry.register("cummax cummin", "input dim", _along(None, outputs=2))
    registry.register("cumsum_", "input dim * dtype=None", _along(None), in_place=True)
    registry.register("cumprod_", "input dim * dtype=None", _along(None), in_place=True)
    registry.register("softmax log_softmax softmin", "input dim=None dtype=None", _along(_softmax))


def _along(local: Callable[[LocalCall], Any] | None, linear: bool = False, outputs: int = 1) -> Rule:
    """The rule; `local` None: the dimension must be whole."""

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
            fixed=frozenset(along if local is None else ()),
            terms=LINEAR if linear else None,
            local={} if local is None else dict.fromkeys(along, local),
        )

    return rule


def _dim_of(call: LocalCall) -> int:
    return int(call.arguments["dim"]) % len(call.arguments["input"].shape)


def _cumulated(combine: str) -> Callable[[LocalCall], Tensor]:
    """Each part by itself, combined with the total of the parts before it."""

    def local(call: LocalCall) -> Tensor:
        dim, x, ops = _dim_of(call), call.arguments["input"], call.platform.ops
        result = call.on(x)
        total = ops.narrow(result, dim, max(0, result.shape[dim] - 1), min(1, result.shape[dim]))
        for _, group, lengths in lines(call, [dim]):
            counts = [min(1, n) for n in lengths]
            totals = collectives.all_gather_varying(total, group, dim, counts)
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


def _softmax(call: LocalCall) -> Tensor:
    """Softmax, its logarithm, or softmin; in float32 for half precision, which does not hold the sum."""
    platform, ops, x = call.platform, call.platform.ops, call.arguments["input"]
    dim, wanted = _dim_of(call), call.arguments["dtype"] or x.dtype
    x = ops.cast(x, platform.dtype("float32") if platform.itemsize(wanted) < 4 else wanted)
    if call.name == "softmin":
        x = ops.neg(x)
    groups = groups_of(call, [dim])
    highest = extreme_of_part(call, platform.detach(x), "max", [dim])
    for group in groups:
        highest = collectives.all_reduce_data(highest, group, "max")
    shifted = ops.sub(x, ops.masked_fill(highest, ops.eq(highest, float("-inf")), 0.0))
    exponentials = ops.exp(shifted)
    total = ops.sum(exponentials, dim, True)
    for group in groups:
        total = collectives.all_reduce(total, group)
    if groups:
        total = collectives.vary(total, groups)
    result = ops.sub(shifted, ops.log(total)) if call.name == "log_softmax" else ops.div(exponentials, total)
    return ops.cast(result, wanted)
