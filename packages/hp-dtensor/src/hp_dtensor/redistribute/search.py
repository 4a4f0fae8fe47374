"""Search for the cheapest sequence of collectives between two placements of one tensor.

What a redistribution must move at least is known in closed form (`least_volume`), and a direct exchange always
moves no more. So of all sequences only those are followed of which each step keeps the bytes at that least,
and among them the quickest is found by Dijkstra's algorithm: all-gathers, reduce-scatters and all-reduces
over one or several axes in one collective, with local slices before and after.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hp_dtensor.redistribute.ownership import Ownership, Volume, least_volume
from hp_dtensor.redistribute.segments import Placements, cuts_of, product
from hp_dtensor.spec.placements import Partial, Placement, Replicate, Shard

MOST_STATES = 2000
"""States looked at before the search settles for the direct exchange."""

REPLICATE, SUM = Replicate(), Partial()
Seconds = Callable[[str, tuple[int, ...], int], float]


@dataclass(frozen=True, slots=True)
class Move:
    """A step yet to be made, for tensors of any size.

    Attributes:
        name, axes, source, target: as of `Step`.
        elements: that all ranks together send.
        volume: of the reduction that this belongs to, for `reduce_to_owners` and what follows it.
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
        by_bytes: fewest bytes, then least time; else least time.
    """
    ticket = itertools.count()
    queue: list[tuple[tuple[float, ...], int, Placements, tuple[Move, ...]]] = [((0.0, 0, 0, 0), 0, source, ())]
    done: set[Placements] = set()
    while queue and len(done) < MOST_STATES:
        cost, _, state, path = heapq.heappop(queue)
        if state == problem.target:
            return _without_detours(path)
        if state in done:
            continue
        done.add(state)
        for moves in problem.moves(state):
            arrival = moves[-1].target
            spent = sum(move.elements for move in moves)
            # Bytes first: a step is followed only if what it spends and the least that is left are together no more
            # than the least from here. So most sequences are never looked at.
            if arrival in done or (by_bytes and spent + problem.least(arrival).total > problem.least(state).total):
                continue
            heapq.heappush(queue, (_add(cost, moves, problem.seconds), next(ticket), arrival, (*path, *moves)))
    return problem.direct(source)


def _add(cost: tuple[float, ...], moves: Sequence[Move], seconds: Seconds) -> tuple[float, ...]:
    """Return the sum of two costs (seconds, irregular steps, communicating steps, local steps). So ties go to the
    framework's own collectives.
    """
    total, irregular, communicating, local = cost
    for move in moves:
        total += seconds(move.name, move.axes, move.elements)
        irregular += move.name in ("exchange", "all_to_all", "reduce_to_owners")
        communicating += move.name != "slice"
        local += move.name == "slice"
    return total, irregular, communicating, local


def _without_detours(path: Sequence[Move]) -> tuple[Move, ...]:
    """Return the moves with neighbouring local ones joined."""
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
        uneven_dims: dimensions never cut evenly (their ragged parts differ between ranks).
        linear: partial results are sums; else of an operation that cannot be undone.
        seconds: (name, axes, elements that all ranks send) -> time of a step.
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
        if state not in self._least:
            self._least[state] = least_volume(self.shape, self.mesh_shape, state, self.target, self.linear)
        return self._least[state]

    def direct(self, state: Placements) -> tuple[Move, ...]:
        """Return the moves of a reduction to owners and an exchange, with the fewest bytes of all."""
        volume = self.least(state)
        if not volume.reduced:
            return (self._exchange(state, volume.moving, None),)
        reduce = Move("reduce_to_owners", volume.reduced, state, self._reduced(state), volume.reducing, volume)
        if not volume.moving and not self._embeds(state):
            return (reduce,)
        return reduce, self._exchange(state, volume.moving, volume)

    def _exchange(self, state: Placements, elements: int, volume: Volume | None) -> Move:
        if not elements:
            return Move("slice", (), state, self.target, 0, volume)
        axes = Ownership(self.shape, self.mesh_shape, state, self.target, volume).moving
        # Along one axis, from one cut to another, an exchange is the framework's own all-to-all.
        # A reduction's owners hold what no placement describes, hence `volume is None`.
        one_axis = len(axes) == 1 and state[axes[0]].is_shard() and self.target[axes[0]].is_shard()
        return Move(
            "all_to_all" if one_axis and volume is None else "exchange", axes, state, self.target, elements, volume
        )

    def _embeds(self, state: Placements) -> bool:
        """Return whether the owners' values still have to be put between zeros or cut out of replicas."""
        return any(
            t.is_partial() and not (s.is_partial() and a not in self.least(state).reduced)
            for a, (s, t) in enumerate(zip(state, self.target, strict=True))
        )

    def _reduced(self, state: Placements) -> Placements:
        """Return the target or, where something is left to do, a name for the state in which owners hold the values."""
        return self.target

    def moves(self, state: Placements) -> Iterator[tuple[Move, ...]]:
        """Yield all that can be done in a state; each item is one step, or two that go together."""
        yield from self._slices(state)
        yield from self._all_gathers(state)
        yield from self._all_reduces(state)
        yield from self._reduce_scatters(state)
        # Always last and always legal, so the search ends: it moves the least volume from wherever it starts.
        yield self.direct(state)

    def _slices(self, state: Placements) -> Iterator[tuple[Move, ...]]:
        reducing = bool(self.least(state).reduced)
        for axis, (now, wanted) in enumerate(zip(state, self.target, strict=True)):
            options: list[Placement] = [wanted] if now != wanted else []
            # Replicas may divide a reduction among them: cut what is equal first, for free, and gather the sums after.
            if now.is_replicate() and reducing:
                options += [Shard(dim) for dim in range(len(self.shape)) if Shard(dim) != wanted]
            for option in options:
                if self._is_local(state, axis, option):
                    yield (Move("slice", (), state, _with(state, {axis: option}), 0),)

    def _is_local(self, state: Placements, axis: int, option: Placement) -> bool:
        now = state[axis]
        if option.is_shard():
            cut = _with(state, {axis: option})
            dim = option.dim  # type: ignore[attr-defined]
            return (
                # Outer cuts come first in the order of the elements: a cut put outside of another would change which
                # rows the other one holds, and so move data.
                now.is_replicate()
                and self._is_innermost(cut, axis)
                and (option == self.target[axis] or self._is_even(cut, dim))
            )
        return option.is_partial() and not now.is_partial() and (now.is_replicate() or self._is_innermost(state, axis))

    def _all_gathers(self, state: Placements) -> Iterator[tuple[Move, ...]]:
        sharded = [a for a, p in enumerate(state) if isinstance(p, Shard) and p != self.target[a]]
        sharded += [a for a, p in enumerate(state) if isinstance(p, Shard) and p == self.target[a]]
        copies = self._copies(state)
        for axes in _subsets(sorted(sharded)):
            arrival = _with(state, dict.fromkeys(axes, REPLICATE))
            dims = {state[a].dim for a in axes}  # type: ignore[attr-defined]
            # Gathered blocks are equal, and stand one after the other in the dimension, only where these axes are the
            # innermost cuts and every cut is even.
            if all(self._is_even(state, d) and self._are_inner(state, d, axes) for d in dims):
                elements = (product(self.mesh_shape, axes) - 1) * self.elements * copies
                yield (Move("all_gather", axes, state, arrival, elements),)

    def _all_reduces(self, state: Placements) -> Iterator[tuple[Move, ...]]:
        copies = self._copies(state)
        for axes in _subsets(self._reducible(state)):
            parts = product(self.mesh_shape, axes)
            arrival = _with(state, dict.fromkeys(axes, REPLICATE))
            # 2 (n - 1) / n of the tensor per rank: a reduce-scatter, then an all-gather.
            yield (Move("all_reduce", axes, state, arrival, 2 * (parts - 1) * self.elements * copies // parts),)

    def _reduce_scatters(self, state: Placements) -> Iterator[tuple[Move, ...]]:
        copies = self._copies(state)
        dims = [dim for dim in range(len(self.shape)) if dim not in self._uneven]
        for axes in _subsets(self._reducible(state)):
            parts = product(self.mesh_shape, axes)
            for chosen in itertools.product(dims, repeat=len(axes)):
                arrival = _with(state, {a: Shard(d) for a, d in zip(axes, chosen, strict=True)})
                if all(self._is_even(arrival, d) and self._are_inner(arrival, d, axes) for d in set(chosen)):
                    elements = (parts - 1) * self.elements * copies // parts
                    yield (Move("reduce_scatter", axes, state, arrival, elements),)

    def _reducible(self, state: Placements) -> list[int]:
        return [
            a
            for a, (s, t) in enumerate(zip(state, self.target, strict=True))
            # A sum may be taken over an axis that is to be partial in the end: the total is then one rank's
            # contribution beside zeros. Of what cannot be undone it may not.
            if s.is_partial() and (self.linear or not t.is_partial())
        ]

    def _copies(self, state: Placements) -> int:
        return math.prod(n for n, p in zip(self.mesh_shape, state, strict=True) if not p.is_shard())

    def _is_even(self, state: Placements, dim: int) -> bool:
        """Return whether a dimension is cut in chunk order only, into equal parts everywhere."""
        cuts = cuts_of(state, dim)
        return (
            dim not in self._uneven
            and all(isinstance(placement, Shard) for _, placement in cuts)
            and self.shape[dim] % product(self.mesh_shape, [axis for axis, _ in cuts]) == 0
        )

    def _is_innermost(self, state: Placements, axis: int) -> bool:
        dim = state[axis].dim  # type: ignore[attr-defined]
        return not any(p.is_shard(dim) for p in state[axis + 1 :])

    def _are_inner(self, state: Placements, dim: int, axes: Sequence[int]) -> bool:
        """Return whether those of `axes` that cut the dimension do so inside all others."""
        inner = [axis in axes for axis, _ in cuts_of(state, dim)]
        return inner == sorted(inner)


def _with(state: Placements, changes: dict[int, Placement]) -> Placements:
    return tuple(changes.get(axis, placement) for axis, placement in enumerate(state))


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(1, len(axes) + 1))
