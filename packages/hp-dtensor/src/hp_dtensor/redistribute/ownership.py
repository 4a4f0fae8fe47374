"""The fewest elements that any sequence of messages must move, and the division of a reduction that needs no more.

Only sums of several contributions and copies are needed: an element that n ranks contribute to takes n - 1
messages to reach a reducer, and one more for every further rank (or group of ranks that will hold it as
partial results) that wants it. A reducer that wants the element saves one.

Owners of elements before they move, and senders and receivers that follow from them.

Before a direct exchange every element has one owner among the ranks that differ on the axes with an owner's
digit; the other axes hold replicas. A receiver with several replicas to choose from takes the one on its own
line, or, where several receivers want the same from the same owners, they take turns: both are arithmetic
that sender and receiver do alike.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hp_dtensor.redistribute.segments import Placements, Segment, agreeing, cuts_of, overlaps, product, segments
from hp_dtensor.spec.placements import Shard
from hp_dtensor.spec.tensor_spec import Ranges, join_ranges, split_ranges


@dataclass(frozen=True, slots=True)
class Volume:
    """Numbers of elements that all ranks together send.

    Attributes:
        reducing: to sum up partial results.
        moving: to bring what is then complete to where it is wanted.
        reduced: the axes that are summed over.
        divided: further axes whose replicas divide the reduction among them.
    """

    reducing: int
    moving: int
    reduced: tuple[int, ...]
    divided: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.reducing + self.moving


def least_volume(
    shape: Sequence[int], mesh_shape: Sequence[int], source: Placements, target: Placements, linear: bool = True
) -> Volume:
    """Return the fewest elements that one redistribution must send.

    Args:
        linear: partial results are sums, so that an axis may also be reduced on the way to partial again.
    """
    # An element that already lies where it is wanted needs no message; these are all that a plan can save.
    agree = agreeing(shape, mesh_shape, source, target)
    kept = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s.is_partial() and t.is_partial()]
    # Of an axis that is partial before and after, the sum may be taken anyway: then one rank's message replaces one per
    # contribution on the further way.
    choices = _subsets(kept) if linear else iter([()])
    return min(
        (_volume(math.prod(shape), mesh_shape, source, target, agree, anyway) for anyway in choices),
        key=lambda volume: volume.total,
    )


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(len(axes) + 1))


def _volume(
    elements: int,
    mesh_shape: Sequence[int],
    source: Placements,
    target: Placements,
    agree: int,
    anyway: Sequence[int],
) -> Volume:
    """Return the volume with the axes `anyway` reduced although both source and target are partial on them."""
    pairs = list(enumerate(zip(source, target, strict=True)))
    reduced = tuple(a for a, (s, t) in pairs if s.is_partial() and (a in anyway or not t.is_partial()))
    lines = math.prod(mesh_shape[a] for a, (s, t) in pairs if s.is_partial() and t.is_partial() and a not in reduced)
    wanting = product(mesh_shape, [a for a, (_, t) in pairs if t.is_replicate()])
    both = [a for a, (s, t) in pairs if s.is_replicate() and t.is_replicate()]
    parts = product(mesh_shape, reduced)
    # Nothing to reduce: every wanted copy that is not there yet takes one message.
    if parts == 1:
        return Volume(0, lines * (elements * wanting - agree * product(mesh_shape, both)), reduced, ())
    divided = [a for a, (s, t) in pairs if s.is_replicate() and not t.is_replicate()]
    # Replicas that each reduce the same sum send its terms several times. Divided among them, the terms go once, and
    # one message more brings each sum to where it would have been anyway: that is less where a sum has more than two
    # terms, or where something moves in either case.
    if parts > 2 or agree < elements:
        divided += both
        both = []
    replicas = product(mesh_shape, both)
    reducing = lines * replicas * elements * (parts - 1)
    return Volume(reducing, lines * (elements * wanting - replicas * agree), reduced, tuple(divided))


Coordinate = tuple[int, ...]
Row = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""(start, stop, the owner's digits, the target's digits) of one dimension."""


class Ownership:
    """The one rank that owns each element between a source and a target, and the rank that sends it to whom.

    Args:
        volume: how a reduction was divided; None: the source holds complete values.

    Attributes:
        owner_axes: per dimension, the axes whose coordinates tell the owner.
        target_axes: per dimension, the axes that the target cuts it with.
        moving: the axes on which owner and receiver may differ.
        only_first: axes of which only coordinate 0 owns anything (they could not be cut).
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        mesh_shape: tuple[int, ...],
        source: Placements,
        target: Placements,
        volume: Volume | None = None,
    ) -> None:
        self.shape, self.mesh_shape, self.source, self.target = shape, mesh_shape, source, target
        divided = (*volume.reduced, *volume.divided) if volume is not None else ()
        self.reduced = volume.reduced if volume is not None else ()
        # A sum that the target cuts along its reduced axis is owned where it will stay: a reduce-scatter, after which
        # nothing moves.
        self._from_target = frozenset(a for a in divided if target[a].is_shard())
        self._cut = tuple(sorted(a for a in divided if a not in self._from_target)) if shape else ()
        # Owners divide the longest dimension, which leaves the fewest ranks without a part.
        self._cut_dim = max(range(len(shape)), key=lambda dim: shape[dim], default=0)
        self.only_first = frozenset(divided) - self._from_target if not shape else frozenset[int]()
        self.target_axes = tuple(tuple(a for a, _ in cuts_of(target, dim)) for dim in range(len(shape)))
        self.owner_axes = tuple(self._owner_axes(dim) for dim in range(len(shape)))
        owned = {axis for axes in self.owner_axes for axis in axes} | self.only_first
        self.owned = frozenset(owned)
        self.moving = tuple(a for a in range(len(mesh_shape)) if mesh_shape[a] > 1 and not self._is_inert(a))
        moving = set(self.moving)
        self._free = [a for a in self.moving if a not in owned and not target[a].is_replicate()]
        self._takers = [a for a in self.moving if a in owned and target[a].is_replicate()]
        self.both_free = frozenset(a for a in moving if a not in owned and target[a].is_replicate())

    def _owner_axes(self, dim: int) -> tuple[int, ...]:
        axes = [a for a, _ in cuts_of(self.source, dim)]
        axes += [a for a, _ in cuts_of(self.target, dim) if a in self._from_target]
        return (*axes, *(self._cut if dim == self._cut_dim else ()))

    def _is_inert(self, axis: int) -> bool:
        """Return whether every rank gets all it lacks from ranks with its own coordinate on the axis."""
        source, target = self.source[axis], self.target[axis]
        if axis in self.owned and not (source.is_shard() and target.is_shard()):
            return False
        if not source.is_shard():
            return source == target
        if source != target:
            return False
        dim = source.dim  # type: ignore[attr-defined]
        # The same cut holds the same rows only where all cuts outside of it are the same, too.
        outer = [[cut for cut in cuts_of(p, dim) if cut[0] <= axis] for p in (self.source, self.target)]
        return outer[0] == outer[1]

    def rows_wanted(self, coordinate: Coordinate) -> list[list[Row]]:
        """Return, per dimension, the rows that the rank at `coordinate` will hold, whoever owns them."""
        fixed = self._fixed(coordinate, self.moving)
        return self._rows(fixed, dict(enumerate(coordinate)) if not self._cut else fixed)

    def rows_owned(self, coordinate: Coordinate) -> list[list[Row]]:
        """Return, per dimension, the rows that the rank at `coordinate` owns, whoever wants them."""
        fixed = self._fixed(coordinate, self.moving)
        if self._cut:
            return self._rows(fixed, fixed)
        own = dict(enumerate(coordinate))
        return self._rows(own, fixed | {a: own[a] for a in self._from_target})

    def rows_partial(self, coordinate: Coordinate) -> list[list[Row]]:
        """Return, per dimension, the partial results of a rank that its line over the reduced axes will own."""
        fixed = self._fixed(coordinate, self.reduced)
        return self._rows(fixed, {a: c for a, c in fixed.items() if a in self._from_target or self._is_inert(a)})

    def _fixed(self, coordinate: Coordinate, moving: Sequence[int]) -> dict[int, int]:
        return {a: c for a, c in enumerate(coordinate) if a not in moving}

    def _rows(self, source: Mapping[int, int], target: Mapping[int, int]) -> list[list[Row]]:
        """Return, per dimension, the segments of ranks with the given coordinates in the source and in the target."""
        result = []
        for dim, size in enumerate(self.shape):
            first = segments(size, cuts_of(self.source, dim), self.mesh_shape, source)
            second = segments(size, cuts_of(self.target, dim), self.mesh_shape, target)
            result.append(self._labelled(dim, first, second, source))
        return result

    def _labelled(
        self, dim: int, first: Sequence[Segment], second: Sequence[Segment], fixed: Mapping[int, int]
    ) -> list[Row]:
        where = [i for i, a in enumerate(self.target_axes[dim]) if a in self._from_target]
        rows = [(start, stop, (*s, *(t[i] for i in where)), t) for start, stop, s, t in overlaps(first, second)]
        if dim != self._cut_dim or not self._cut:
            return rows
        return self._cut_rows(rows, fixed)

    def _cut_rows(self, rows: Sequence[Row], fixed: Mapping[int, int]) -> list[Row]:
        """Return the rows with each owner's part cut evenly over the axes that nothing else divides."""
        held: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for start, stop, owner, _ in rows:
            held[owner].append((start, stop))
        parts = [(join_ranges(ranges), owner) for owner, ranges in held.items()]
        for axis in self._cut:
            parts = [
                (part, (*owner, i))
                for ranges, owner in parts
                for i, part in enumerate(split_ranges(ranges, Shard(0), self.mesh_shape[axis]))
                if fixed.get(axis, i) == i
            ]
        owners = sorted((start, stop, owner) for ranges, owner in parts for start, stop in ranges)
        targets = [(start, stop, target) for start, stop, _, target in rows]
        return overlaps(owners, targets)

    def source_ranges(self, coordinate: Coordinate) -> list[Ranges]:
        """Return, per dimension, the ranges that the source places on the rank at `coordinate`."""
        fixed = dict(enumerate(coordinate))
        held = [
            segments(size, cuts_of(self.source, dim), self.mesh_shape, fixed) for dim, size in enumerate(self.shape)
        ]
        return [join_ranges([(start, stop) for start, stop, _ in parts]) for parts in held]

    # Senders and receivers -------------------------------------------------------------------------------

    def owns(self, coordinate: Coordinate, owner: Mapping[int, int]) -> bool:
        """Return whether the rank at `coordinate` holds what the owners with these digits hold."""
        return all(coordinate[a] == digit for a, digit in owner.items()) and self.holds_any(coordinate)

    def holds_any(self, coordinate: Coordinate) -> bool:
        return all(coordinate[a] == 0 for a in self.only_first)

    def wants_any(self, coordinate: Coordinate) -> bool:
        """Return whether the rank takes part: of replicas that become partial results only the first does."""
        return all(
            coordinate[a] == 0
            for a in self.moving
            if self.target[a].is_partial() and (a not in self.owned or a in self.only_first)
        )

    def sender(self, receiver: Coordinate, owner: Mapping[int, int]) -> Coordinate:
        """Return the rank that sends to `receiver` what owners with these digits hold."""
        result = list(receiver)
        for axis, digit in owner.items():
            result[axis] = digit
        for axis in self.only_first:
            result[axis] = 0
        replicas = math.prod(self.mesh_shape[a] for a in self._free)
        takers = math.prod(self.mesh_shape[a] for a in self._takers)
        # Receivers that want the same from the same owners take turns among the replicas, so that none of them sends
        # everything; with fewer receivers than replicas each asks the one on its own line.
        if 1 < replicas <= takers:
            turn = self._index(receiver, self._takers) % replicas
            for axis in reversed(self._free):
                turn, result[axis] = divmod(turn, self.mesh_shape[axis])
        return tuple(result)

    def receivers(self, sender: Coordinate, wanted: Mapping[int, int]) -> Iterator[Coordinate]:
        """Yield the ranks at the target's digits `wanted` that `sender` may have to serve."""
        choices: list[Sequence[int]] = []
        for axis, own in enumerate(sender):
            if axis in wanted:
                choices.append((wanted[axis],))
            elif axis not in self.moving or axis in self.both_free:
                choices.append((own,))
            elif self.target[axis].is_partial():
                choices.append((own if axis in self.owned and axis not in self.only_first else 0,))
            else:
                choices.append(range(self.mesh_shape[axis]))
        return itertools.product(*choices)

    def _index(self, coordinate: Coordinate, axes: Sequence[int]) -> int:
        index = 0
        for axis in axes:
            index = index * self.mesh_shape[axis] + coordinate[axis]
        return index
