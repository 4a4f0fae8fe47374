"""Search for the cheapest sequence of collectives from one set of placements to another (Dijkstra's algorithm).

States are placements. Edges are all-gathers, reduce-scatters and all-reduces, each over one or several axes in one
collective, and local slices. From every state a direct exchange leads to the target. It sends the fewest bytes that any
sequence can send (`least_volume`), so when bytes count first, the search only follows edges that keep to this minimum
and finds the fastest path among them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hp_dtensor.redistribute.ownership import Ownership, Volume, least_volume
from hp_dtensor.redistribute.segments import Placements, product, sharded_dim, shardings_of
from hp_dtensor.spec.placements import Partial, Placement, Replicate, Shard

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


def cheapest_moves(problem: Problem, source: Placements, by_bytes: bool) -> tuple[Move, ...]:
    """Return the moves from `source` to the problem's target.

    Args:
        by_bytes: minimize bytes and then time; otherwise time alone.
    """
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
            if arrival in done or (by_bytes and spent + problem.least(arrival).total > problem.least(state).total):
                continue
            heapq.heappush(queue, (_add(cost, moves, problem.seconds), next(ticket), arrival, (*path, *moves)))
    # Too many states on a mesh of many axes: the direct exchange sends the fewest bytes, though perhaps not fastest.
    return problem.direct(source)


def _add(cost: tuple[float, ...], moves: Sequence[Move], seconds: Seconds) -> tuple[float, ...]:
    """Return the cost of a path extended by `moves`: (seconds, irregular steps, communicating steps, local steps).

    The counts break ties in favour of few steps and of the framework's own collectives.
    """
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
