"""Rules of random operations: every rank draws the numbers of the global tensor and keeps those of its shard.

The numbers therefore equal those of one device in every layout and for every generator, also torch's sequential one on
CPU. Generators that are seeded alike on all ranks (`manual_seed`) stay alike.

torch draws the numbers of a transposed tensor in the order of its memory, so the global tensor gets the memory order of
this rank's shard. Where a dimension leaves several elements to some ranks and one or none to others, torch may give the
shards of one tensor different strides. Then all ranks use the order of the largest shard, which they find by a message
(`_best_seen`).

Information that strides do not carry is lost. Kernels that treat a tensor with one element along a dimension as
contiguous return contiguous results (`gelu(x.transpose(0, 1))` with one row per rank), and redistribution makes shards
contiguous. From then on all ranks draw in the order of the shards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from hp_dtensor.rules.factors import LINEAR, Factorization, LocalCall, LocalWork, PartialResults
from hp_dtensor.rules.notation import first_of, line
from hp_dtensor.rules.pointwise import pointwise
from hp_dtensor.rules.registry import OpCall, Rule, RuleRegistry, dim_factors
from hp_dtensor.spec.placements import RaggedShard
from hp_dtensor.spec.tensor_spec import TensorSpec

Tensor = Any
AS_ONE = line("...! -> ...")
"""Every rank draws for the whole: what is dropped gets a value of its own, or it depends on all probabilities."""
DRAWN = [line(text, drawn="num_samples") for text in ("classes! -> drawn", "rows! classes! -> rows drawn")]


def register(registry: RuleRegistry) -> None:
    registry.register(
        "dropout dropout1d dropout2d dropout3d feature_dropout",
        "input p=0.5 training=True ...",
        _in_training(_rule(_masked)),
    )
    registry.register("alpha_dropout feature_alpha_dropout", "input p=0.5 training=False ...", _in_training(AS_ONE))
    registry.register("rand_like randn_like randint_like", "input ...", _rule(_drawn, linear=False))
    registry.register(
        "uniform_ normal_ exponential_ log_normal_ cauchy_ geometric_ random_",
        "input ...",
        _rule(_filled, linear=False),
        in_place=True,
    )
    registry.register("kaiming_uniform_ kaiming_normal_", "tensor ...", _rule(_filled, linear=False), in_place=True)
    registry.register("rrelu", "input lower=0.125 upper=0.333 training=False", _random_slopes)
    registry.register("bernoulli", "input ...", AS_ONE)
    registry.register("multinomial", "input num_samples replacement=False", first_of(*DRAWN))
    registry.register("bernoulli_", "input p=0.5", _rule(_filled, linear=False), in_place=True)


def _rule(local: Callable[[LocalCall], Any], linear: bool = True) -> Rule:
    def rule(call: OpCall) -> Factorization:
        dims, sizes = dim_factors("d", call.tensors[0].shape)
        return Factorization(
            (dims,), (dims,), sizes, partial=LINEAR if linear else PartialResults(), work=LocalWork(on_shards=local)
        )

    return rule


def _in_training(rule: Rule) -> Rule:
    """The rule of dropout; in evaluation, and where nothing is dropped, it is the identity."""
    return lambda call: rule(call) if call["training"] and call["p"] else pointwise("unary")(call)


def _masked(call: LocalCall) -> Tensor:
    """Dropout: `x` times this rank's part of what dropout makes of ones."""
    platform, x = call.platform, call.arguments["input"]
    # The mask is drawn from ones, not from x: what dropout keeps of the whole is known without the whole's data.
    with platform.no_grad():
        # Drawn for the whole tensor on every rank, of which each keeps its part: so generators stay in step, and the
        # numbers are those of one device whatever the layout.
        mask = _part(call, call.on(_whole_like(call, x, platform.ops.ones)))
    return platform.ops.mul(x, mask)


def _drawn(call: LocalCall) -> Tensor:
    return _part(call, call.on(_whole_like(call, call.arguments["input"], call.platform.empty)))


def _filled(call: LocalCall) -> Tensor:
    x = call.arguments["input"] if "input" in call.arguments else call.arguments["tensor"]
    whole = _whole_like(call, x, call.platform.empty)
    call.on(whole)
    call.platform.copy_(x, _part(call, whole))
    return x


def _whole_like(call: LocalCall, x: Tensor, make: Callable[..., Tensor]) -> Tensor:
    """A whole tensor whose dimensions follow each other in memory as those of the part `x`."""
    shape, order = call.output.shape, call.platform.memory_order(x)
    if order is not None and not _all_see_alike(call.output):
        # A rank with one row cannot tell row-major from column-major. All must draw in the same order, so the rank that
        # sees most decides for all.
        order = _best_seen(call.output, tuple(x.shape), order)
    if order is None or order == tuple(range(len(order))):
        return make(shape, x.dtype)
    whole = make(tuple(shape[dim] for dim in order), x.dtype)
    return call.platform.ops.permute(whole, tuple(order.index(dim) for dim in range(len(order))))


def _all_see_alike(spec: TensorSpec) -> bool:
    """Tell if strides say the same on every rank: frameworks disregard those of dimensions of one element or none."""
    return all(len({min(length, 2) for length in _lengths(spec, dim)}) == 1 for dim in range(spec.ndim))


def _best_seen(spec: TensorSpec, shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """The order of the rank with the most dimensions of several elements; ranks outside the mesh keep theirs."""
    if spec.mesh.get_coordinate() is None:
        return order
    axes = tuple(axis for axis, placement in enumerate(spec.placements) if not placement.is_replicate())
    group = spec.mesh.group_over(axes)
    seen = sum(size > 1 for size in shape), math.prod(shape), order
    of_all = [json.loads(data) for data in group.all_gather_bytes(json.dumps(seen).encode())]
    return tuple(max(of_all, key=itemgetter(0, 1))[2])


def _lengths(spec: TensorSpec, dim: int) -> set[int]:
    """Of a dimension's parts on all ranks; 0 and 1 where no rank knows those of the others."""
    cuts = [(p, n) for p, n in zip(spec.placements, spec.mesh.shape, strict=True) if getattr(p, "dim", None) == dim]
    if len(cuts) > 1 and any(isinstance(p, RaggedShard) for p, _ in cuts):
        return {0, 1}
    found = {spec.shape[dim]}
    for placement, ranks in cuts:
        found = {sum(stop - start for start, stop in held) for n in found for held in placement.shard_ranges(n, ranks)}
    return found


def _part(call: LocalCall, whole: Tensor) -> Tensor:
    ops = call.platform.ops
    for dim, ranges in enumerate(call.output.ranges()):
        pieces = [ops.narrow(whole, dim, start, stop - start) for start, stop in ranges or ((0, 0),)]
        whole = pieces[0] if len(pieces) == 1 else ops.cat(pieces, dim)
    return whole


def _random_slopes(call: OpCall) -> Factorization:
    """Tell that the numbers drawn before an element depend on the signs of all elements before it."""
    if not call["training"]:
        return pointwise(None)(call)
    return AS_ONE(call)
