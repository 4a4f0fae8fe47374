"""Direct exchange: steps in which each rank sends to the others exactly the elements that they lack.

`Region` selects from a local tensor, a `Recipe` assembles one from messages. `exchange_messages` derives both from an
`Ownership`, and the steps `Exchange` and `ReduceToOwners` communicate them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute.ownership import Coordinate, Ownership, Row
from hp_dtensor.redistribute.plan import Step, after
from hp_dtensor.spec.tensor_spec import Ranges, join_ranges

Tensor = Any
Runs = tuple[tuple[int, int], ...]
"""(offset, length) pairs along one dimension of a local tensor, ascending."""
Received = dict[Hashable, Tensor]


class Region:
    """A selection from a local tensor: some runs along each dimension.

    Args:
        sizes: the shape of the local tensor.
    """

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
    """Zeros."""

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


# Messages -------------------------------------------------------------------------------------------------

Owner = tuple[int, ...]
"""Coordinates of the owner of some rows of one dimension, on the owner axes of that dimension."""


@dataclass(frozen=True, slots=True)
class OwnedRun:
    """A run of the result along one dimension, and its owner; None stands for zeros.

    Attributes:
        offset: of the run among all rows of this owner.
    """

    owner: Owner | None
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Messages:
    """One rank's share of an exchange.

    Attributes:
        sends: the region of the local tensor that is sent to each receiver.
        receives: the shape of the message from each sender.
        own: the region of the local tensor that this rank needs itself; None if there is none.
        recipe: how the result is assembled from the messages and from `own`.
    """

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
        return Messages(sends, {}, None, Zeros(shape))
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
    return Messages(sends, receives, own, grid_recipe(runs, functools.partial(_cell_recipe, found)))


_MessagesByOwners = dict[tuple[Owner, ...], tuple[Coordinate, tuple[int, ...]]]


def _cell_recipe(found: _MessagesByOwners, chosen: tuple[OwnedRun, ...]) -> Recipe:
    """Return the recipe for one cell of the result, given by one run per dimension.

    It is a region of one message, or zeros if the run of any dimension has no owner.
    """
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
    """Return the regions that rank `me` sends, by receiver.

    Args:
        rows: per dimension, the rows that `me` owns.
        held: per dimension, the ranges of these rows.
    """
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
    """Return mesh axis -> coordinate.

    Args:
        axes: per tensor dimension, the mesh axes that shard it.
        coordinates: per tensor dimension, the coordinates on these axes.
    """
    return {
        a: c
        for dim_axes, dim_coordinates in zip(axes, coordinates, strict=True)
        for a, c in zip(dim_axes, dim_coordinates, strict=True)
    }


# Steps ----------------------------------------------------------------------------------------------------


class Exchange(Step):
    """Exchange in which each rank receives exactly what it lacks. Without axes, a change of the local data only.

    Attributes:
        ownership: the owner of each element before the step.
    """

    ownership: Ownership

    def run(self, local: Tensor) -> Tensor:
        if not self.axes:
            return self.assemble(local, {})
        platform = self.platform
        sends: list[Tensor | None] = [None] * self.group.size
        receives: list[Tensor | None] = [None] * self.group.size
        for i, message in self.outgoing(local):
            sends[i] = message
        received: Received = {}
        device = platform.device_of(local)
        for i, peer, shape in self.incoming:
            received[peer] = receives[i] = platform.empty(shape, local.dtype, device)
        self.group.exchange(sends, receives)
        return self.assemble(local, received)

    def outgoing(self, local: Tensor) -> list[tuple[int, Tensor]]:
        """Return (group rank, message to it) in the order of the group."""
        return [(i, self.platform.contiguous(region.of(self.platform, local))) for i, region in self._outgoing]

    def start(self, local: Tensor) -> Callable[[], Tensor]:
        """Start the exchange in the background, as one all-to-all of flat messages of different lengths."""
        if not self.axes:
            return super().start(local)
        platform, group = self.platform, self.group
        outgoing, incoming = [0] * group.size, [0] * group.size
        for i, region in self._outgoing:
            outgoing[i] = math.prod(region.shape)
        for i, _, shape in self.incoming:
            incoming[i] = math.prod(shape)
        device = platform.device_of(local)
        messages = [platform.ops.reshape(x, (-1,)) for _, x in self.outgoing(local)] or [
            platform.empty((0,), local.dtype, device)
        ]
        received = platform.empty((sum(incoming),), local.dtype, device)
        sent = platform.contiguous(platform.ops.cat(messages, 0))
        work = group.all_to_all_into(received, sent, incoming, outgoing, True)
        return after(work, lambda: self.assemble(local, self._unflatten(received)))

    def _unflatten(self, flat: Tensor) -> Received:
        platform, start = self.platform, 0
        received: Received = {}
        for _, peer, shape in self.incoming:
            message = platform.ops.narrow(flat, 0, start, math.prod(shape))
            # Cloned: a result that is a view of one message would keep the buffer of all messages alive.
            received[peer] = platform.ops.reshape(platform.ops.clone(message), shape)
            start += math.prod(shape)
        return received

    def assemble(self, local: Tensor, received: Received) -> Tensor:
        """Return the result of the step from the messages, by the coordinates of their senders, and from `local`."""
        platform, messages = self.platform, self._messages
        # The recipe treats what this rank already has like a message from itself.
        if messages.own is not None:
            received[self.coordinate] = messages.own.of(platform, local)
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
