"""Choice of one strategy per mesh axis for a call, and the parts of its factors that follow from the choice."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.dispatch import in_place
from hp_dtensor.dispatch.cost import cheapest
from hp_dtensor.dispatch.op_plan import FactorCuts
from hp_dtensor.platform.interface import Platform
from hp_dtensor.rules.factors import Factorization, Part, Strategy, parts_of, strategies
from hp_dtensor.rules.registry import OpCall, Registration
from hp_dtensor.spec.placements import Placement, RaggedShard, Replicate, Shard, StridedShard
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

    def part_of(factor: str) -> Part:
        """Return the part of a factor that earlier axes leave; a rank outside the mesh gives that of the first rank."""
        where = mesh.get_coordinate() or (0,) * mesh.ndim
        return _span(mesh, rule.sizes[factor], _cut_axes(chosen).get(factor, ()), chosen, where)

    nbytes = [_mean_bytes(platform, spec) for spec in call.tensors]
    # Greedy, axis by axis in the mesh's order, which is the order in which placements cut: a later axis cuts what
    # earlier ones leave. All choices together would be exponential in the axes; the search of redistributions then
    # brings inputs there in the fewest bytes, whatever was chosen.
    for axis, ranks in enumerate(mesh.shape):
        found = strategies(rule, _placed(call, axis), ranks, cut, _untouched(call, chosen), part_of)
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
        rule.cuts.fixed
        or rule.work.by_factor
        or rule.work.localize
        or rule.cuts.kept
        or rule.operands.ignored
        or rule.cuts.nonempty
        or rule.cuts.known
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
            if current[0].is_partial() or not in_place.writes_result_of(call.name):
                raise refusal
            raise in_place.KeptPlacementError(str(refusal))
    if rule.operands.written:
        found = [strategy for strategy in found if all(strategy.inputs[i] == current[i] for i in rule.operands.written)]
        if not found:
            placed = ", ".join(str(current[i]) for i in sorted(rule.operands.written))
            raise call.refuse(f"it would have to change the placements {placed} of tensors that it writes")
    return cheapest(found, current, nbytes, ranks).keeping(rule.operands.ignored, current)


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
        parts={f: _all_parts(mesh, sizes[f], axes_of[f], chosen) for f in rule.cuts.known & {*axes_of}},
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


def _all_parts(mesh: DeviceMesh, size: int, axes: tuple[int, ...], chosen: list[Strategy]) -> tuple[Part, ...]:
    """Every rank's part of a factor cut over `axes`, the first axis outermost."""
    parts: list[Part] = [(0, size)]
    for axis in axes:
        kind = chosen[axis].kind
        assert isinstance(kind, (Shard, RaggedShard))
        parts = [each for part in parts for each in parts_of(kind, part, mesh.shape[axis])]
    return tuple(parts)
