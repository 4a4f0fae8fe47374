"""Direct exchange: each rank sends to the others exactly the elements that they lack, as planned from who owns what."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute.plan import Step, after
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
        """Return, per dimension, the rows that ranks hold in both; axes without a coordinate stand for all."""
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


Tensor = Any
Runs = tuple[tuple[int, int], ...]
"""(offset, length) pairs along one dimension of a local tensor, ascending."""
Received = dict[Hashable, Tensor]


class Region:
    """A selection from a local tensor of shape `sizes`: some runs along each dimension."""

    __slots__ = ("_narrowed", "runs", "shape")

    def __init__(self, runs: Sequence[Runs], sizes: Sequence[int]) -> None:
        self.runs = tuple(runs)
        self.shape = tuple([sum([length for _, length in some]) for some in runs])
        self._narrowed = [
            (dim, some or ((0, 0),))
            for dim, (some, size) in enumerate(zip(self.runs, sizes, strict=True))
            # Most dimensions are selected in full and need no `narrow`.
            if some != ((0, size),)
        ]

    def of(self, platform: Platform, x: Tensor) -> Tensor:
        """Return the selection from `x`, which may share its storage."""
        narrow = platform.ops.narrow
        for dim, runs in self._narrowed:
            slices = [narrow(x, dim, offset, length) for offset, length in runs]
            x = slices[0] if len(slices) == 1 else platform.ops.cat(slices, dim)
        return x


def compact_copy(platform: Platform, x: Tensor) -> Tensor:
    """Return a copy with row-major strides, as a tensor received from another rank has them.

    Random operations depend on strides, and results must not depend on whether something was received. `contiguous` is
    not enough: it leaves the stride of a dimension of one element as it is.
    """
    flat = platform.ops.reshape(platform.ops.clone(x), (math.prod(x.shape),))
    return platform.ops.reshape(flat, tuple(x.shape))


def runs_in(ranges: Ranges, held: Ranges) -> Runs:
    """Return the runs of `ranges`, all of them within `held`, in a local tensor that holds `held`."""
    result: list[tuple[int, int]] = []
    passed = i = 0
    for start, stop in ranges:
        while start < stop:
            while held[i][1] <= start:
                passed += held[i][1] - held[i][0]
                i += 1
            offset, length = passed + start - held[i][0], min(stop, held[i][1]) - start
            # Ranges that are apart in the full tensor may be adjacent in the shard: one run, one copy.
            if result and sum(result[-1]) == offset:
                result[-1] = (result[-1][0], result[-1][1] + length)
            else:
                result.append((offset, length))
            start += length
    return tuple(result)


def size_of(ranges: Ranges) -> int:
    """Return the number of indices in the ranges."""
    return sum([stop - start for start, stop in ranges])


class Recipe(Protocol):
    """The assembly of a tensor from received messages."""

    def make(self, platform: Platform, received: Received, like: Tensor) -> Tensor:
        """Return the tensor, with the dtype and on the device of `like`."""


@dataclass(frozen=True, slots=True)
class FromMessage:
    """A region of the message received from `key`."""

    key: Hashable
    region: Region

    def make(self, platform: Platform, received: Received, like: Tensor) -> Tensor:
        return self.region.of(platform, received[self.key])


@dataclass(frozen=True, slots=True)
class Zeros:
    """A block of zeros."""

    shape: tuple[int, ...]

    def make(self, platform: Platform, received: Received, like: Tensor) -> Tensor:
        return platform.zeros(self.shape, like.dtype, platform.device_of(like))


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Several recipes concatenated along a dimension."""

    dim: int
    recipes: tuple[Recipe, ...]

    def make(self, platform: Platform, received: Received, like: Tensor) -> Tensor:
        return platform.ops.cat([each.make(platform, received, like) for each in self.recipes], self.dim)


def grid_recipe(
    runs: Sequence[Sequence[Any]], cell: Callable[[tuple[Any, ...]], Recipe], chosen: tuple[Any, ...] = ()
) -> Recipe:
    """Return the recipe for a grid of cells: `cell` is called with each combination of one run per dimension."""
    dim = len(chosen)
    if dim == len(runs):
        return cell(chosen)
    recipes = tuple(grid_recipe(runs, cell, (*chosen, run)) for run in runs[dim])
    return recipes[0] if len(recipes) == 1 else Concatenation(dim, recipes)


Owner = tuple[int, ...]
"""Coordinates of the owner of some rows of one dimension, on the owner axes of that dimension."""


@dataclass(frozen=True, slots=True)
class OwnedRun:
    """A run of the result along one dimension, at `offset` among its owner's rows. The owner None stands for zeros."""

    owner: Owner | None
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Messages:
    """One rank's share of an exchange.

    Attributes:
        me: the rank's coordinate.
        sends: the region of the local tensor that is sent to each receiver.
        receives: the shape of the message from each sender.
        own: the region of the local tensor that this rank needs itself; None if there is none.
        recipe: how the result is assembled from the messages and from `own`.
    """

    me: Coordinate
    sends: dict[Coordinate, Region]
    receives: dict[Coordinate, tuple[int, ...]]
    own: Region | None
    recipe: Recipe


def exchange_messages(ownership: Ownership, me: Coordinate) -> Messages:
    """Return the messages of the rank at coordinate `me` in an exchange from owners to the target placements."""
    rows, owned = ownership.rows_wanted(me), ownership.rows_owned(me)
    held = tuple(_owned_ranges(ownership, me, dim, dim_rows) for dim, dim_rows in enumerate(owned))
    runs = tuple(_owned_runs(ownership, me, dim, dim_rows) for dim, dim_rows in enumerate(rows))
    shape = tuple(sum(run.length for run in dim_runs) for dim_runs in runs)
    sends = _outgoing_regions(ownership, me, owned, held)
    if not ownership.wants_any(me) or 0 in shape:
        return Messages(me, sends, {}, None, Zeros(shape))
    # One message for each combination of owners of the dimensions: (sender, shape).
    found: _MessagesByOwners = {}
    own = None
    by_dim = [dict.fromkeys(run.owner for run in dim_runs if run.owner is not None) for dim_runs in runs]
    for owners in itertools.product(*by_dim):
        owner = _coordinates_by_axis(ownership.owner_axes, owners)
        if ownership.owns(me, owner):
            own = _staying_region(ownership, me, owned, held)
            found[owners] = me, own.shape
        else:
            lengths = (
                sum(run.length for run in dim_runs if run.owner == each)
                for dim_runs, each in zip(runs, owners, strict=True)
            )
            found[owners] = ownership.sender(me, owner), tuple(lengths)
    receives = {sender: sizes for sender, sizes in found.values() if sender != me}
    return Messages(me, sends, receives, own, grid_recipe(runs, functools.partial(_cell_recipe, found)))


_MessagesByOwners = dict[tuple[Owner, ...], tuple[Coordinate, tuple[int, ...]]]


def _cell_recipe(found: _MessagesByOwners, chosen: tuple[OwnedRun, ...]) -> Recipe:
    """Return the recipe for one cell, of one run per dimension: a region of a message, or zeros without an owner."""
    owners = tuple(run.owner for run in chosen if run.owner is not None)
    if len(owners) < len(chosen):
        return Zeros(tuple(run.length for run in chosen))
    sender, sizes = found[owners]
    return FromMessage(sender, Region([((run.offset, run.length),) for run in chosen], sizes))


def reduction_regions(ownership: Ownership, me: Coordinate) -> dict[Coordinate, Region | None]:
    """Return the region of the partial results of rank `me` that each rank along the reduced axes will own."""
    rows = ownership.rows_partial(me)
    held = ownership.source_ranges(me)
    sizes = [size_of(ranges) for ranges in held]
    choices = [range(n) if a in ownership.reduced_axes else (me[a],) for a, n in enumerate(ownership.mesh_shape)]
    result: dict[Coordinate, Region | None] = {}
    # The rows name the owners along all reduced axes, so they are computed once for all members.
    for member in itertools.product(*choices):
        ranges = [_owned_ranges(ownership, member, dim, dim_rows) for dim, dim_rows in enumerate(rows)]
        region = Region([runs_in(a, b) for a, b in zip(ranges, held, strict=True)], sizes)
        result[member] = region if ownership.holds_any(member) else None
    return result


def _outgoing_regions(
    ownership: Ownership, me: Coordinate, rows: Sequence[Sequence[Row]], held: Sequence[Ranges]
) -> dict[Coordinate, Region]:
    """Return the regions that `me` sends, by receiver, given the rows that it owns by dimension and their ranges."""
    if not ownership.moving_axes or not ownership.holds_any(me):
        return {}
    wanted: list[dict[Coordinate, list[tuple[int, int]]]] = []
    for dim, dim_rows in enumerate(rows):
        mine = tuple(me[a] for a in ownership.owner_axes[dim])
        by_target: dict[Coordinate, list[tuple[int, int]]] = defaultdict(list)
        for start, stop, owner, target in dim_rows:
            if owner == mine:
                by_target[target].append((start, stop))
        wanted.append(by_target)
    here = {axis: me[axis] for axes in ownership.owner_axes for axis in axes}
    result = {}
    for targets in itertools.product(*wanted):
        region = None
        for receiver in ownership.receivers(me, _coordinates_by_axis(ownership.target_axes, targets)):
            if ownership.owns(receiver, here) or ownership.sender(receiver, here) != me:
                continue
            # Receivers with equal target coordinates need the same rows, so they share one region.
            if region is None:
                ranges = [join_ranges(by[target]) for by, target in zip(wanted, targets, strict=True)]
                runs = [runs_in(a, b) for a, b in zip(ranges, held, strict=True)]
                region = Region(runs, [size_of(each) for each in held])
            result[receiver] = region
    return result


def _owned_runs(ownership: Ownership, me: Coordinate, dim: int, rows: Sequence[Row]) -> tuple[OwnedRun, ...]:
    """Return the runs of this rank's result along a dimension. Adjacent runs of one owner are joined."""
    mine = tuple(me[a] for a in ownership.target_axes[dim])
    partial = [i for i, a in enumerate(ownership.owner_axes[dim]) if ownership.target[a].is_partial()]
    axes = ownership.owner_axes[dim]
    result: list[OwnedRun] = []
    passed: dict[Owner | None, int] = defaultdict(int)
    for start, stop, owner, target in rows:
        if target != mine:
            continue
        # Along an axis that becomes partial the owner keeps the value and the other ranks take zeros.
        found = owner if all(owner[i] == me[axes[i]] for i in partial) else None
        if result and result[-1].owner == found:
            last = result.pop()
            result.append(OwnedRun(found, last.offset, last.length + stop - start))
        else:
            result.append(OwnedRun(found, passed[found], stop - start))
        passed[found] += stop - start
    return tuple(result)


def _owned_ranges(ownership: Ownership, me: Coordinate, dim: int, rows: Sequence[Row]) -> Ranges:
    """Return the ranges of a dimension that rank `me` owns."""
    mine = tuple(me[a] for a in ownership.owner_axes[dim])
    return join_ranges([(start, stop) for start, stop, owner, _ in rows if owner == mine])


def _staying_region(
    ownership: Ownership, me: Coordinate, rows: Sequence[Sequence[Row]], held: Sequence[Ranges]
) -> Region:
    """Return the region that rank `me` owns and also needs."""
    result = []
    for dim, dim_rows in enumerate(rows):
        owner = tuple(me[a] for a in ownership.owner_axes[dim])
        target = tuple(me[a] for a in ownership.target_axes[dim])
        ranges = join_ranges([(start, stop) for start, stop, o, t in dim_rows if o == owner and t == target])
        result.append(runs_in(ranges, held[dim]))
    return Region(result, [size_of(ranges) for ranges in held])


def _coordinates_by_axis(axes: Sequence[Sequence[int]], coordinates: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return mesh axis -> coordinate, from the axes of each tensor dimension and the coordinates on them."""
    return {
        a: c
        for dim_axes, dim_coordinates in zip(axes, coordinates, strict=True)
        for a, c in zip(dim_axes, dim_coordinates, strict=True)
    }


class Exchange(Step):
    """Exchange in which each rank receives exactly what it lacks; without axes, a change of the local data only."""

    ownership: Ownership

    def run(self, local: Tensor) -> Tensor:
        return self.start(local)()

    def start(self, local: Tensor) -> Callable[[], Tensor]:
        if not self.axes:
            result = self.assemble(local, {})
            return lambda: result
        platform = self.platform
        sends: list[Tensor | None] = [None] * self.group.size
        receives: list[Tensor | None] = [None] * self.group.size
        for i, message in self.outgoing(local):
            sends[i] = message
        received: Received = {}
        device = platform.device_of(local)
        for i, peer, shape in self.incoming:
            received[peer] = receives[i] = platform.empty(shape, local.dtype, device)
        return after(self.group.start_exchange(sends, receives), lambda: self.assemble(local, received))

    @property
    def selection(self) -> Callable[[Tensor], Tensor] | None:
        messages = self._messages
        # Without axes nothing is received: one message is the region that this rank has itself.
        if self.axes or messages.own is None or type(messages.recipe) is not FromMessage:
            return None
        platform, own, region = self.platform, messages.own, messages.recipe.region
        return lambda local: region.of(platform, own.of(platform, local))

    def outgoing(self, local: Tensor) -> list[tuple[int, Tensor]]:
        """Return (group rank, message to it) in the order of the group."""
        return [(i, self.platform.contiguous(region.of(self.platform, local))) for i, region in self._outgoing]

    def assemble(self, local: Tensor, received: Received) -> Tensor:
        """Return the result of the step from the messages, by the coordinates of their senders, and from `local`."""
        platform, messages = self.mesh.platform, self._messages
        # The recipe treats what this rank already has like a message from itself.
        if messages.own is not None:
            received[messages.me] = messages.own.of(platform, local)
        result = messages.recipe.make(platform, received, local)
        if type(messages.recipe) is not FromMessage:
            return result
        # The result of a single message may be a view of the local tensor, or the local tensor itself.
        return compact_copy(platform, result) if self.axes else platform.ops.clone(result)

    @functools.cached_property
    def _messages(self) -> Messages:
        messages = exchange_messages(self.ownership, self.coordinate)
        assert self.axes or not messages.receives, f"{self.source} -> {self.target} needs communication"
        return messages

    @functools.cached_property
    def _outgoing(self) -> list[tuple[int, Region]]:
        """Pairs (group rank, region of the local tensor for it) in the order of the group."""
        sends = self._messages.sends
        return [(i, sends[peer]) for peer, i in self._index.items() if peer in sends]

    @functools.cached_property
    def incoming(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Triples (group rank, its coordinate, shape of its message) in the order of the group."""
        receives = self._messages.receives
        return [(i, peer, receives[peer]) for peer, i in self._index.items() if peer in receives]

    @functools.cached_property
    def _index(self) -> dict[tuple[int, ...], int]:
        return {member: i for i, member in enumerate(self.mesh.members_over(self.axes))}


class ReduceToOwners(Step):
    """Reduction of partial results: each element is summed up, in rank order, by the rank that will own it."""

    ownership: Ownership
    op = "sum"

    def run(self, local: Tensor) -> Tensor:
        platform, rank = self.platform, self.group.rank
        sends = [
            None if region is None else platform.contiguous(region.of(platform, local)) for region in self._regions
        ]
        mine = self._regions[rank]
        shape = (0,) if mine is None else mine.shape
        device = platform.device_of(local)
        receives = [None if mine is None else platform.empty(shape, local.dtype, device) for _ in sends]
        # This rank's own contribution takes its place among the others, so that every owner sums in rank order and runs
        # are reproducible bit by bit.
        receives[rank], sends[rank] = sends[rank], None
        self.group.exchange(sends, [None if j == rank else x for j, x in enumerate(receives)])
        # A rank that owns nothing was needed only as a sender. The next step does not read what it returns.
        if mine is None:
            return platform.zeros((), local.dtype, device)
        ops = platform.ops
        reduction = {"max": ops.maximum, "min": ops.minimum, "product": ops.mul}.get(self.op, ops.add)
        result = functools.reduce(reduction, receives)
        return platform.ops.reshape(result, self._empty_shape) if 0 in shape and 0 in self._empty_shape else result

    @functools.cached_property
    def _empty_shape(self) -> tuple[int, ...]:
        """Shape of an empty result: that of the target on this rank, which may differ from that of the owned region."""
        wanted = Ownership(self.ownership.shape, self.ownership.mesh_shape, self.target, self.target)
        held = wanted.source_ranges(self.coordinate)
        return tuple(sum(stop - start for start, stop in ranges) for ranges in held)

    @functools.cached_property
    def _regions(self) -> list[Region | None]:
        regions = reduction_regions(self.ownership, self.coordinate)
        return [regions[member] for member in self.mesh.members_over(self.axes)]
