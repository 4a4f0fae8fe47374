"""Making a plan from a sharding rule: one strategy per mesh axis, the cheapest by bytes, and what follows from it.

A strategy of an axis shards one factor of the call, or replicates all operands, or keeps a partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.dispatch.arguments import (
    Location,
    bind,
    check_known,
    check_lists,
    check_one_mesh,
    dtype_classes,
    locate_tensors,
    rule_of,
    specs_of,
)
from hp_dtensor.dispatch.plan import (
    FactorShardings,
    InPlacePlan,
    LocalPlan,
    PlacementChangeError,
    Redistribution,
    ReplicatedPlan,
    check_reaches_original,
    has_out_of_place_form,
)
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.rules.factors import Factorization, LocalCall, Span, Strategy, strategies
from hp_dtensor.rules.pointwise import rounds
from hp_dtensor.rules.registry import NeedsReplicatedError, OpCall, Registration
from hp_dtensor.spec.placements import Placement, RaggedShard, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec


def choose_strategies(
    platform: Platform, rule: Factorization, call: OpCall, registration: Registration
) -> list[Strategy]:
    """Return one strategy per mesh axis, outermost first, which is the order in which axes shard a dimension."""
    chosen: list[Strategy] = []
    num_shards: dict[str, float] = {}
    mesh = call.tensors[0].mesh

    def span_of(factor: str) -> Span:
        """Return the span of a factor on this rank after the axes so far; outside the mesh, that of the first rank."""
        where = mesh.get_coordinate() or (0,) * mesh.ndim
        return _span(mesh, rule.sizes[factor], _in_spans(_sharding_axes(chosen), chosen).get(factor, ()), chosen, where)

    # Bytes of a shard, averaged over ranks: all ranks must make the same choice, whatever the sizes of their shards.
    nbytes = []
    for spec in call.tensors:
        shards = math.prod(n for n, p in zip(mesh.shape, spec.placements, strict=True) if p.is_shard())
        nbytes.append(math.prod(spec.shape) * platform.itemsize(spec.dtype) / shards)
    # Greedy, axis by axis in the mesh's order: a later axis shards what earlier ones leave. Searching all combinations
    # would be exponential in the number of axes. Whatever is chosen, the planner of redistributions then brings the
    # inputs there with the fewest bytes.
    for axis, ranks in enumerate(mesh.shape):
        current = [spec.placements[axis] for spec in call.tensors]
        found = strategies(rule, current, ranks, num_shards, _untouched(call, chosen), span_of)
        strategy = _choose(rule, call, registration, current, found, nbytes, ranks)
        chosen.append(strategy)
        if strategy.factor is not None:
            more = math.inf if isinstance(strategy.kind, (RaggedShard, StridedShard)) else ranks
            num_shards[strategy.factor] = num_shards.get(strategy.factor, 1) * more
    return chosen


def _untouched(call: OpCall, chosen: list[Strategy]) -> list[bool]:
    """Return per tensor whether earlier axes leave its sharding as it is, so that later ragged shards still fit."""
    return [
        all(
            strategy.inputs[index] == placement or not (strategy.inputs[index].is_shard() or placement.is_shard())
            for strategy, placement in zip(chosen, spec.placements, strict=False)
        )
        for index, spec in enumerate(call.tensors)
    ]


def _choose(
    rule: Factorization,
    call: OpCall,
    registration: Registration,
    current: list[Placement],
    found: list[Strategy],
    nbytes: list[float],
    ranks: int,
) -> Strategy:
    """Return the cheapest strategy `found` for an axis of `ranks` that leaves written tensors where they are.

    Raises:
        ShardingRuleError: there is none; a `PlacementChangeError` if an `InPlacePlan` can run the call.
    """
    if registration.in_place:
        # The written tensor keeps its placement: views of it and the optimizer's state rely on that.
        found = [strategy for strategy in found if strategy.inputs[0] == strategy.outputs[0] == current[0]]
        if not found:
            refusal = call.refuse(f"in place it would have to change the placement {current[0]} of its first argument")
            if current[0].is_partial() or not has_out_of_place_form(call.name):
                raise refusal
            raise PlacementChangeError(str(refusal))
    if rule.operands.written:
        found = [strategy for strategy in found if all(strategy.inputs[i] == current[i] for i in rule.operands.written)]
        if not found:
            placed = ", ".join(str(current[i]) for i in sorted(rule.operands.written))
            raise call.refuse(f"it would have to change the placements {placed} of tensors that it writes")
    return cheapest(found, current, nbytes, ranks).with_ignored(rule.operands.ignored, current)


def factor_shardings(rule: Factorization, mesh: DeviceMesh, chosen: list[Strategy]) -> FactorShardings:
    """Return how the strategies `chosen`, one per mesh axis, divide the factors among the ranks."""
    axes_of, sizes = _sharding_axes(chosen), rule.sizes
    in_spans = _in_spans(axes_of, chosen)
    where = mesh.get_coordinate()
    return FactorShardings(
        sizes=sizes,
        axes=axes_of,
        spans={f: _span(mesh, sizes[f], axes, chosen, where) if where else (0, 0) for f, axes in in_spans.items()},
        lengths={f: _lengths(mesh, sizes[f], axes, chosen) for f, axes in in_spans.items()},
    )


def _sharding_axes(chosen: list[Strategy]) -> dict[str, tuple[int, ...]]:
    """Return the mesh axes that shard each factor, outermost first."""
    axes: dict[str, tuple[int, ...]] = {}
    for axis, strategy in enumerate(chosen):
        if strategy.factor is not None:
            axes[strategy.factor] = (*axes.get(strategy.factor, ()), axis)
    return axes


def _in_spans(axes: Mapping[str, tuple[int, ...]], chosen: list[Strategy]) -> Mapping[str, tuple[int, ...]]:
    """Return the factors of which every rank has one span."""
    strided = {strategy.factor for strategy in chosen if isinstance(strategy.kind, StridedShard)}
    return {factor: found for factor, found in axes.items() if factor not in strided}


def _span(
    mesh: DeviceMesh, size: int, axes: tuple[int, ...], chosen: list[Strategy], coordinate: Sequence[int]
) -> tuple[int, int]:
    """Return (start, length) of the shard at a coordinate, of a factor that `axes` shard."""
    start, length = 0, size
    for axis in axes:
        kind = chosen[axis].kind
        assert isinstance(kind, (Shard, RaggedShard))
        offset, length = kind.interval(length, mesh.shape[axis], coordinate[axis])
        start += offset
    return start, length


def _lengths(mesh: DeviceMesh, size: int, axes: tuple[int, ...], chosen: list[Strategy]) -> tuple[tuple[int, ...], ...]:
    """Return per axis the lengths of its ranks' shards, of a factor that `axes` shard; nothing outside the mesh."""
    coordinate, found = mesh.get_coordinate(), []
    for axis in axes if coordinate else ():
        kind = chosen[axis].kind
        assert isinstance(kind, (Shard, RaggedShard))
        found.append(tuple(kind.interval(size, mesh.shape[axis], rank)[1] for rank in range(mesh.shape[axis])))
        size = found[-1][coordinate[axis]] if coordinate else 0
    return tuple(found)


Plan = LocalPlan | ReplicatedPlan | InPlacePlan


def make_plan(
    platform: Platform, name: str, registration: Registration, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Plan:
    """Return the plan of a call.

    An in-place operation that cannot run on the shards becomes an `InPlacePlan`. A call that needs replicated operands
    becomes a `ReplicatedPlan`, and so does one with a data-dependent result shape whose operands are all replicated.
    """
    try:
        return _plan_by_rule(platform, name, registration, args, kwargs)
    except PlacementChangeError as error:
        return InPlacePlan(platform, name, str(error))
    except NeedsReplicatedError as error:
        if registration.in_place:
            return InPlacePlan(platform, name, str(error))
        return ReplicatedPlan(platform, name, str(error), always=True)
    except ShardingRuleError as error:
        tensors = [x.spec for _, x in locate_tensors(args, kwargs)]
        if not registration.data_dependent or not all(spec.is_replicated() for spec in tensors):
            raise
        check_one_mesh(name, tuple(tensors))
        return ReplicatedPlan(platform, name, str(error), always=True)


def _plan_by_rule(
    platform: Platform, name: str, registration: Registration, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> LocalPlan:
    # Rules get tensors in the order of the signature, whatever the order of the call's keywords.
    located = locate_tensors(args, dict(sorted(kwargs.items(), key=lambda item: registration.position(item[0]))))
    specs = tuple(x.spec for _, x in located)
    check_one_mesh(name, specs)
    check_lists(platform, name, args, kwargs)
    mesh = specs[0].mesh
    arguments = {key: specs_of(value) for key, value in bind(registration, args, kwargs).items()}
    call = OpCall(name, arguments, specs)
    check_known(registration, call, args)
    (place, *inside), first = located[0]
    index = place if isinstance(place, int) else registration.position(place)
    if registration.in_place and index == 0 and not inside:
        check_reaches_original(name, first)  # no other placements would help
    rule = rule_of(registration, call)
    if _makes_integers(platform, specs, args, kwargs):
        # round(a) + round(b) is not round(a + b): partial sums must be reduced before they are rounded.
        rule = replace(rule, partial=replace(rule.partial, terms=None))
    chosen = choose_strategies(platform, rule, call, registration)
    outputs = tuple(
        (tuple(strategy.outputs[i] for strategy in chosen), rule.output_shape(i)) for i in range(len(rule.outputs))
    )
    shardings = factor_shardings(rule, mesh, chosen)
    replaced: Mapping[str, Any] = {}
    if rule.work.localize is not None:
        # A static shape among the arguments (of `view`, `expand`) is global; the local operation needs the local one.
        shapes = [TensorSpec(mesh, placements, shape, specs[0].dtype).local_shape for placements, shape in outputs]
        replaced = rule.work.localize(shapes, shardings.spans)
    return LocalPlan(
        platform,
        name,
        mesh=mesh,
        registration=registration,
        redistributions=_redistributions(name, located, chosen),
        replaced=replaced,
        placed=outputs,
        view=registration.view and len(specs) == 1,
        copies=registration.view and any(strategy.factor in rule.partial.reduced for strategy in chosen),
        factors=shardings,
        local=_local_function(rule, shardings.axes, chosen),
    )


def _makes_integers(
    platform: Platform, specs: tuple[TensorSpec, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Return True if a dtype among the arguments rounds the data or makes it bool, so that the call is not linear."""
    given = [platform.dtype_meant(value) for value in (*args, *kwargs.values())]
    wanted = [value for value in given if type(value) in dtype_classes(platform)]
    return any(rounds(platform, spec.dtype, dtype) for spec in specs for dtype in wanted)


def _redistributions(
    operation: str, located: list[tuple[Location, Any]], chosen: list[Strategy]
) -> tuple[Redistribution, ...]:
    found = []
    for index, (location, x) in enumerate(located):
        placements = tuple(strategy.inputs[index] for strategy in chosen)
        target = x.spec.with_placements(placements)
        # Ranks use a replicated value with different operands (R -> V): its gradient is the sum over ranks.
        vary = tuple(
            axis
            for axis, strategy in enumerate(chosen)
            if not strategy.is_replicated and strategy.inputs[index].is_replicate() and x.spec.mesh.shape[axis] > 1
        )
        if target is not x.spec or vary:
            found.append(Redistribution(operation, location, target if target is not x.spec else None, vary))
    return tuple(found)


def _local_function(
    rule: Factorization, sharding_axes: Mapping[str, Any], chosen: Sequence[Strategy]
) -> Callable[[LocalCall], Any] | None:
    work = rule.work
    if work.on_shards is not None and any(p.is_shard() for s in chosen for p in s.outputs):
        return work.on_shards
    return next((work.by_factor[factor] for factor in sharding_axes if factor in work.by_factor), None)


def cheapest(found: Sequence[Strategy], current: Sequence[Placement], nbytes: Sequence[float], ranks: int) -> Strategy:
    """Return the strategy with the fewest bytes, then the fewest redistributed inputs, then the first."""
    # If all operands are replicated on this axis, nothing is sent in forward or backward. Sharding would be free too,
    # but the result would have placements that the user did not ask for.
    if all(placement.is_replicate() for placement in current):
        return found[0]

    def cost(strategy: Strategy) -> tuple[float, int, bool]:
        moves = list(zip(current, strategy.inputs, nbytes, strict=True))
        wire = sum(move_bytes(source, target, size, ranks) for source, target, size in moves)
        return wire, sum(source != target for source, target, _ in moves), strategy.is_replicated

    return min(found, key=cost)


def move_bytes(source: Placement, target: Placement, nbytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends to redistribute a tensor of `nbytes` per rank between two placements."""
    if source == target or source.is_replicate():
        return 0.0
    # From partial sums or from shards to other shards, each rank sends all but its own block.
    if target.is_shard():
        return nbytes * (ranks - 1) / ranks
    if source.is_partial():
        # Ring algorithms: an all-reduce is a reduce-scatter and an all-gather, each of which sends (ranks - 1) / ranks
        # of the tensor per rank (Patarasuk and Yuan, 2009). Another kind of partial result does not follow from this.
        return 2 * nbytes * (ranks - 1) / ranks if target.is_replicate() else math.inf
    # From shards to partial sums sends nothing now, but the result is all-reduced later.
    return nbytes * (ranks - 1) * (2 if target.is_partial() else 1)
