"""Choice of one strategy per mesh axis for a call, and the parts of its factors that follow from the choice.

Making the plan of a call from its sharding rule and the specs of its tensors.

The cost of bringing an operation's inputs to a strategy, in bytes that a rank sends.
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
    FactorCuts,
    GatheringPlan,
    Inputs,
    KeptPlacementError,
    Move,
    OpPlan,
    Outputs,
    WritingPlan,
    check_reaches_original,
    writes_result_of,
)
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.rules.factors import Factorization, LocalCall, Span, Strategy, spans_of_ranks, strategies
from hp_dtensor.rules.pointwise import rounds
from hp_dtensor.rules.registry import NeedsReplicatedError, OpCall, Registration
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec


def choose_strategies(
    platform: Platform, rule: Factorization, call: OpCall, registration: Registration
) -> list[Strategy]:
    """One strategy per mesh axis, earlier axes first, since they cut first."""
    if _is_element_by_element(rule) and _stay_strided(call.tensors, registration.in_place):
        placements = next(spec.placements for spec in call.tensors if spec.ndim)
        return [
            Strategy(tuple(p if spec.ndim else Replicate() for spec in call.tensors), (p,) * len(rule.outputs))
            for p in placements
        ]
    chosen: list[Strategy] = []
    cut: dict[str, float] = {}
    mesh = call.tensors[0].mesh

    def span_of(factor: str) -> Span:
        """Return the part of a factor that earlier axes leave; a rank outside the mesh gives that of the first rank."""
        where = mesh.get_coordinate() or (0,) * mesh.ndim
        return _span(mesh, rule.sizes[factor], _cut_axes(chosen).get(factor, ()), chosen, where)

    nbytes = [_mean_bytes(platform, spec) for spec in call.tensors]
    # Greedy, axis by axis in the mesh's order, which is the order in which placements cut: a later axis cuts what
    # earlier ones leave. All choices together would be exponential in the axes; the search of redistributions then
    # brings inputs there in the fewest bytes, whatever was chosen.
    for axis, ranks in enumerate(mesh.shape):
        found = strategies(rule, _placed(call, axis), ranks, cut, _untouched(call, chosen), span_of)
        strategy = _choose(rule, call, registration, axis, found, nbytes)
        chosen.append(strategy)
        if strategy.factor is not None:
            parts = math.inf if isinstance(strategy.kind, RaggedShard) else ranks
            cut[strategy.factor] = cut.get(strategy.factor, 1) * parts
    return chosen


def _is_element_by_element(rule: Factorization) -> bool:
    """Tell if each element of the outputs depends on the inputs' at the same place and on scalars only."""
    dims = rule.outputs[0]
    # Strided shards have no factor of their own. Where elements do not meet, any layout that all operands share is
    # right, whatever its order.
    known = all(other == dims for other in rule.outputs) and all(other in (dims, ()) for other in rule.inputs)
    alike = known and all(len(dim) == 1 for dim in dims)
    special = (
        rule.limits.fixed
        or rule.work.by_factor
        or rule.work.localize
        or rule.limits.picked
        or rule.operands.ignored
        or rule.limits.nonempty
        or rule.limits.known_spans
    )
    return alike and not special


def _stay_strided(specs: Sequence[TensorSpec], in_place: bool) -> bool:
    """Tell if the first has strided shards, and the others are cut in this way, scalars replicated. Where the first is
    written, the others are brought to it. Factors know chunks and ragged parts only.
    """
    first = next((spec for spec in specs if spec.ndim), specs[0])
    strided = any(isinstance(p, StridedShard) for p in first.placements)
    return (
        strided
        and not first.is_partial
        and all(
            spec.shape == first.shape and (in_place or spec.placements == first.placements)
            if spec.ndim
            else in_place or spec.is_replicated()
            for spec in specs
        )
    )


def _placed(call: OpCall, axis: int) -> list[Placement]:
    return [spec.placements[axis] for spec in call.tensors]


def _untouched(call: OpCall, chosen: list[Strategy]) -> list[bool]:
    """Per tensor whether earlier axes cut it as they do now, so that ragged units on later ones still fit."""
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
    axis: int,
    found: list[Strategy],
    nbytes: list[float],
) -> Strategy:
    ranks, current = call.tensors[0].mesh.shape[axis], _placed(call, axis)
    if registration.in_place:
        # What is written keeps its placement: other views and the optimizer's state rely on it.
        found = [strategy for strategy in found if strategy.inputs[0] == strategy.outputs[0] == current[0]]
        if not found:
            refusal = call.refuse(f"in place it would have to change the placement {current[0]} of its first argument")
            if current[0].is_partial() or not writes_result_of(call.name):
                raise refusal
            raise KeptPlacementError(str(refusal))
    if rule.operands.written:
        found = [strategy for strategy in found if all(strategy.inputs[i] == current[i] for i in rule.operands.written)]
        if not found:
            placed = ", ".join(str(current[i]) for i in sorted(rule.operands.written))
            raise call.refuse(f"it would have to change the placements {placed} of tensors that it writes")
    return cheapest(found, current, nbytes, ranks).with_ignored(rule.operands.ignored, current)


def _mean_bytes(platform: Platform, spec: TensorSpec) -> float:
    """Bytes of a shard, the mean over ranks: a choice must not depend on which rank makes it."""
    cut = (n for n, placement in zip(spec.mesh.shape, spec.placements, strict=True) if placement.is_shard())
    return math.prod(spec.shape) * platform.itemsize(spec.dtype) / math.prod(cut)


def factor_cuts(rule: Factorization, mesh: DeviceMesh, chosen: list[Strategy]) -> FactorCuts:
    """Return how the factors that `chosen`, one strategy per mesh axis, cuts lie on the ranks."""
    axes_of, sizes = _cut_axes(chosen), rule.sizes
    where = mesh.get_coordinate()
    return FactorCuts(
        sizes=sizes,
        axes=axes_of,
        spans={f: _span(mesh, sizes[f], axes, chosen, where) if where else (0, 0) for f, axes in axes_of.items()},
        lengths={f: _lengths(mesh, sizes[f], axes, chosen) for f, axes in axes_of.items()},
        parts={f: _all_parts(mesh, sizes[f], axes_of[f], chosen) for f in rule.limits.known_spans & {*axes_of}},
    )


def _cut_axes(chosen: list[Strategy]) -> dict[str, tuple[int, ...]]:
    axes: dict[str, tuple[int, ...]] = {}
    for axis, strategy in enumerate(chosen):
        if strategy.factor is not None:
            axes[strategy.factor] = (*axes.get(strategy.factor, ()), axis)
    return axes


def _span(
    mesh: DeviceMesh, size: int, axes: tuple[int, ...], chosen: list[Strategy], coordinate: Sequence[int]
) -> tuple[int, int]:
    """(start, length) of the part at a coordinate of a factor cut over `axes`."""
    start, length = 0, size
    for axis in axes:
        kind = chosen[axis].kind
        assert isinstance(kind, (Shard, RaggedShard))
        offset, length = kind.interval(length, mesh.shape[axis], coordinate[axis])
        start += offset
    return start, length


def _lengths(mesh: DeviceMesh, size: int, axes: tuple[int, ...], chosen: list[Strategy]) -> tuple[tuple[int, ...], ...]:
    """Per axis the lengths of the parts of its ranks, of a factor cut over `axes`; none outside the mesh."""
    coordinate, found = mesh.get_coordinate(), []
    for axis in axes if coordinate else ():
        kind = chosen[axis].kind
        assert isinstance(kind, (Shard, RaggedShard))
        found.append(tuple(kind.interval(size, mesh.shape[axis], rank)[1] for rank in range(mesh.shape[axis])))
        size = found[-1][coordinate[axis]] if coordinate else 0
    return tuple(found)


def _all_parts(mesh: DeviceMesh, size: int, axes: tuple[int, ...], chosen: list[Strategy]) -> tuple[Span, ...]:
    """Every rank's part of a factor cut over `axes`, the first axis outermost."""
    parts: list[Span] = [(0, size)]
    for axis in axes:
        kind = chosen[axis].kind
        assert isinstance(kind, (Shard, RaggedShard))
        parts = [each for part in parts for each in spans_of_ranks(kind, part, mesh.shape[axis])]
    return tuple(parts)


Plan = OpPlan | GatheringPlan | WritingPlan


def make_plan(
    platform: Platform, name: str, registration: Registration, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Plan:
    """Return the plan of a call.

    An operation in place that cannot work on the parts as they are writes the result of the one without underscore. A
    form that no rule covers runs on whole operands; so does an operation whose shapes depend on data, if all ranks
    have the data.
    """
    try:
        return _plan_by_rule(platform, name, registration, args, kwargs)
    except KeptPlacementError as error:
        return WritingPlan(platform, name, str(error))
    except NeedsReplicatedError as error:
        if registration.in_place:
            return WritingPlan(platform, name, str(error))
        return GatheringPlan(platform, name, str(error), always=True)
    except ShardingRuleError as error:
        tensors = [x.spec for _, x in locate_tensors(args, kwargs)]
        if not registration.data_dependent or not all(spec.is_replicated() for spec in tensors):
            raise
        check_one_mesh(name, tuple(tensors))
        return GatheringPlan(platform, name, str(error), always=True)


def _plan_by_rule(
    platform: Platform,
    name: str,
    registration: Registration,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> OpPlan:
    # Rules see tensors in the order of the signature, whatever the order in which a call names them.
    located = locate_tensors(args, dict(sorted(kwargs.items(), key=lambda item: registration.position(item[0]))))
    specs = tuple(x.spec for _, x in located)
    check_one_mesh(name, specs)
    check_lists(platform, name, args, kwargs)
    mesh = specs[0].mesh
    arguments = {key: specs_of(value) for key, value in bind(registration, args, kwargs).items()}
    call = OpCall(name, arguments, specs)
    check_known(registration, call, args)
    if registration.in_place and _is_first(registration, located[0][0]):
        check_reaches_original(name, located[0][1])  # no other placement would help
    rule = rule_of(registration, call)
    if _makes_integers(platform, specs, args, kwargs):
        # round(a) + round(b) is not round(a + b): a partial sum is reduced before it is rounded.
        rule = replace(rule, partial=replace(rule.partial, terms=None))
    chosen = choose_strategies(platform, rule, call, registration)
    outputs = tuple(
        (tuple(strategy.outputs[i] for strategy in chosen), rule.output_shape(i)) for i in range(len(rule.outputs))
    )
    cuts = factor_cuts(rule, mesh, chosen)
    return OpPlan(
        operation=name,
        platform=platform,
        mesh=mesh,
        registration=registration,
        inputs=Inputs(
            moves=_moves(name, located, chosen),
            replaced=_replacements(rule, mesh, outputs, specs[0].dtype, cuts.spans),
        ),
        outputs=Outputs(
            placed=outputs,
            view=registration.view and len(specs) == 1,
            copies=registration.view and any(strategy.factor in rule.partial.reduced for strategy in chosen),
        ),
        cuts=cuts,
        local=_local_function(rule, cuts.axes, chosen),
    )


def _is_first(registration: Registration, location: Location) -> bool:
    (place, *inside) = location
    return not inside and (place == 0 if isinstance(place, int) else registration.position(place) == 0)


def _makes_integers(
    platform: Platform, specs: tuple[TensorSpec, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Tell if data is rounded to a dtype among the arguments, or becomes truth values: then nothing is linear."""
    given = [platform.dtype_meant(value) for value in (*args, *kwargs.values())]
    wanted = [value for value in given if type(value) in dtype_classes(platform)]
    return any(rounds(platform, spec.dtype, dtype) for spec in specs for dtype in wanted)


def _moves(operation: str, located: list[tuple[Location, Any]], chosen: list[Strategy]) -> tuple[Move, ...]:
    moves = []
    for index, (location, x) in enumerate(located):
        placements = tuple(strategy.inputs[index] for strategy in chosen)
        target = x.spec.with_placements(placements)
        # Where ranks use a replicated value in different ways, R -> V: its gradient is a sum over them.
        vary = tuple(
            axis
            for axis, strategy in enumerate(chosen)
            if not strategy.is_replicated and strategy.inputs[index].is_replicate() and x.spec.mesh.shape[axis] > 1
        )
        if target is not x.spec or vary:
            moves.append(Move(operation, location, target if target is not x.spec else None, vary))
    return tuple(moves)


def _replacements(
    rule: Factorization,
    mesh: DeviceMesh,
    outputs: tuple[tuple[tuple[Placement, ...], tuple[int, ...]], ...],
    dtype: Any,
    spans: Mapping[str, Span],
) -> Mapping[str, Any]:
    # A static shape among the arguments (of `view`, `expand`, a factory) is the whole's; the local operation needs that
    # of the part.
    if rule.work.localize is None:
        return {}
    shapes = [TensorSpec(mesh, placements, shape, dtype).local_shape for placements, shape in outputs]
    return rule.work.localize(shapes, spans)


def _local_function(
    rule: Factorization, cut_axes: Mapping[str, Any], chosen: Sequence[Strategy]
) -> Callable[[LocalCall], Any] | None:
    if rule.work.on_shards is not None and not all(
        p.is_replicate() or p.is_partial() for s in chosen for p in s.outputs
    ):
        return rule.work.on_shards
    for factor in cut_axes:
        if factor in rule.work.by_factor:
            return rule.work.by_factor[factor]
    return None


INFINITE = float("inf")


def cheapest(found: Sequence[Strategy], current: Sequence[Placement], nbytes: Sequence[float], ranks: int) -> Strategy:
    """The strategy of fewest bytes; then the one that changes fewest inputs; then the first."""
    # All operands whole on this axis: every rank does the same work, and nothing is sent forward or backward. To cut
    # here would be free too, but would change the placements that a user sees.
    if all(placement.is_replicate() for placement in current):
        return found[0]
    return min(found, key=lambda strategy: _cost(strategy, current, nbytes, ranks))


def _cost(
    strategy: Strategy, current: Sequence[Placement], nbytes: Sequence[float], ranks: int
) -> tuple[float, float, int]:
    moves = list(zip(current, strategy.inputs, nbytes, strict=True))
    wire = sum(move_bytes(source, target, size, ranks) for source, target, size in moves)
    changes = sum(source != target for source, target, _ in moves)
    return wire, changes, strategy.is_replicated


def move_bytes(source: Placement, target: Placement, nbytes: float, ranks: int) -> float:
    """Bytes sent per rank to bring a tensor with `nbytes` on a rank from one placement to another."""
    if source == target:
        return 0.0
    match source, target:
        case (Partial(), Replicate()):
            # Of rings: an all-reduce is a reduce-scatter and an all-gather, each of which sends (ranks - 1) / ranks of
            # the tensor per rank (Patarasuk and Yuan, 2009).
            return 2 * nbytes * (ranks - 1) / ranks
        case (Partial(), Shard() | RaggedShard() | StridedShard()):
            return nbytes * (ranks - 1) / ranks
        case (Shard() | RaggedShard() | StridedShard(), Shard() | RaggedShard() | StridedShard()):
            return nbytes * (ranks - 1) / ranks
        case (Shard() | RaggedShard() | StridedShard(), Partial()):
            return 2 * nbytes * (ranks - 1)  # nothing is sent now, and all of it when the result is made whole
        case (Shard() | RaggedShard() | StridedShard(), _):
            return nbytes * (ranks - 1)
        case (Replicate(), Partial()) if target == Partial("sum"):
            return 0.0
        case (Replicate(), _):
            return 0.0
    return INFINITE
