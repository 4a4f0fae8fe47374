"""Rules of random operations: every rank draws the numbers of the global tensor and keeps those of its shard.

The numbers therefore equal those of one device in every layout and for every generator, also torch's sequential one on
CPU. Generators that are seeded alike on all ranks (`manual_seed`) stay alike.

torch draws the numbers of a transposed tensor in the order of its memory, so the global tensor gets the memory order of
this rank's shard. Where a dimension leaves several elements to some ranks and one or none to others, torch may give the
shards of one tensor different strides. Then all ranks use the order of the largest shard, which they find by a message
(`_order_of_largest_shard`).

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
REPLICATED = line("...! -> ...")
"""Operations on replicated operands: the result of an element depends on more than its own random number."""
DRAWN = [line(text, drawn="num_samples") for text in ("classes! -> drawn", "rows! classes! -> rows drawn")]


def register(registry: RuleRegistry) -> None:
    registry.register(
        "dropout dropout1d dropout2d dropout3d feature_dropout",
        "input p=0.5 training=True ...",
        _in_training(_local_rule(_dropout)),
    )
    registry.register("alpha_dropout feature_alpha_dropout", "input p=0.5 training=False ...", _in_training(REPLICATED))
    # Not linear: the numbers do not depend on the input, and a partial input would make each rank's a summand.
    registry.register("rand_like randn_like randint_like", "input ...", _local_rule(_draw_like, linear=False))
    registry.register(
        "uniform_ normal_ exponential_ log_normal_ cauchy_ geometric_ random_",
        "input ...",
        _local_rule(_fill, linear=False),
        in_place=True,
    )
    registry.register("kaiming_uniform_ kaiming_normal_", "tensor ...", _local_rule(_fill, linear=False), in_place=True)
    registry.register("rrelu", "input lower=0.125 upper=0.333 training=False", _rrelu)
    registry.register("bernoulli", "input ...", REPLICATED)
    # Rows draw one after the other from one generator, and a draw needs the sum over all classes.
    registry.register("multinomial", "input num_samples replacement=False", first_of(*DRAWN))
    registry.register("bernoulli_", "input p=0.5", _local_rule(_fill, linear=False), in_place=True)


def _local_rule(local: Callable[[LocalCall], Any], linear: bool = True) -> Rule:
    """Return the rule of an operation of the input's shape for which `local` runs if the output is sharded."""

    def rule(call: OpCall) -> Factorization:
        dims, sizes = dim_factors("d", call.tensors[0].shape)
        return Factorization(
            (dims,), (dims,), sizes, partial=LINEAR if linear else PartialResults(), work=LocalWork(on_shards=local)
        )

    return rule


def _in_training(rule: Rule) -> Rule:
    """Return `rule` for training. In evaluation, or if nothing is dropped, the operation is the identity."""
    return lambda call: rule(call) if call["training"] and call["p"] else pointwise("unary")(call)


def _dropout(call: LocalCall) -> Tensor:
    """Return `x` times the shard of dropout applied to ones."""
    platform, x = call.platform, call.arguments["input"]
    # The mask is drawn for ones, not for x: which elements are dropped does not depend on the data of other ranks. The
    # mask times a partial x is partial, so dropout is linear.
    with platform.no_grad():
        # Every rank draws the global mask and keeps its shard, so generators stay alike and the numbers equal those of
        # one device in every layout.
        mask = _own_shard(call, call.on(_global_like(call, x, platform.ops.ones)))
    return platform.ops.mul(x, mask)


def _draw_like(call: LocalCall) -> Tensor:
    return _own_shard(call, call.on(_global_like(call, call.arguments["input"], call.platform.empty)))


def _fill(call: LocalCall) -> Tensor:
    """Fill the shard in place with its part of the global tensor's numbers."""
    x = call.arguments["input"] if "input" in call.arguments else call.arguments["tensor"]
    # The global tensor exists for a moment: generators of frameworks have no common way to skip numbers.
    full = _global_like(call, x, call.platform.empty)
    call.on(full)
    call.platform.copy_(x, _own_shard(call, full))
    return x


def _global_like(call: LocalCall, x: Tensor, make: Callable[..., Tensor]) -> Tensor:
    """Return a tensor of the global shape with the memory order of the shard `x`."""
    shape, order = call.output.shape, call.platform.memory_order(x)
    # Frameworks ignore strides of dimensions of size 0 or 1, so ranks see the same order only if a dimension has one
    # element or none on all of them or on none. Lengths of all ranks are computed only where there is an order.
    if order is not None and any(
        len({min(n, 2) for n in _lengths(call.output, dim)}) > 1 for dim in range(call.output.ndim)
    ):
        # The strides of a shard with one row do not show whether it is row-major or column-major. All ranks must draw
        # in the same order, so the rank with the most informative shard decides.
        order = _order_of_largest_shard(call.output, tuple(x.shape), order)
    if order is None or order == tuple(range(len(order))):
        return make(shape, x.dtype)
    full = make(tuple(shape[dim] for dim in order), x.dtype)
    return call.platform.ops.permute(full, tuple(order.index(dim) for dim in range(len(order))))


def _order_of_largest_shard(spec: TensorSpec, shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the memory order of the mesh's rank whose shard has most dimensions of size above 1."""
    if spec.mesh.get_coordinate() is None:
        return order
    axes = tuple(axis for axis, placement in enumerate(spec.placements) if not placement.is_replicate())
    group = spec.mesh.group_over(axes)
    seen = sum(size > 1 for size in shape), math.prod(shape), order
    of_all = [json.loads(data) for data in group.all_gather_bytes(json.dumps(seen).encode())]
    return tuple(max(of_all, key=itemgetter(0, 1))[2])


def _lengths(spec: TensorSpec, dim: int) -> set[int]:
    """Return the lengths of all ranks' shards of a dimension. If a rank cannot know them, return {0, 1}."""
    # Units of nested ragged shards may differ between the ranks of another axis; {0, 1} makes the ranks ask each other.
    sharded = [(p, n) for p, n in zip(spec.placements, spec.mesh.shape, strict=True) if getattr(p, "dim", None) == dim]
    if len(sharded) > 1 and any(isinstance(p, RaggedShard) for p, _ in sharded):
        return {0, 1}
    found = {spec.shape[dim]}
    for placement, ranks in sharded:
        found = {sum(stop - start for start, stop in held) for n in found for held in placement.shard_ranges(n, ranks)}
    return found


def _own_shard(call: LocalCall, full: Tensor) -> Tensor:
    """Return this rank's shard of a global tensor of the output's shape."""
    ops = call.platform.ops
    for dim, ranges in enumerate(call.output.ranges()):
        pieces = [ops.narrow(full, dim, start, stop - start) for start, stop in ranges or ((0, 0),)]
        full = pieces[0] if len(pieces) == 1 else ops.cat(pieces, dim)
    return full


def _rrelu(call: OpCall) -> Factorization:
    """Draw slopes on replicated operands: the numbers drawn before an element depend on the signs of all before it."""
    return REPLICATED(call) if call["training"] else pointwise(None)(call)
