"""Plans of redistributions: a problem in the search's terms, and the steps that its moves become.

Ragged shards in plans: they enter and leave that form in steps of their own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.exceptions import PlacementError
from hp_dtensor.redistribute.collectives import AllGather, AllReduce, AllToAll, ReduceScatter
from hp_dtensor.redistribute.costs import DEFAULT_COSTS, CostModel
from hp_dtensor.redistribute.exchange import Exchange, ReduceToOwners
from hp_dtensor.redistribute.ownership import Ownership, least_volume
from hp_dtensor.redistribute.plan import RedistributePlan, Scale, Stage, Step
from hp_dtensor.redistribute.search import REPLICATE, SUM, Move, Problem, cheapest_moves
from hp_dtensor.redistribute.segments import Placements, cuts_of, product
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec, require_placements

LINEAR = ("sum", "avg")


def plan_redistribute(
    mesh: DeviceMesh,
    source: Sequence[Placement],
    target: Sequence[Placement],
    shape: Sequence[int],
    itemsize: int = 4,
    costs: CostModel = DEFAULT_COSTS,
) -> RedistributePlan:
    """Return the cheapest steps from `source` to `target`; communicates nothing and needs no processes.

    Args:
        mesh: also one of a fake world.
        source, target: one placement per mesh axis.
        shape: the global shape.
        itemsize: bytes per element.
        costs: latency and bandwidth, and whether bytes or seconds count first.

    Returns:
        A plan with `steps`, `wire_bytes` (sent per rank, the mean over ranks), `seconds`; `print` explains it.

    Raises:
        MeshError: `mesh` is no mesh.
        PlacementError: placements that do not fit mesh or shape, or a redistribution that does not exist.

    Example:
        >>> with fake_world(8):
        ...     mesh = DeviceMesh("cuda", (8,))
        ...     plan = plan_redistribute(mesh, [Shard(0)], [Shard(1)], (1024, 1024), itemsize=2)
        >>> plan.wire_bytes == 1024 * 1024 * 2 // 8 * 7 // 8  # an all-to-all: each rank keeps an eighth of its part
        True
    """
    mesh = require_mesh("plan_redistribute", mesh)
    specs = [TensorSpec(mesh, require_placements("plan_redistribute", mesh, p), shape, None) for p in (source, target)]
    return plan_between(*specs, itemsize, costs)


@functools.lru_cache(maxsize=4096)
def plan_between(
    source: TensorSpec, target: TensorSpec, itemsize: int = 4, costs: CostModel = DEFAULT_COSTS
) -> RedistributePlan:
    """Return the plan from one spec to another of the same mesh and shape, cached."""
    if source.mesh != target.mesh:
        raise PlacementError(
            f"cannot plan between meshes: {source.mesh.describe()} -> {target.mesh.describe()}; use redistribute"
        )
    if source.shape != target.shape:
        raise PlacementError(f"cannot redistribute between shapes: {list(source.shape)} -> {list(target.shape)}")
    stages = [_Planner(first, second, itemsize, costs).stage() for first, second in _stages(source, target)]
    return RedistributePlan(source, target, itemsize, tuple(stages), plan_between)


# Partial results of different kinds -----------------------------------------------------------------------


def _stages(source: TensorSpec, target: TensorSpec) -> Iterator[tuple[TensorSpec, TensorSpec]]:
    """Yield (source, target) of each stage: two where one kind of partial results must be reduced before another is
    made.
    """
    kinds = _kinds(source), _kinds(target)
    if source is target:
        return
    for found in kinds:
        if len(found) > 1:
            raise PlacementError(
                f"cannot redistribute {source!r} to {target.describe_placements()}: partial "
                f"{' and '.join(sorted(found))} in one tensor have no common order of reduction; redistribute one axis "
                "before the other becomes partial"
            )
    # The sum of maxima is not the maximum of sums: the first kind is reduced on all its axes before the second begins.
    if kinds[0] and kinds[1] and kinds[0] != kinds[1]:
        middle = target.with_placements([REPLICATE if p.is_partial() else p for p in target.placements])
        yield source, middle
        yield middle, target
    else:
        yield source, target


def _kinds(spec: TensorSpec) -> set[str]:
    cuts = zip(spec.mesh.shape, spec.placements, strict=True)
    ops = {p.reduce_op for n, p in cuts if isinstance(p, Partial) and n > 1}
    return {"sum" if op in LINEAR else op for op in ops}


def _average_factors(source: TensorSpec, target: TensorSpec) -> tuple[int, int]:
    """Return (times, divided by) where averages become sums or sums averages; what is whole counts as a sum."""
    up, down = (
        math.prod(n for n, p in zip(spec.mesh.shape, spec.placements, strict=True) if p == Partial("avg"))
        for spec in (target, source)
    )
    common = math.gcd(up, down)
    return up // common, down // common


class _Planner:
    """Planner of one stage: the search's moves as steps, with ragged shards and averages around them."""

    def __init__(self, source: TensorSpec, target: TensorSpec, itemsize: int, costs: CostModel) -> None:
        self.source, self.target, self.itemsize, self.costs = source, target, itemsize, costs
        self.mesh, self.shape = source.mesh, source.shape
        self.mesh_shape = self.mesh.shape
        self.names = self.mesh.mesh_dim_names
        self.op = next(iter(_kinds(source) | _kinds(target)), "sum")
        self.factors = _average_factors(source, target) if self.op == "sum" else (1, 1)

    def stage(self) -> Stage:
        # Average or sum, the bytes that move are the same: the search knows sums only, and one scale at the end makes
        # averages of them, or sums of averages.
        first, last = self._plain(self.source.placements), self._plain(self.target.placements, self.source.placements)
        found: list[Step] = []
        if first != last:
            before, middle, after = around_ragged(self.mesh_shape, first, last)
            for a, b in before:
                found.append(self._on_own_line(a, b))
            found += [self._step(move) for move in self._moves(*middle)]
            for a, b in after:
                found.append(self._on_own_line(a, b))
        if self.factors != (1, 1):
            found.append(self._scale(last))
        return Stage(self.source, self.target, tuple(found), self.op, self.factors, self.itemsize, replan=plan_between)

    def _plain(self, placements: Placements, before: Placements | None = None) -> Placements:
        """Return placements in the search's terms: axes of one rank are replicated, averages are sums, and new partial
        max or min is replicated.
        """
        result: list[Placement] = []
        for axis, placement in enumerate(placements):
            if self.mesh_shape[axis] == 1:
                result.append(REPLICATE)
            elif isinstance(placement, Partial):
                result.append(self._plain_partial(placement, before[axis] if before is not None else placement))
            else:
                result.append(placement)
        return tuple(result)

    def _plain_partial(self, placement: Partial, before: Placement) -> Placement:
        # What is whole becomes a partial sum without a message: the first rank of the axis keeps its values, the others
        # take zeros. Of max and min every rank keeps its copy, which no reduction changes; a product has no such form,
        # for one rank's values times copies would be a power.
        if placement.reduce_op in LINEAR:
            return SUM
        if before == placement:
            return placement
        if placement.reduce_op == "product":
            raise PlacementError(
                f"cannot make {placement} of {self.source.describe_placements()}; only sum, avg, max and min"
            )
        return REPLICATE

    # Moves and steps -------------------------------------------------------------------------------------

    def _moves(self, source: Placements, target: Placements) -> tuple[Move, ...]:
        if source == target:
            return ()
        # Nothing to send, whatever the cuts are: only the shapes of the empty shards change.
        if 0 in self.shape:
            return (Move("slice", (), source, target, 0),)
        # The search must give every rank the same plan, and ragged parts are known on this rank's own line only. So it
        # sees plain shards there, and is told never to take such a dimension for evenly cut.
        uneven = frozenset(p.dim for p in (*source, *target) if isinstance(p, RaggedShard))
        first, last = without_ragged(source), without_ragged(target)
        small = _smallest_alike(self.shape, self.mesh_shape, first, last, uneven)
        # Where latency counts, the best plan of 1 kB is not that of 1 GB. Powers of two keep the cached plans few.
        size_class = (math.prod(self.shape) * self.itemsize).bit_length() if self.costs.depends_on_size else 0
        moves = _found_moves(
            small, self.mesh_shape, first, last, self.op == "sum", uneven, self.costs, self.names, size_class
        )
        scale, unit = math.prod(self.shape), math.prod(small)
        back = {first: source, last: target} if uneven else {}
        scaled = [replace(move, elements=move.elements * scale // unit) for move in moves]
        return tuple(self._with_ragged(move, source, back) for move in scaled) if uneven else tuple(scaled)

    def _with_ragged(self, move: Move, source: Placements, back: dict[Placements, Placements]) -> Move:
        first, last = restored(move.source, source, back), restored(move.target, source, back)
        elements = move.elements
        if move.name in ("exchange", "all_to_all") and move.volume is None:
            elements = self._exact_volume(first, last, elements)
        return replace(move, source=first, target=last, elements=elements)

    def _exact_volume(self, source: Placements, target: Placements, otherwise: int) -> int:
        """Return the elements that all ranks send where ragged parts are the same on every line, else `otherwise`."""
        still = [s == t and not s.is_shard() for s, t in zip(source, target, strict=True)]
        ranks = [1 if alone else n for n, alone in zip(self.mesh_shape, still, strict=True)]
        try:
            return least_volume(self.shape, ranks, source, target).total * self.mesh.size() // math.prod(ranks)
        except PlacementError:
            return otherwise

    def _step(self, move: Move) -> Step:
        wire_bytes = move.elements * self.itemsize / self.mesh.size()
        return self._make(move, wire_bytes)

    def _make(self, move: Move, wire_bytes: float) -> Step:
        seconds = self.costs.seconds(move.name, [self.names[a] for a in move.axes], wire_bytes)
        kind = AllToAll if self._is_regular(move) else _STEPS.get(move.name, Exchange)
        step = kind(move.name, self.mesh, move.axes, move.source, move.target, wire_bytes, seconds)
        if isinstance(step, (ReduceScatter, AllReduce, ReduceToOwners)):
            step.op = self.op
        if isinstance(step, (Exchange, ReduceToOwners)):
            step.ownership = Ownership(self.shape, self.mesh_shape, move.source, move.target, move.volume)
        return step

    def _is_regular(self, move: Move) -> bool:
        """Return whether an all-to-all cuts both its dimensions into equal parts, inside all other cuts."""
        changed = tuple(a for a, (s, t) in enumerate(zip(move.source, move.target, strict=True)) if s != t)
        if move.name != "all_to_all" or changed != move.axes:
            return False
        return all(self._is_even_inside(placements, *move.axes) for placements in (move.source, move.target))

    def _is_even_inside(self, placements: Placements, axis: int) -> bool:
        """Return whether the dimension that `axis` cuts is cut in chunk order, evenly, and by this axis last."""
        dim: int = placements[axis].dim  # type: ignore[attr-defined]
        cuts = cuts_of(placements, dim)
        parts = product(self.mesh_shape, [a for a, _ in cuts])
        return cuts[-1][0] == axis and all(type(p) is Shard for _, p in cuts) and self.shape[dim] % parts == 0

    def _scale(self, placements: Placements) -> Step:
        step = Scale("scale", self.mesh, (), placements, placements, 0.0, 0.0)
        step.up, step.down = self.factors
        return step

    def _on_own_line(self, source: Placements, target: Placements) -> Step:
        """Return a step on one axis, planned with the parts that this rank's line knows; other lines may have other
        ragged parts.
        """
        (axis,) = (a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s != t)
        # Along this line all ranks hold the same rows of the other axes, so the step is planned as one of a 1-D mesh
        # whose tensor is what the line holds together.
        around = [REPLICATE if a == axis else p for a, p in enumerate(source)]
        where = self.mesh.get_coordinate() or (0,) * self.mesh.ndim
        held = self.source.with_placements(around).ranges(where)
        shape = [sum(stop - start for start, stop in ranges) for ranges in held]
        pair = (source[axis],), (target[axis],)
        volume = least_volume(shape, (self.mesh_shape[axis],), *pair)
        reduces = bool(volume.reduced)
        name = "reduce_to_owners" if reduces else "exchange" if volume.total else "slice"
        axes = (axis,) if volume.total else ()
        if reduces:
            volume = type(volume)(volume.reducing, volume.moving, (axis,), ())
        move = Move(name, axes, source, target, volume.total, volume if reduces else None)
        lines = self.mesh.size() // self.mesh_shape[axis]
        elements = self._exact_volume(source, target, volume.total * lines)
        return self._make(move, elements * self.itemsize / self.mesh.size())


_STEPS: dict[str, type[Step]] = {
    "all_gather": AllGather,
    "all_reduce": AllReduce,
    "reduce_scatter": ReduceScatter,
    "reduce_to_owners": ReduceToOwners,
}


@functools.lru_cache(maxsize=4096)
def _found_moves(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    source: Placements,
    target: Placements,
    linear: bool,
    uneven: frozenset[int],
    costs: CostModel,
    names: tuple[str, ...],
    size_class: int,
) -> tuple[Move, ...]:
    """Return the moves for all tensors that are cut alike and have at most 2**size_class bytes and more than half of
    that.
    """
    scale = 2.0**size_class / max(math.prod(shape), 1) / math.prod(mesh_shape)

    def seconds(name: str, axes: tuple[int, ...], elements: int) -> float:
        return costs.seconds(name, [names[a] for a in axes], elements * scale)

    problem = Problem(shape, mesh_shape, target, linear, seconds, uneven)
    return cheapest_moves(problem, source, costs.minimize == "bytes")


def _smallest_alike(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    source: Placements,
    target: Placements,
    uneven: frozenset[int],
) -> tuple[int, ...]:
    """Return the smallest shape that is cut in the same proportions: all such shapes share one plan.

    Ragged parts stand for any: their dimension is long enough for every cut to divide it.
    """
    every = math.prod(
        n for n, s, t in zip(mesh_shape, source, target, strict=True) if not (s == t and s.is_replicate())
    )
    # A reduction may be divided over every axis, replicated ones too, and then cuts by those.
    if any(s.is_partial() for s in source):
        every = math.prod(mesh_shape)
    result = []
    for dim, size in enumerate(shape):
        cut = (*cuts_of(source, dim), *cuts_of(target, dim))
        unit = product(mesh_shape, sorted({axis for axis, _ in cut}))
        unit *= math.prod(p.split_factor for _, p in cut if isinstance(p, StridedShard))
        if dim in uneven:
            result.append(max(size, unit))
        else:
            # Multiples of the unit share a plan; the gcd keeps apart those which further cuts of the search can divide
            # from those which they cannot.
            result.append(size if size % unit else unit * math.gcd(size // unit, every))
    return tuple(result)


def without_ragged(placements: Placements) -> Placements:
    return tuple(Shard(p.dim) if isinstance(p, RaggedShard) else p for p in placements)


def restored(state: Placements, source: Placements, back: dict[Placements, Placements]) -> Placements:
    """Return a state of the search with the ragged shards that stood still in place again."""
    if state in back:
        return back[state]
    return tuple(p if isinstance(p, RaggedShard) else now for p, now in zip(source, state, strict=True))


# Ragged shards --------------------------------------------------------------------------------------------

_Links = list[tuple[Placements, Placements]]


def around_ragged(
    mesh_shape: tuple[int, ...], source: Placements, target: Placements
) -> tuple[_Links, tuple[Placements, Placements], _Links]:
    """Return (steps before, the pair to plan freely, steps after), each step a pair of placements.

    Ragged parts are known on an axis' own line only, so an axis that is ragged now or then, and does not
    stand still, leaves and takes that form in steps of its own.
    """
    moving = _moving(mesh_shape, source, target)
    ragged = [a for a in moving if isinstance(source[a], RaggedShard) or isinstance(target[a], RaggedShard)]
    if not ragged:
        return [], (source, target), []
    # One axis by itself needs no detour: both forms are known on its line.
    if len(moving) == 1:
        return [(source, target)], (target, target), []
    before = _unragged(source, target, moving)
    after = _unragged(target, source, moving)
    first, last = (before[-1][1] if before else source), (after[-1][1] if after else target)
    return before, (first, last), [(b, a) for a, b in reversed(after)]


def _moving(mesh_shape: tuple[int, ...], source: Placements, target: Placements) -> list[int]:
    """Return the axes that differ, and those whose part of a dimension depends on one that does."""
    differ = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s != t]
    dims = {
        p.dim: min(a for a in differ if source[a].is_shard(p.dim) or target[a].is_shard(p.dim))
        for a in differ
        for p in (source[a], target[a])
        if isinstance(p, (Shard, StridedShard, RaggedShard))
    }
    return [
        a
        for a, p in enumerate(source)
        if a in differ or (isinstance(p, (Shard, StridedShard, RaggedShard)) and a > dims.get(p.dim, len(mesh_shape)))
    ]


def _unragged(placements: Placements, other: Placements, moving: Sequence[int]) -> _Links:
    """Return steps from `placements` to others without ragged shards on the moving axes, one axis at a time, innermost
    first.
    """
    dims = {p.dim: a for a in reversed(moving) if isinstance(p := placements[a], RaggedShard)}
    links: _Links = []
    now = placements
    for axis in reversed(range(len(placements))):
        placement = now[axis]
        if not isinstance(placement, (Shard, StridedShard, RaggedShard)) or axis < dims.get(placement.dim, len(now)):
            continue
        outermost = axis == dims[placement.dim]
        # A plain shard where the other side is cut here too; a dimension that is to be whole is gathered at once, not
        # cut anew first.
        to_shard = outermost and not other[axis].is_replicate()
        new: Placement = Shard(placement.dim) if to_shard else Replicate()
        after = (*now[:axis], new, *now[axis + 1 :])
        links.append((now, after))
        now = after
    return links
