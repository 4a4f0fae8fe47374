"""Planner: the cheapest sequence of collectives between two specs (Dijkstra's algorithm), as steps of a plan."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hp_dtensor.comm.links import DEFAULT_LINKS, Links
from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.exceptions import PlacementError
from hp_dtensor.redistribute.collectives import AllGather, AllReduce, AllToAll, ReduceScatter
from hp_dtensor.redistribute.exchange import Exchange, Ownership, ReduceToOwners, Volume, least_volume
from hp_dtensor.redistribute.plan import RedistributePlan, Scale, Stage, Step
from hp_dtensor.redistribute.segments import Placements, product, sharded_dim, shardings_of
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec, cached_by_spec, require_placements

MAX_STATES = 2000
"""The search visits at most this many states. Then it returns the direct exchange."""

REPLICATE, SUM = Replicate(), Partial()
Seconds = Callable[[str, tuple[int, ...], int], float]
"""Function from (collective, axes, elements that all ranks send) to the time of a step."""


@dataclass(frozen=True, slots=True)
class Move:
    """An edge of the search: a step without its mesh, so that tensors of different sizes can share it.

    Attributes:
        name, axes, source, target: as in `Step`.
        elements: number of elements that all ranks together send.
        volume: for `reduce_to_owners` and the exchange after it, how the reduction is divided among the owners.
    """

    name: str
    axes: tuple[int, ...]
    source: Placements
    target: Placements
    elements: int
    volume: Volume | None = None


def cheapest_moves(problem: Problem, source: Placements) -> tuple[Move, ...]:
    """Return the moves from `source` to the problem's target: of those with the fewest bytes the fastest."""
    # Tickets break ties: heap entries must never be compared by their placements, which have no order.
    ticket = itertools.count()
    queue: list[tuple[tuple[float, ...], int, Placements, tuple[Move, ...]]] = [((0.0, 0, 0, 0), 0, source, ())]
    done: set[Placements] = set()
    while queue and len(done) < MAX_STATES:
        cost, _, state, path = heapq.heappop(queue)
        if state == problem.target:
            return _merge_slices(path)
        if state in done:
            continue
        done.add(state)
        for moves in problem.moves(state):
            arrival = moves[-1].target
            spent = sum(move.elements for move in moves)
            # With the minimum still to come known exactly, an edge that would make the total exceed the minimum from
            # here is never followed. This prunes most of the states.
            if arrival in done or spent + problem.least(arrival).total > problem.least(state).total:
                continue
            heapq.heappush(queue, (_add(cost, moves, problem.seconds), next(ticket), arrival, (*path, *moves)))
    # Too many states on a mesh of many axes: the direct exchange sends the fewest bytes, though perhaps not fastest.
    return problem.direct(source)


def _add(cost: tuple[float, ...], moves: Sequence[Move], seconds: Seconds) -> tuple[float, ...]:
    """Return the cost of a path extended by `moves`: seconds, then irregular, communicating and local steps."""
    total, irregular, communicating, local = cost
    for move in moves:
        total += seconds(move.name, move.axes, move.elements)
        irregular += move.name in ("exchange", "all_to_all", "reduce_to_owners")
        communicating += move.name != "slice"
        local += move.name == "slice"
    return total, irregular, communicating, local


def _merge_slices(path: Sequence[Move]) -> tuple[Move, ...]:
    """Return the moves with consecutive local ones merged into one."""
    result: list[Move] = []
    for move in path:
        if move.name == "slice" and result and result[-1].name == "slice" and result[-1].volume is None:
            first = result.pop()
            result.append(Move("slice", (), first.source, move.target, 0))
        else:
            result.append(move)
    return tuple(result)


class Problem:
    """Redistributions of tensors of one shape to one target.

    Args:
        linear: partial results are sums. Otherwise they belong to an operation that cannot be undone, such as max.
        seconds: the time of a step.
        uneven_dims: dimensions with ragged shards, which never count as evenly sharded.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        mesh_shape: tuple[int, ...],
        target: Placements,
        linear: bool,
        seconds: Seconds,
        uneven_dims: frozenset[int] = frozenset(),
    ) -> None:
        self.shape, self.mesh_shape, self.target, self.linear = shape, mesh_shape, target, linear
        self.seconds, self._uneven = seconds, uneven_dims
        self.elements = math.prod(shape)
        self._least: dict[Placements, Volume] = {}

    def least(self, state: Placements) -> Volume:
        """Return the volume of the direct exchange from `state`, which is the minimum from there."""
        if state not in self._least:
            self._least[state] = least_volume(self.shape, self.mesh_shape, state, self.target, self.linear)
        return self._least[state]

    def direct(self, state: Placements) -> tuple[Move, ...]:
        """Return the moves of the direct exchange: a reduction to owners where one is needed, and an exchange."""
        volume = self.least(state)
        if not volume.reduced_axes:
            return (self._exchange(state, volume.moving, None),)
        # Between the two moves owners hold sums in a form that no placement describes. The target stands for it.
        reduce = Move("reduce_to_owners", volume.reduced_axes, state, self.target, volume.reducing, volume)
        # Even with nothing to send, an axis that becomes partial still needs zeros around its values.
        becomes_partial = any(
            t.is_partial() and not (s.is_partial() and a not in volume.reduced_axes)
            for a, (s, t) in enumerate(zip(state, self.target, strict=True))
        )
        if not volume.moving and not becomes_partial:
            return (reduce,)
        return reduce, self._exchange(state, volume.moving, volume)

    def _exchange(self, state: Placements, elements: int, volume: Volume | None) -> Move:
        if not elements:
            return Move("slice", (), state, self.target, 0, volume)
        axes = Ownership(self.shape, self.mesh_shape, state, self.target, volume).moving_axes
        # Along one axis, from one sharded dimension to another, an exchange is the framework's own all-to-all. Not
        # after a reduction to owners, where the source placements do not say what a rank holds.
        one_axis = len(axes) == 1 and state[axes[0]].is_shard() and self.target[axes[0]].is_shard()
        return Move(
            "all_to_all" if one_axis and volume is None else "exchange", axes, state, self.target, elements, volume
        )

    def moves(self, state: Placements) -> Iterator[tuple[Move, ...]]:
        """Yield the edges from a state. Each is one move, or the two moves of a direct exchange."""
        yield from self._slices(state)
        yield from self._all_gathers(state)
        yield from self._all_reduces(state)
        yield from self._reduce_scatters(state)
        # Legal from every state, so the search always ends.
        yield self.direct(state)

    def _slices(self, state: Placements) -> Iterator[tuple[Move, ...]]:
        reducing = bool(self.least(state).reduced_axes)
        for axis, (now, wanted) in enumerate(zip(state, self.target, strict=True)):
            options: list[Placement] = [wanted] if now != wanted else []
            # Replicas may divide a reduction among them: slice first, which is free, and gather the sums afterwards.
            if now.is_replicate() and reducing:
                options += [Shard(dim) for dim in range(len(self.shape)) if Shard(dim) != wanted]
            for option in options:
                if self._is_local(state, axis, option):
                    yield (Move("slice", (), state, _with(state, {axis: option}), 0),)

    def _is_local(self, state: Placements, axis: int, option: Placement) -> bool:
        now = state[axis]
        if option.is_shard():
            sliced = _with(state, {axis: option})
            return (
                # Only innermost: a new outer sharding would change the rows that an inner one holds, and so move data.
                now.is_replicate()
                and self._is_innermost(sliced, axis)
                and (option == self.target[axis] or self._is_even(sliced, sharded_dim(option)))
            )
        return option.is_partial() and not now.is_partial() and (now.is_replicate() or self._is_innermost(state, axis))

    def _all_gathers(self, state: Placements) -> Iterator[tuple[Move, ...]]:
        copies = self._copies(state)
        for axes in _subsets([a for a, p in enumerate(state) if isinstance(p, Shard)]):
            arrival = _with(state, dict.fromkeys(axes, REPLICATE))
            dims = {sharded_dim(state[a]) for a in axes}
            # Only then are the gathered blocks of equal size and consecutive in the dimension.
            if all(self._is_even(state, d) and self._are_inner(state, d, axes) for d in dims):
                elements = (product(self.mesh_shape, axes) - 1) * self.elements * copies
                yield (Move("all_gather", axes, state, arrival, elements),)

    def _all_reduces(self, state: Placements) -> Iterator[tuple[Move, ...]]:
        copies = self._copies(state)
        for axes in _subsets(self._reducible(state)):
            ranks = product(self.mesh_shape, axes)
            arrival = _with(state, dict.fromkeys(axes, REPLICATE))
            # Ring all-reduce: a rank sends 2 (n - 1) / n of the tensor, in a reduce-scatter and an all-gather.
            yield (Move("all_reduce", axes, state, arrival, 2 * (ranks - 1) * self.elements * copies // ranks),)

    def _reduce_scatters(self, state: Placements) -> Iterator[tuple[Move, ...]]:
        copies = self._copies(state)
        dims = [dim for dim in range(len(self.shape)) if dim not in self._uneven]
        for axes in _subsets(self._reducible(state)):
            ranks = product(self.mesh_shape, axes)
            for chosen in itertools.product(dims, repeat=len(axes)):
                arrival = _with(state, {a: Shard(d) for a, d in zip(axes, chosen, strict=True)})
                if all(self._is_even(arrival, d) and self._are_inner(arrival, d, axes) for d in set(chosen)):
                    elements = (ranks - 1) * self.elements * copies // ranks
                    yield (Move("reduce_scatter", axes, state, arrival, elements),)

    def _reducible(self, state: Placements) -> list[int]:
        return [
            a
            for a, (s, t) in enumerate(zip(state, self.target, strict=True))
            # A sum may be reduced over an axis that is partial in the target: the total then becomes the contribution
            # of one rank, next to zeros. The reductions that cannot be undone have no such form.
            if s.is_partial() and (self.linear or not t.is_partial())
        ]

    def _copies(self, state: Placements) -> int:
        """Return how many ranks hold (a contribution to) the same element."""
        return math.prod(n for n, p in zip(self.mesh_shape, state, strict=True) if not p.is_shard())

    def _is_even(self, state: Placements, dim: int) -> bool:
        """Return whether a dimension is sharded by plain `Shard` only, into equal shards."""
        shardings = shardings_of(state, dim)
        return (
            dim not in self._uneven
            and all(isinstance(placement, Shard) for _, placement in shardings)
            and self.shape[dim] % product(self.mesh_shape, [axis for axis, _ in shardings]) == 0
        )

    def _is_innermost(self, state: Placements, axis: int) -> bool:
        dim = sharded_dim(state[axis])
        return not any(p.is_shard(dim) for p in state[axis + 1 :])

    def _are_inner(self, state: Placements, dim: int, axes: Sequence[int]) -> bool:
        """Return whether those of `axes` that shard the dimension are its innermost shardings."""
        inner = [axis in axes for axis, _ in shardings_of(state, dim)]
        return inner == sorted(inner)


def _with(state: Placements, changes: dict[int, Placement]) -> Placements:
    return tuple(changes.get(axis, placement) for axis, placement in enumerate(state))


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(1, len(axes) + 1))


LINEAR = ("sum", "avg")


def plan_redistribute(
    mesh: DeviceMesh,
    source: Sequence[Placement],
    target: Sequence[Placement],
    shape: Sequence[int],
    itemsize: int = 4,
    links: Links = DEFAULT_LINKS,
) -> RedistributePlan:
    """Return the plan from `source` to `target` with the fewest bytes and, among such plans, the shortest time.

    Communicates nothing and needs no processes.

    Args:
        mesh: may belong to a fake world.
        source, target: one placement per mesh axis.
        shape: the global shape.
        itemsize: bytes per element.
        links: latency and bandwidth of the mesh axes.

    Returns:
        A plan with `steps`, `wire_bytes` (sent per rank, the mean over ranks) and `seconds`. `print` explains it.

    Raises:
        MeshError: `mesh` is not a mesh.
        PlacementError: placements that do not fit mesh or shape, or a redistribution that does not exist.

    Examples:
        >>> with fake_world(8):
        ...     mesh = DeviceMesh("cuda", (8,))
        ...     plan = plan_redistribute(mesh, [Shard(0)], [Shard(1)], (1024, 1024), itemsize=2)
        >>> plan.wire_bytes == 1024 * 1024 * 2 // 8 * 7 // 8  # all-to-all: each rank keeps an eighth of its shard
        True
    """
    mesh = require_mesh("plan_redistribute", mesh)
    specs = [TensorSpec(mesh, require_placements("plan_redistribute", mesh, p), shape, None) for p in (source, target)]
    return plan_between(*specs, itemsize, links)


@cached_by_spec(maxsize=4096)
def plan_between(
    source: TensorSpec, target: TensorSpec, itemsize: int = 4, links: Links = DEFAULT_LINKS
) -> RedistributePlan:
    """Return the plan between two specs of the same mesh and shape. Plans are cached."""
    if source.mesh != target.mesh:
        raise PlacementError(
            f"cannot plan between meshes: {source.mesh.describe()} -> {target.mesh.describe()}; use redistribute"
        )
    if source.shape != target.shape:
        raise PlacementError(f"cannot redistribute between shapes: {list(source.shape)} -> {list(target.shape)}")
    stages = [_StagePlanner(first, second, itemsize, links).stage() for first, second in _stages(source, target)]
    return RedistributePlan(source, target, itemsize, tuple(stages), plan_between)


def _stages(source: TensorSpec, target: TensorSpec) -> Iterator[tuple[TensorSpec, TensorSpec]]:
    """Yield (source, target) of each stage: two if one kind of partial results is reduced before another is made."""
    kinds = _partial_kinds(source), _partial_kinds(target)
    if source is target:
        return
    for found in kinds:
        if len(found) > 1:
            raise PlacementError(
                f"cannot redistribute {source!r} to {target.describe_placements()}: partial "
                f"{' and '.join(sorted(found))} in one tensor have no common order of reduction; redistribute one axis "
                "before the other becomes partial"
            )
    # The sum of maxima is not the maximum of sums: the first kind is reduced on all its axes before the second starts.
    if kinds[0] and kinds[1] and kinds[0] != kinds[1]:
        middle = target.with_placements([REPLICATE if p.is_partial() else p for p in target.placements])
        yield source, middle
        yield middle, target
    else:
        yield source, target


def _partial_kinds(spec: TensorSpec) -> set[str]:
    """Return the reductions of a spec's partial axes. Averages count as sums, axes of one rank do not count."""
    axes = zip(spec.mesh.shape, spec.placements, strict=True)
    ops = {p.reduce_op for n, p in axes if isinstance(p, Partial) and n > 1}
    return {"sum" if op in LINEAR else op for op in ops}


def _average_factors(source: TensorSpec, target: TensorSpec) -> tuple[int, int]:
    """Return (multiplier, divisor) that convert averages to sums or back. A value that is not partial is a sum."""
    up, down = (
        math.prod(n for n, p in zip(spec.mesh.shape, spec.placements, strict=True) if p == Partial("avg"))
        for spec in (target, source)
    )
    common = math.gcd(up, down)
    return up // common, down // common


class _StagePlanner:
    """Planner of one stage, whose partial results are all of one kind."""

    def __init__(self, source: TensorSpec, target: TensorSpec, itemsize: int, links: Links) -> None:
        self.source, self.target, self.itemsize = source, target, itemsize
        self.links, self.mesh, self.shape = links, source.mesh, source.shape
        self.mesh_shape = self.mesh.shape
        self.names = self.mesh.mesh_dim_names
        self.op = next(iter(_partial_kinds(source) | _partial_kinds(target)), "sum")
        self.factors = _average_factors(source, target) if self.op == "sum" else (1, 1)

    def stage(self) -> Stage:
        """Return the steps out of ragged shards, those of the search, those into ragged shards, and a scale."""
        # Averages and sums move the same bytes. So the search knows sums only, and one scale at the end turns them
        # into averages, or averages into sums.
        first, last = self._plain(self.source.placements), self._plain(self.target.placements, self.source.placements)
        steps: list[Step] = []
        if first != last:
            before, (start, end), after = around_ragged(self.mesh_shape, first, last)
            steps += [self._step_on_one_axis(a, b) for a, b in before]
            steps += [self._step(move) for move in self._moves(start, end)]
            steps += [self._step_on_one_axis(a, b) for a, b in after]
        if self.factors != (1, 1):
            scale = Scale("scale", self.mesh, (), last, last, 0.0, 0.0)
            scale.up, scale.down = self.factors
            steps.append(scale)
        return Stage(self.source, self.target, tuple(steps), self.op, self.factors, self.itemsize, replan=plan_between)

    def _plain(self, placements: Placements, before: Placements | None = None) -> Placements:
        """Return placements in the search's terms: axes of one rank are replicated, averages are sums."""
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
        # A replicated value becomes a partial sum without a message: the axis's first rank keeps it, the others take
        # zeros. For max and min every rank keeps its copy, which the reduction leaves as it is. A product has no such
        # form: reducing equal copies would give a power.
        if placement.reduce_op in LINEAR:
            return SUM
        if before == placement:
            return placement
        if placement.reduce_op == "product":
            raise PlacementError(
                f"cannot make {placement} of {self.source.describe_placements()}; only sum, avg, max and min"
            )
        return REPLICATE

    def _moves(self, source: Placements, target: Placements) -> tuple[Move, ...]:
        """Return the search's moves, with the numbers of elements of this tensor."""
        if source == target:
            return ()
        # An empty tensor sends nothing, however it is sharded: only the shapes of the empty shards change.
        if 0 in self.shape:
            return (Move("slice", (), source, target, 0),)
        # Every rank must find the same moves, but a rank knows the ragged shard sizes of its own line only. So the
        # search sees plain shards instead, of dimensions that never count as evenly sharded.
        uneven = frozenset(p.dim for p in (*source, *target) if isinstance(p, RaggedShard))
        first, last = without_ragged(source), without_ragged(target)
        small = _smallest_alike(self.shape, self.mesh_shape, first, last, uneven)
        # Where latency counts, the best plan for 1 kB is not the one for 1 GB. Powers of two keep cached plans few.
        # With one latency and one bandwidth for all axes, the size changes no ranking.
        size_class = 0 if self.links.is_uniform else (math.prod(self.shape) * self.itemsize).bit_length()
        is_linear, links = self.op == "sum", self.links
        moves = _find_moves(small, self.mesh_shape, first, last, is_linear, uneven, links, self.names, size_class)
        scale, unit = math.prod(self.shape), math.prod(small)
        scaled = [replace(move, elements=move.elements * scale // unit) for move in moves]
        if not uneven:
            return tuple(scaled)
        # Ragged shards that take no part in the moves are put back in place.
        ends = {first: source, last: target}
        restored = []
        for move in scaled:
            before, after = restore_ragged(move.source, source, ends), restore_ragged(move.target, source, ends)
            elements = move.elements
            if move.name in ("exchange", "all_to_all") and move.volume is None:
                elements = self._exact_volume(before, after, elements)
            restored.append(replace(move, source=before, target=after, elements=elements))
        return tuple(restored)

    def _exact_volume(self, source: Placements, target: Placements, otherwise: int) -> int:
        """Return the elements that all ranks send if the ragged sizes are equal on all lines, else `otherwise`."""
        # Along an axis that stays replicated or partial every rank sends the same amount, so one of them is counted.
        unchanged = [s == t and not s.is_shard() for s, t in zip(source, target, strict=True)]
        ranks = [1 if same else n for n, same in zip(self.mesh_shape, unchanged, strict=True)]
        try:
            return least_volume(self.shape, ranks, source, target).total * self.mesh.size() // math.prod(ranks)
        except PlacementError:
            return otherwise

    def _step(self, move: Move, wire_bytes: float | None = None) -> Step:
        """Return the step of a move. `wire_bytes` defaults to the move's elements over all ranks."""
        if wire_bytes is None:
            wire_bytes = move.elements * self.itemsize / self.mesh.size()
        seconds = self.links.seconds(move.name, [self.names[a] for a in move.axes], wire_bytes)
        kind = AllToAll if self._is_even_all_to_all(move) else _STEPS.get(move.name, Exchange)
        step = kind(move.name, self.mesh, move.axes, move.source, move.target, wire_bytes, seconds)
        if isinstance(step, (ReduceScatter, AllReduce, ReduceToOwners)):
            step.op = self.op
        if isinstance(step, (Exchange, ReduceToOwners)):
            step.ownership = Ownership(self.shape, self.mesh_shape, move.source, move.target, move.volume)
        return step

    def _is_even_all_to_all(self, move: Move) -> bool:
        """Return whether the framework's all-to-all of equal blocks can do the move."""
        changed = tuple(a for a, (s, t) in enumerate(zip(move.source, move.target, strict=True)) if s != t)
        if move.name != "all_to_all" or changed != move.axes:
            return False
        (axis,) = changed
        for placements in (move.source, move.target):
            dim = sharded_dim(placements[axis])
            shardings = shardings_of(placements, dim)
            is_plain = all(type(p) is Shard for _, p in shardings)
            num_shards = product(self.mesh_shape, [a for a, _ in shardings])
            # Blocks are of equal size only if the axis is the innermost sharding of the dimension.
            if shardings[-1][0] != axis or not is_plain or self.shape[dim] % num_shards:
                return False
        return True

    def _step_on_one_axis(self, source: Placements, target: Placements) -> Step:
        """Return a step on one axis, planned with the ragged sizes of this rank's line; other lines may differ."""
        (axis,) = (a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s != t)
        # All ranks of a line hold the same rows of the other axes. So the step is planned on a 1-D mesh, for the
        # tensor that the line holds together.
        around = [REPLICATE if a == axis else p for a, p in enumerate(source)]
        where = self.mesh.get_coordinate() or (0,) * self.mesh.ndim
        held = self.source.with_placements(around).ranges(where)
        shape = [sum(stop - start for start, stop in ranges) for ranges in held]
        volume = least_volume(shape, (self.mesh_shape[axis],), (source[axis],), (target[axis],))
        reduces = bool(volume.reduced_axes)
        name = "reduce_to_owners" if reduces else "exchange" if volume.total else "slice"
        axes = (axis,) if volume.total else ()
        if reduces:
            # Axis 0 of the 1-D mesh is `axis` of the full mesh.
            volume = replace(volume, reduced_axes=(axis,), divided_axes=())
        move = Move(name, axes, source, target, volume.total, volume if reduces else None)
        lines = self.mesh.size() // self.mesh_shape[axis]
        elements = self._exact_volume(source, target, volume.total * lines)
        return self._step(move, elements * self.itemsize / self.mesh.size())


_STEPS: dict[str, type[Step]] = {
    "all_gather": AllGather,
    "all_reduce": AllReduce,
    "reduce_scatter": ReduceScatter,
    "reduce_to_owners": ReduceToOwners,
}


@functools.lru_cache(maxsize=4096)
def _find_moves(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    source: Placements,
    target: Placements,
    linear: bool,
    uneven: frozenset[int],
    links: Links,
    names: tuple[str, ...],
    size_class: int,
) -> tuple[Move, ...]:
    """Return the moves for all tensors sharded in the same proportions with up to 2**size_class bytes."""
    scale = 2.0**size_class / max(math.prod(shape), 1) / math.prod(mesh_shape)

    def seconds(name: str, axes: tuple[int, ...], elements: int) -> float:
        return links.seconds(name, [names[a] for a in axes], elements * scale)

    return cheapest_moves(Problem(shape, mesh_shape, target, linear, seconds, uneven), source)


def _smallest_alike(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    source: Placements,
    target: Placements,
    uneven: frozenset[int],
) -> tuple[int, ...]:
    """Return the smallest shape sharded in the same proportions, for which all such shapes share one search."""
    all_ranks = math.prod(
        n for n, s, t in zip(mesh_shape, source, target, strict=True) if not (s == t and s.is_replicate())
    )
    # A reduction may be divided over every axis, even a replicated one, which then shards the tensor in between.
    if any(s.is_partial() for s in source):
        all_ranks = math.prod(mesh_shape)
    result = []
    for dim, size in enumerate(shape):
        shardings = (*shardings_of(source, dim), *shardings_of(target, dim))
        unit = product(mesh_shape, sorted({axis for axis, _ in shardings}))
        unit *= math.prod(p.split_factor for _, p in shardings if isinstance(p, StridedShard))
        if dim in uneven:
            result.append(max(size, unit))
        else:
            # Multiples of the unit share a plan. The gcd distinguishes shapes that further shardings of the search can
            # divide from those that they cannot.
            result.append(size if size % unit else unit * math.gcd(size // unit, all_ranks))
    return tuple(result)


_Changes = list[tuple[Placements, Placements]]


def without_ragged(placements: Placements) -> Placements:
    """Return the placements with plain shards in place of ragged ones."""
    return tuple(Shard(p.dim) if isinstance(p, RaggedShard) else p for p in placements)


def restore_ragged(state: Placements, source: Placements, ends: dict[Placements, Placements]) -> Placements:
    """Return a search state with ragged shards on unchanged axes; `ends`: the plain source and target -> the given."""
    if state in ends:
        return ends[state]
    return tuple(p if isinstance(p, RaggedShard) else now for p, now in zip(source, state, strict=True))


def around_ragged(
    mesh_shape: tuple[int, ...], source: Placements, target: Placements
) -> tuple[_Changes, tuple[Placements, Placements], _Changes]:
    """Return (changes before, the pair to search between, changes after). A change is a pair of placements.

    Ragged shard sizes are known only to the ranks on the axis's own line. So an axis that is ragged before or after,
    and takes part in the redistribution, leaves and enters that form in a change of this axis alone.
    """
    moving = _moving_axes(mesh_shape, source, target)
    ragged = [a for a in moving if isinstance(source[a], RaggedShard) or isinstance(target[a], RaggedShard)]
    if not ragged:
        return [], (source, target), []
    # A single axis needs no detour: both forms are known on its line.
    if len(moving) == 1:
        return [(source, target)], (target, target), []
    before = _leave_ragged(source, target, moving)
    after = _leave_ragged(target, source, moving)
    first, last = (before[-1][1] if before else source), (after[-1][1] if after else target)
    return before, (first, last), [(b, a) for a, b in reversed(after)]


def _moving_axes(mesh_shape: tuple[int, ...], source: Placements, target: Placements) -> list[int]:
    """Return the axes that change, and those that shard a dimension inside of one that changes."""
    changed = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s != t]
    outermost_change = {
        p.dim: min(a for a in changed if source[a].is_shard(p.dim) or target[a].is_shard(p.dim))
        for a in changed
        for p in (source[a], target[a])
        if isinstance(p, (Shard, StridedShard, RaggedShard))
    }
    return [
        a
        for a, p in enumerate(source)
        if a in changed
        or (isinstance(p, (Shard, StridedShard, RaggedShard)) and a > outermost_change.get(p.dim, len(mesh_shape)))
    ]


def _leave_ragged(placements: Placements, other: Placements, moving: Sequence[int]) -> _Changes:
    """Return the changes that remove ragged shards from the moving axes, one axis at a time, innermost first."""
    dims = {p.dim: a for a in reversed(moving) if isinstance(p := placements[a], RaggedShard)}
    changes: _Changes = []
    now = placements
    for axis in reversed(range(len(placements))):
        placement = now[axis]
        if not isinstance(placement, (Shard, StridedShard, RaggedShard)) or axis < dims.get(placement.dim, len(now)):
            continue
        outermost = axis == dims[placement.dim]
        # A plain shard if the other side is sharded on this axis too. Otherwise the dimension is gathered at once,
        # without resharding it first.
        to_shard = outermost and not other[axis].is_replicate()
        new: Placement = Shard(placement.dim) if to_shard else Replicate()
        after = (*now[:axis], new, *now[axis + 1 :])
        changes.append((now, after))
        now = after
    return changes
