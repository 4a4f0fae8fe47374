"""The plan of a direct exchange: the number of elements sent, and the rank that owns, sends and receives each of them.

Before a direct exchange every element of the full tensor has one owner. It is found from the coordinates on the axes
that shard the source; the other axes hold replicas of it. Partial results are first summed up by their owners. A
receiver that can choose between several replicas takes the one on its own line of the mesh or, where several receivers
need the same elements, they take turns. Sender and receiver compute the same assignment, so no message has to announce
another one.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hp_dtensor.redistribute.segments import (
    Placements,
    elements_in_place,
    overlaps,
    product,
    segments,
    sharded_dim,
    shardings_of,
)
from hp_dtensor.spec.placements import Shard
from hp_dtensor.spec.tensor_spec import Ranges, join_ranges, split_ranges

# Volume ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Volume:
    """Numbers of elements that all ranks together send in a direct exchange.

    Attributes:
        reducing: elements sent to sum up partial results.
        moving: elements sent afterwards, from their owners to the ranks that need them.
        reduced_axes: axes over which partial results are summed.
        divided_axes: axes of replicas that divide the summation among them.
    """

    reducing: int
    moving: int
    reduced_axes: tuple[int, ...]
    divided_axes: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.reducing + self.moving


def least_volume(
    shape: Sequence[int], mesh_shape: Sequence[int], source: Placements, target: Placements, linear: bool = True
) -> Volume:
    """Return the volume of a direct exchange. No sequence of messages sends fewer elements.

    An element that n ranks contribute to takes n - 1 messages to be summed up, and one more for each further rank that
    needs it (or group of ranks that will hold it as partial results). If the rank that sums it up needs it too, that
    saves one message.

    Args:
        linear: partial results are sums, so an axis that is partial before and after may be reduced in between.
    """
    in_place = elements_in_place(shape, mesh_shape, source, target)
    both_partial = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s.is_partial() and t.is_partial()]
    # Reducing such an axis on the way can pay off: what moves on is then one message instead of one per contribution.
    choices = (
        itertools.chain.from_iterable(itertools.combinations(both_partial, n) for n in range(len(both_partial) + 1))
        if linear
        else iter([()])
    )
    return min(
        (_volume(math.prod(shape), mesh_shape, source, target, in_place, also) for also in choices),
        key=lambda volume: volume.total,
    )


def _volume(
    elements: int,
    mesh_shape: Sequence[int],
    source: Placements,
    target: Placements,
    in_place: int,
    also_reduced: Sequence[int],
) -> Volume:
    """Return the volume if the axes `also_reduced`, partial in source and target, are reduced too."""
    pairs = list(enumerate(zip(source, target, strict=True)))
    reduced = tuple(a for a, (s, t) in pairs if s.is_partial() and (a in also_reduced or not t.is_partial()))
    # Along an axis that stays partial every rank redistributes a tensor of its own.
    lines = math.prod(mesh_shape[a] for a, (s, t) in pairs if s.is_partial() and t.is_partial() and a not in reduced)
    copies_needed = product(mesh_shape, [a for a, (_, t) in pairs if t.is_replicate()])
    both_replicated = [a for a, (s, t) in pairs if s.is_replicate() and t.is_replicate()]
    terms = product(mesh_shape, reduced)
    # Nothing to sum up: one message for every copy that is needed and not there yet.
    if terms == 1:
        moving = elements * copies_needed - in_place * product(mesh_shape, both_replicated)
        return Volume(0, lines * moving, reduced, ())
    divided = [a for a, (s, t) in pairs if s.is_replicate() and not t.is_replicate()]
    # Replicas that each compute the same sum receive its terms several times. Divided among them, the terms are sent
    # once, plus one message that brings each sum back to every replica. That is less where a sum has more than two
    # terms, or where the sums have to be sent on anyway.
    if terms > 2 or in_place < elements:
        divided += both_replicated
        both_replicated = []
    replicas = product(mesh_shape, both_replicated)
    reducing = lines * replicas * elements * (terms - 1)
    return Volume(reducing, lines * (elements * copies_needed - replicas * in_place), reduced, tuple(divided))


# Owners, senders and receivers ----------------------------------------------------------------------------

Coordinate = tuple[int, ...]
Row = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""(start, stop, coordinates of the owner, coordinates of the receiver) of one dimension."""


class Ownership:
    """The owner of each element between a source and a target, and the rank that sends it to each receiver.

    Args:
        volume: how a reduction is divided; None: the source has no partial results to reduce.

    Attributes:
        owner_axes: per dimension, the axes whose coordinates identify the owner.
        target_axes: per dimension, the axes by which the target shards it.
        owned_axes: all axes on which owners differ.
        reduced_axes: the axes over which partial results are summed.
        moving_axes: the axes on which owner and receiver may differ.
        first_only_axes: axes on which only coordinate 0 owns anything, because a scalar cannot be split.
        unused_axes: moving axes with replicas before and after.
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
        divided = (*volume.reduced_axes, *volume.divided_axes) if volume is not None else ()
        self.reduced_axes = volume.reduced_axes if volume is not None else ()
        # A sum that the target shards along its reduced axis is owned where it is needed: that is a reduce-scatter,
        # after which nothing moves.
        self._from_target = frozenset(a for a in divided if target[a].is_shard())
        # Over the other axes owners split the longest dimension, which leaves the fewest ranks with nothing.
        self._split_axes = tuple(sorted(a for a in divided if a not in self._from_target)) if shape else ()
        self._split_dim = max(range(len(shape)), key=lambda dim: shape[dim], default=0)
        self.first_only_axes = frozenset(divided) - self._from_target if not shape else frozenset[int]()
        self.target_axes = tuple(tuple(a for a, _ in shardings_of(target, dim)) for dim in range(len(shape)))
        self.owner_axes = tuple(
            (
                *(a for a, _ in shardings_of(source, dim)),
                *(a for a in self.target_axes[dim] if a in self._from_target),
                *(self._split_axes if dim == self._split_dim else ()),
            )
            for dim in range(len(shape))
        )
        self.owned_axes = frozenset({axis for axes in self.owner_axes for axis in axes} | self.first_only_axes)
        self.moving_axes = tuple(a for a in range(len(mesh_shape)) if mesh_shape[a] > 1 and not self._is_inert(a))
        owned, moving = self.owned_axes, self.moving_axes
        self._replica_axes = [a for a in moving if a not in owned and not target[a].is_replicate()]
        self._receiver_axes = [a for a in moving if a in owned and target[a].is_replicate()]
        self.unused_axes = frozenset(a for a in moving if a not in owned and target[a].is_replicate())

    def _is_inert(self, axis: int) -> bool:
        """Return whether every rank gets all that it lacks from ranks with its own coordinate on the axis."""
        source, target = self.source[axis], self.target[axis]
        if axis in self.owned_axes and not (source.is_shard() and target.is_shard()):
            return False
        if not source.is_shard():
            return source == target
        if source != target:
            return False
        dim = sharded_dim(source)
        # The same placement holds the same rows only if all outer shardings of the dimension are the same too.
        outer = [
            [sharding for sharding in shardings_of(p, dim) if sharding[0] <= axis] for p in (self.source, self.target)
        ]
        return outer[0] == outer[1]

    def rows_wanted(self, coordinate: Coordinate) -> list[list[Row]]:
        """Return, per dimension, the rows that the target places on the rank at `coordinate`, each with its owner."""
        fixed = self._fixed(coordinate, self.moving_axes)
        return self._rows(fixed, dict(enumerate(coordinate)) if not self._split_axes else fixed)

    def rows_owned(self, coordinate: Coordinate) -> list[list[Row]]:
        """Return, per dimension, the rows that the rank at `coordinate` owns, each with its receiver."""
        fixed = self._fixed(coordinate, self.moving_axes)
        if self._split_axes:
            return self._rows(fixed, fixed)
        own = dict(enumerate(coordinate))
        return self._rows(own, fixed | {a: own[a] for a in self._from_target})

    def rows_partial(self, coordinate: Coordinate) -> list[list[Row]]:
        """Return, per dimension, the rows of this rank's partial results, with their owners along the reduced axes."""
        fixed = self._fixed(coordinate, self.reduced_axes)
        return self._rows(fixed, {a: c for a, c in fixed.items() if a in self._from_target or self._is_inert(a)})

    def _fixed(self, coordinate: Coordinate, moving: Sequence[int]) -> dict[int, int]:
        """Return axis -> coordinate for all axes but `moving`."""
        return {a: c for a, c in enumerate(coordinate) if a not in moving}

    def _rows(self, source: Mapping[int, int], target: Mapping[int, int]) -> list[list[Row]]:
        """Return, per dimension, the rows that ranks at the given coordinates hold in the source and in the target.

        Args:
            source, target: axis -> coordinate. Axes that are missing stand for all their coordinates.
        """
        result = []
        for dim, size in enumerate(self.shape):
            first = segments(size, shardings_of(self.source, dim), self.mesh_shape, source)
            second = segments(size, shardings_of(self.target, dim), self.mesh_shape, target)
            # On axes that the target shards, the owner of a sum is its receiver.
            where = [i for i, a in enumerate(self.target_axes[dim]) if a in self._from_target]
            rows = [(start, stop, (*s, *(t[i] for i in where)), t) for start, stop, s, t in overlaps(first, second)]
            is_split = dim == self._split_dim and self._split_axes
            result.append(self._split_rows(rows, source) if is_split else rows)
        return result

    def _split_rows(self, rows: Sequence[Row], fixed: Mapping[int, int]) -> list[Row]:
        """Return the rows with each owner's range split evenly over the axes that nothing else divides."""
        # Split per owner and not per row: the target may divide an owner's range into many rows, wherever the even
        # split ends.
        held: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for start, stop, owner, _ in rows:
            held[owner].append((start, stop))
        shards = [(join_ranges(ranges), owner) for owner, ranges in held.items()]
        for axis in self._split_axes:
            shards = [
                (shard, (*owner, i))
                for ranges, owner in shards
                for i, shard in enumerate(split_ranges(ranges, Shard(0), self.mesh_shape[axis]))
                if fixed.get(axis, i) == i
            ]
        owners = sorted((start, stop, owner) for ranges, owner in shards for start, stop in ranges)
        targets = [(start, stop, target) for start, stop, _, target in rows]
        return overlaps(owners, targets)

    def source_ranges(self, coordinate: Coordinate) -> list[Ranges]:
        """Return, per dimension, the ranges that the source places on the rank at `coordinate`."""
        fixed = dict(enumerate(coordinate))
        held = [
            segments(size, shardings_of(self.source, dim), self.mesh_shape, fixed)
            for dim, size in enumerate(self.shape)
        ]
        return [join_ranges([(start, stop) for start, stop, _ in found]) for found in held]

    def owns(self, coordinate: Coordinate, owner: Mapping[int, int]) -> bool:
        """Return whether the rank at `coordinate` is the owner at the coordinates `owner` (axis -> coordinate)."""
        return all(coordinate[a] == c for a, c in owner.items()) and self.holds_any(coordinate)

    def holds_any(self, coordinate: Coordinate) -> bool:
        """Return whether the rank at `coordinate` owns anything."""
        return all(coordinate[a] == 0 for a in self.first_only_axes)

    def wants_any(self, coordinate: Coordinate) -> bool:
        """Return whether the rank receives anything: if replicas become partial results, only the first rank does."""
        return all(
            coordinate[a] == 0
            for a in self.moving_axes
            if self.target[a].is_partial() and (a not in self.owned_axes or a in self.first_only_axes)
        )

    def sender(self, receiver: Coordinate, owner: Mapping[int, int]) -> Coordinate:
        """Return the rank that sends `receiver` the rows of the owner at coordinates `owner` (axis -> coordinate)."""
        result = list(receiver)
        for axis, coordinate in owner.items():
            result[axis] = coordinate
        for axis in self.first_only_axes:
            result[axis] = 0
        replicas = product(self.mesh_shape, self._replica_axes)
        receivers = product(self.mesh_shape, self._receiver_axes)
        # Receivers that need the same elements take turns among the replicas, so that no replica sends everything.
        # With fewer receivers than replicas, each uses the replica on its own line.
        if 1 < replicas <= receivers:
            turn = 0
            for axis in self._receiver_axes:
                turn = turn * self.mesh_shape[axis] + receiver[axis]
            turn %= replicas
            for axis in reversed(self._replica_axes):
                turn, result[axis] = divmod(turn, self.mesh_shape[axis])
        return tuple(result)

    def receivers(self, sender: Coordinate, wanted: Mapping[int, int]) -> Iterator[Coordinate]:
        """Yield the ranks to which `sender` may have to send the rows of the target coordinates `wanted`."""
        choices: list[Sequence[int]] = []
        for axis, own in enumerate(sender):
            if axis in wanted:
                choices.append((wanted[axis],))
            elif axis not in self.moving_axes or axis in self.unused_axes:
                choices.append((own,))
            elif self.target[axis].is_partial():
                choices.append((own if axis in self.owned_axes and axis not in self.first_only_axes else 0,))
            else:
                choices.append(range(self.mesh_shape[axis]))
        return itertools.product(*choices)
