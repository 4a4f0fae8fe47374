"""One operation on DTensors: look up its plan, bring the inputs to it, run it locally, attach the spec.

A plan depends on the operation, the specs of its tensors and its static arguments, and is made once. In
steady state an operation costs a dictionary look-up, the local operation and a wrapper.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.debug.comm_debug import check_explicit
from hp_dtensor.dispatch import implicit_regions, in_place
from hp_dtensor.dispatch.arguments import (
    Location,
    Uncached,
    bind,
    check_known,
    check_lists,
    check_one_mesh,
    dtype_classes,
    key_of,
    locate_tensors,
    no_rule,
    replace_at,
    replace_static,
    rule_of,
    specs_of,
)
from hp_dtensor.exceptions import HPError, MeshError, PlacementError, ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute import plan_between
from hp_dtensor.rules.engine.cost import cheapest
from hp_dtensor.rules.engine.factors import Factorization, Part, Strategy, parts_of, strategies
from hp_dtensor.rules.engine.local_call import LocalCall
from hp_dtensor.rules.engine.registry import OpCall, Registration, RuleRegistry
from hp_dtensor.rules.indexing.index_lists import INDEXING, with_positions
from hp_dtensor.rules.pointwise import rounds
from hp_dtensor.spec.placements import Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor import conversions
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any
CACHE_SIZE = 16384

_plans: dict[Any, Plan] = {}


@functools.cache
def rule_registry() -> RuleRegistry:
    """All sharding rules: the built-in ones, then those of plugins."""
    from hp_dtensor.platform.plugins import plugin_manager
    from hp_dtensor.rules.builtin import register_builtin_rules

    registry = RuleRegistry()
    register_builtin_rules(registry)
    plugin_manager().hook.hp_sharding_rules(registry=registry)
    return registry


def dispatch(
    platform: Platform, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run operation `name` on arguments of which at least one is a DTensor.

    Args:
        func: the framework's own function; called with local data in the given argument structure.

    Raises:
        ShardingRuleError: the operation has no rule, or its rule refuses these specs.
        MixedOperandsError: plain tensors or other meshes among the arguments.
    """
    if implicit_regions.is_replicating():
        args, kwargs = implicit_regions.lifted(platform, name, args, kwargs)
    if name in INDEXING:
        args = with_positions(platform, args)
    return plan_for(platform, name, args, kwargs).run(func, args, kwargs)


def plan_for(platform: Platform, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
    """The plan of a call, cached unless an argument forbids it."""
    registration = rule_registry().get(name)
    if registration is None:
        if in_place.writes_result_of(name):
            return in_place.WritingPlan(platform, name, in_place.refusal(name, args, kwargs))
        if implicit_regions.is_replicating():
            return implicit_regions.GatheringPlan(platform, name, no_rule(name, args, kwargs))
        raise ShardingRuleError(no_rule(name, args, kwargs))
    try:
        key = name, key_of(platform, name, args, registration), key_of(platform, name, kwargs, registration)
    except Uncached:
        return _plan_or_whole(platform, name, registration, args, kwargs)
    plan = _plans.get(key)
    if plan is None:
        plan = _plan_or_whole(platform, name, registration, args, kwargs)
        if len(_plans) >= CACHE_SIZE:
            _plans.clear()
        _plans[key] = plan
    return plan


def forget_plans() -> None:
    """Drop every cached plan, and with them the meshes and worlds they hold; for platforms that leave a job."""
    _plans.clear()
    plan_between.cache_clear()


@dataclass(frozen=True, slots=True)
class Move:
    """What happens to one tensor argument before the local operation."""

    operation: str
    location: Location
    target: TensorSpec | None
    vary: tuple[int, ...]

    def apply(self, x: Any) -> Any:
        if self.target is not None:
            check_explicit(self.operation, self.location, x.spec, self.target)
            try:
                x = conversions.redistribute_to(x, self.target)
            except PlacementError as error:
                raise PlacementError(f"{self.operation}: {error}") from None
        return conversions.vary(x, self.vary) if self.vary else x


@dataclass(slots=True)
class OpPlan:
    """How one call runs on this rank.

    Attributes:
        moves: tensor arguments to redistribute or to take a varying view of.
        replaced: static arguments with a local value.
        outputs: placements and global shape per output.
        view: results share the storage of the first argument.
        copies: they would, but do not where `local` runs.
    """

    operation: str
    platform: Platform
    mesh: DeviceMesh
    registration: Registration
    moves: tuple[Move, ...]
    replaced: Mapping[str, Any]
    outputs: tuple[tuple[tuple[Placement, ...], tuple[int, ...]], ...]
    local: Callable[[LocalCall], Any] | None
    sizes: Mapping[str, int]
    spans: Mapping[str, tuple[int, int]]
    lengths: Mapping[str, tuple[tuple[int, ...], ...]]
    parts: Mapping[str, tuple[Part, ...]]
    cut_axes: Mapping[str, tuple[int, ...]]
    view: bool
    copies: bool
    specs: list[TensorSpec | None] = field(default_factory=list)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the call on `args` and `kwargs`, which have the structure the plan was made for."""
        if self.registration.in_place:
            in_place.check_reaches_original(self.operation, self._first(args, kwargs))
        try:
            if self.moves or self.replaced or self.local is not None:
                return self._run_changed(func, args, dict(kwargs))
            with self.platform.local_op():
                result = func(*args, **kwargs)
        except Exception as error:
            self._check_inside(error)
            raise
        if self.registration.in_place:
            return self._first(args, kwargs)
        wrapped = self._wrap(result)
        if self.view and self._first(args, kwargs)._copied_by is not None:
            self._mark_copies(wrapped, self._first(args, kwargs)._copied_by)
        return wrapped

    def _check_inside(self, error: Exception) -> None:
        """Say of a framework's error what it comes of, where that is working on nothing."""
        if isinstance(error, HPError) or self.mesh.get_coordinate() is not None:
            return
        raise MeshError(
            f"{self.operation}: rank {self.mesh.world.rank} is outside mesh {self.mesh.describe()} and holds nothing, "
            f"which {self.platform.name} cannot do this on ({error}). Call it where mesh.get_coordinate() is not None."
        ) from error

    def _first(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[0] if args else kwargs[self.registration.first_among(kwargs)]

    def _run_changed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first, new_args = self._first(args, kwargs), list(args)
        for move in self.moves:
            replace_at(new_args, kwargs, move.location, move.apply)
        result = self._run_local(func, new_args, kwargs)
        if self.registration.in_place:
            return first
        wrapped = self._wrap(result)
        if self.copies or (self.view and any(move.target is not None for move in self.moves)):
            self._mark_copies(wrapped, self.operation)
        elif self.view and first._copied_by is not None:
            self._mark_copies(wrapped, first._copied_by)
        return wrapped

    def _run_local(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        if self.local is not None:
            return self.local(self._local_call(func, args, kwargs))
        if self.replaced:
            args = replace_static(self.registration, args, kwargs, self.replaced)
        with self.platform.local_op():
            return func(*args, **kwargs)

    @staticmethod
    def _mark_copies(wrapped: Any, made_by: str) -> None:
        for x in wrapped if isinstance(wrapped, (tuple, list)) else (wrapped,):
            x._copied_by = made_by

    def _local_call(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> LocalCall:
        unwrap = self.platform.unwrap
        bound = {
            name: unwrap(value) if isinstance(value, DTensor) else value
            for name, value in bind(self.registration, tuple(args), kwargs).items()
        }
        inside = self.mesh.get_coordinate() is not None  # a rank outside the mesh works on nothing, alone
        groups = {
            factor: tuple(self.mesh.get_group(axis) for axis in axes if inside)
            for factor, axes in self.cut_axes.items()
        }
        parts = {
            factor: (self.mesh.group_over(self.cut_axes[factor]), held) for factor, held in self.parts.items() if inside
        }
        placements, shape = self.outputs[0]
        output = TensorSpec(self.mesh, placements, shape, None)
        rest = [unwrap(x) if isinstance(x, DTensor) else x for x in args[1:]]
        named = {name: unwrap(x) if isinstance(x, DTensor) else x for name, x in kwargs.items()}

        def on(x: Tensor, **static: Any) -> Any:
            given, by_name = [x, *rest] if args else [], dict(named)
            if not args:
                by_name[self.registration.first_among(named)] = x
            if static:
                given = replace_static(self.registration, given, by_name, static)
            return func(*given, **by_name)

        return LocalCall(
            self.platform, self.operation, bound, self.spans, self.lengths, groups, parts, self.sizes, output, on
        )

    def _wrap(self, result: Any) -> Any:
        if result is NotImplemented:  # an operator and an operand of a foreign type: Python asks that one
            return result
        if isinstance(result, (tuple, list)):
            wrapped = [self._adopt(x, index) for index, x in enumerate(result)]
            return tuple(wrapped) if type(result) is tuple else type(result)(wrapped)
        return self._adopt(result, 0)

    def _adopt(self, local: Any, index: int) -> Any:
        if not self.specs:
            self.specs = [None] * len(self.outputs)
        spec = self.specs[index]
        if spec is None or spec.dtype != local.dtype:
            placements, shape = self.outputs[index]
            spec = TensorSpec(self.mesh, placements, shape, local.dtype)
            self._check_shape(local, spec)
            self.specs[index] = spec
        elif self.registration.own:  # another function of this name may have come here
            self._check_shape(local, spec)
        if not self.registration.own:
            return self.platform.adopt(local, spec)
        if self.platform.is_grad_enabled() and self.platform.requires_grad(local):
            return self.platform.wrap(local, spec)
        return self.platform.adopt(self.platform.detach(local), spec)

    def _check_shape(self, local: Any, spec: TensorSpec) -> None:
        got = self.platform.local_shape(local)
        if got != spec.local_shape:
            raise ShardingRuleError(
                f"{self.operation}: the sharding rule expects a result {list(spec.local_shape)} on this rank, the "
                f"operation gave {list(got)}; the rule does not cover this form of the call. Write it in another "
                "way, or run it on local tensors (to_local, local_map)."
            )


Plan = OpPlan | implicit_regions.GatheringPlan | in_place.WritingPlan


def _plan_or_whole(
    platform: Platform, name: str, registration: Registration, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Plan:
    """A plan; for an operation whose shapes depend on data, and whose data all ranks have, one that makes none; for one
    in place that cannot work on the parts as they are, one that writes the result of the operation that can."""
    try:
        return _make_plan(platform, name, registration, args, kwargs)
    except in_place.KeptPlacementError as error:
        return in_place.WritingPlan(platform, name, str(error))
    except ShardingRuleError as error:
        tensors = [x.spec for _, x in locate_tensors(args, kwargs)]
        if not registration.data_dependent or not all(spec.is_replicated() for spec in tensors):
            raise
        check_one_mesh(name, tuple(tensors))
        return implicit_regions.GatheringPlan(platform, name, str(error), always=True)


# Making plans --------------------------------------------------------------------------------------------


def _make_plan(
    platform: Platform,
    name: str,
    registration: Registration,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> OpPlan:
    located = locate_tensors(args, dict(sorted(kwargs.items(), key=lambda item: registration.position(item[0]))))
    specs = tuple(x.spec for _, x in located)
    check_one_mesh(name, specs)
    check_lists(platform, name, args, kwargs)
    mesh = specs[0].mesh
    arguments = {key: specs_of(value) for key, value in bind(registration, args, kwargs).items()}
    call = OpCall(name, arguments, specs)
    check_known(registration, call, args)
    if registration.in_place and _is_first(registration, located[0][0]):
        in_place.check_reaches_original(name, located[0][1])  # no other placement would help
    rule = rule_of(registration, call)
    if _makes_integers(platform, specs, args, kwargs):
        rule = replace(rule, terms=None)
    chosen = _choose_strategies(platform, rule, call, registration)
    outputs = tuple(
        (tuple(strategy.outputs[i] for strategy in chosen), rule.output_shape(i)) for i in range(len(rule.outputs))
    )
    cut_axes = _cut_axes(chosen)
    where = mesh.get_coordinate()
    spans = {
        factor: _span(mesh, rule.sizes[factor], axes, chosen, where) if where else (0, 0)
        for factor, axes in cut_axes.items()
    }
    return OpPlan(
        name,
        platform,
        mesh,
        registration,
        _moves(name, located, chosen),
        _replacements(rule, mesh, outputs, specs[0].dtype, spans),
        outputs,
        _local_function(rule, cut_axes, chosen),
        rule.sizes,
        spans,
        {factor: _lengths(mesh, rule.sizes[factor], axes, chosen) for factor, axes in cut_axes.items()},
        {factor: _all_parts(mesh, rule.sizes[factor], cut_axes[factor], chosen) for factor in rule.known & {*cut_axes}},
        cut_axes,
        registration.view and len(specs) == 1,
        registration.view and any(strategy.factor in rule.reduced for strategy in chosen),
    )


def _is_first(registration: Registration, location: Location) -> bool:
    (place, *inside) = location
    return not inside and (place == 0 if isinstance(place, int) else registration.position(place) == 0)


def _makes_integers(
    platform: Platform, specs: tuple[TensorSpec, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether data is rounded to a dtype among the arguments, or becomes truth values: then nothing is linear."""
    given = [platform.dtype_meant(value) for value in (*args, *kwargs.values())]
    wanted = [value for value in given if type(value) in dtype_classes(platform)]
    return any(rounds(platform, spec.dtype, dtype) for spec in specs for dtype in wanted)


def _choose_strategies(
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

    def part_of(factor: str) -> Part:
        """What earlier axes leave of it; a rank outside the mesh says what its first rank would."""
        where = mesh.get_coordinate() or (0,) * mesh.ndim
        return _span(mesh, rule.sizes[factor], _cut_axes(chosen).get(factor, ()), chosen, where)

    nbytes = [_mean_bytes(platform, spec) for spec in call.tensors]
    for axis, ranks in enumerate(mesh.shape):
        found = strategies(rule, _placed(call, axis), ranks, cut, _untouched(call, chosen), part_of)
        strategy = _choose(rule, call, registration, axis, found, nbytes)
        chosen.append(strategy)
        if strategy.factor is not None:
            parts = math.inf if isinstance(strategy.kind, RaggedShard) else ranks
            cut[strategy.factor] = cut.get(strategy.factor, 1) * parts
    return chosen


def _is_element_by_element(rule: Factorization) -> bool:
    """Whether each element of the outputs comes of the inputs' at the same place, of scalars, and of nothing else."""
    dims = rule.outputs[0]
    known = all(other == dims for other in rule.outputs) and all(other in (dims, ()) for other in rule.inputs)
    alike = known and all(len(dim) == 1 for dim in dims)
    special = rule.fixed or rule.local or rule.localize or rule.kept or rule.ignored or rule.nonempty or rule.known
    return alike and not special


def _stay_strided(specs: Sequence[TensorSpec], in_place: bool) -> bool:
    """Whether the first has strided shards, and the others are cut in this way, scalars replicated. Where the first is
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
        found = [strategy for strategy in found if strategy.inputs[0] == strategy.outputs[0] == current[0]]
        if not found:
            refusal = call.refuse(f"in place it would have to change the placement {current[0]} of its first argument")
            if current[0].is_partial() or not in_place.writes_result_of(call.name):
                raise refusal
            raise in_place.KeptPlacementError(str(refusal))
    if rule.written:
        found = [strategy for strategy in found if all(strategy.inputs[i] == current[i] for i in rule.written)]
        if not found:
            placed = ", ".join(str(current[i]) for i in sorted(rule.written))
            raise call.refuse(f"it would have to change the placements {placed} of tensors that it writes")
    return cheapest(found, current, nbytes, ranks).keeping(rule.ignored, current)


def _mean_bytes(platform: Platform, spec: TensorSpec) -> float:
    """Bytes of a shard, the mean over ranks: a choice must not depend on which rank makes it."""
    cut = (n for n, placement in zip(spec.mesh.shape, spec.placements, strict=True) if placement.is_shard())
    return math.prod(spec.shape) * platform.itemsize(spec.dtype) / math.prod(cut)


def _moves(operation: str, located: list[tuple[Location, Any]], chosen: list[Strategy]) -> tuple[Move, ...]:
    moves = []
    for index, (location, x) in enumerate(located):
        placements = tuple(strategy.inputs[index] for strategy in chosen)
        target = x.spec.with_placements(placements)
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
    spans: Mapping[str, Part],
) -> Mapping[str, Any]:
    if rule.localize is None:
        return {}
    shapes = [TensorSpec(mesh, placements, shape, dtype).local_shape for placements, shape in outputs]
    return rule.localize(shapes, spans)


def _cut_axes(chosen: list[Strategy]) -> dict[str, tuple[int, ...]]:
    axes: dict[str, tuple[int, ...]] = {}
    for axis, strategy in enumerate(chosen):
        if strategy.factor is not None:
            axes[strategy.factor] = (*axes.get(strategy.factor, ()), axis)
    return axes


def _local_function(
    rule: Factorization, cut_axes: Mapping[str, Any], chosen: Sequence[Strategy]
) -> Callable[[LocalCall], Any] | None:
    if rule.of_part is not None and not all(p.is_replicate() or p.is_partial() for s in chosen for p in s.outputs):
        return rule.of_part
    for factor in cut_axes:
        if factor in rule.local:
            return rule.local[factor]
    return None


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


def _all_parts(mesh: DeviceMesh, size: int, axes: tuple[int, ...], chosen: list[Strategy]) -> tuple[Part, ...]:
    """Every rank's part of a factor cut over `axes`, the first axis outermost."""
    parts: list[Part] = [(0, size)]
    for axis in axes:
        kind = chosen[axis].kind
        assert isinstance(kind, (Shard, RaggedShard))
        parts = [each for part in parts for each in parts_of(kind, part, mesh.shape[axis])]
    return tuple(parts)
