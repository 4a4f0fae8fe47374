"""Making the plan of a call from its sharding rule and the specs of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.dispatch import in_place
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
from hp_dtensor.dispatch.op_plan import Inputs, Move, OpPlan, Outputs
from hp_dtensor.dispatch.plan_on_whole_operands import GatheringPlan
from hp_dtensor.dispatch.strategies import choose_strategies, factor_cuts
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.rules.factors import Factorization, LocalCall, Part, Strategy
from hp_dtensor.rules.pointwise import rounds
from hp_dtensor.rules.registry import NeedsReplicatedError, OpCall, Registration
from hp_dtensor.spec.placements import Placement
from hp_dtensor.spec.tensor_spec import TensorSpec

Plan = OpPlan | GatheringPlan | in_place.WritingPlan


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
    except in_place.KeptPlacementError as error:
        return in_place.WritingPlan(platform, name, str(error))
    except NeedsReplicatedError as error:
        if registration.in_place:
            return in_place.WritingPlan(platform, name, str(error))
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
        in_place.check_reaches_original(name, located[0][1])  # no other placement would help
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
    spans: Mapping[str, Part],
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
    if rule.work.of_part is not None and not all(p.is_replicate() or p.is_partial() for s in chosen for p in s.outputs):
        return rule.work.of_part
    for factor in cut_axes:
        if factor in rule.work.by_factor:
            return rule.work.by_factor[factor]
    return None
