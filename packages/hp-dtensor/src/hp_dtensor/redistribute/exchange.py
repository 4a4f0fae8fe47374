"""Parts of local tensors: taking them out, and putting a tensor together from them.

One rank's messages in a direct exchange, as regions of its local tensor.

Steps in which each rank sends other ranks exactly what they lack.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
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
    """A part of a local tensor: some runs along each dimension.

    Args:
        sizes: the local tensor's shape.
    """

    __slots__ = ("_cuts", "runs", "shape")

    def __init__(self, runs: Sequence[Runs], sizes: Sequence[int]) -> None:
        self.runs = tuple(runs)
        self.shape = tuple([sum([length for _, length in some]) for some in runs])
        self._cuts = [
            (dim, some or ((0, 0),))
            for dim, (some, size) in enumerate(zip(self.runs, sizes, strict=True))
            # Most dimensions are taken whole and need no `narrow`.
            if some != ((0, size),)
        ]

    def of(self, platform: Platform, x: Tensor) -> Tensor:
        """Return that part of `x`, which may share its storage."""
        narrow = platform.ops.narrow
        for dim, runs in self._cuts:
            pieces = [narrow(x, dim, offset, length) for offset, length in runs]
            x = pieces[0] if len(pieces) == 1 else platform.ops.cat(pieces, dim)
        return x


def compact_copy(platform: Platform, x: Tensor) -> Tensor:
    """Return a copy with the strides of a tensor that came from another rank: random operations depend on strides.

    Of a dimension with one element, too, whose stride `contiguous` leaves as it is.
    """
    flat = platform.ops.reshape(platform.ops.clone(x), (math.prod(x.shape),))
    return platform.ops.reshape(flat, tuple(x.shape))


def runs_in(ranges: Ranges, held: Ranges) -> Runs:
    """Return the runs at which `ranges`, which `held` contains, lie in a local tensor that holds `held`."""
    result: list[tuple[int, int]] = []
    passed = i = 0
    for start, stop in ranges:
        while start < stop:
            while held[i][1] <= start:
                passed += held[i][1] - held[i][0]
                i += 1
            offset, length = passed + start - held[i][0], min(stop, held[i][1]) - start
            # Ranges that lie apart in the whole may be neighbours in the shard: one run, one copy.
            if result and sum(result[-1]) == offset:
                result[-1] = (result[-1][0], result[-1][1] + length)
            else:
                result.append((offset, length))
            start += length
    return tuple(result)


def size_of(ranges: Ranges) -> int:
    return sum([stop - start for start, stop in ranges])


class Recipe(Protocol):
    """Recipe by which a tensor is made of received ones."""

    def make(self, platform: Platform, received: Received, like: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Recipe for a region of the tensor received from `key`."""

    key: Hashable
    region: Region

    def make(self, platform: Platform, received: Received, like: Tensor) -> Tensor:
        return self.region.of(platform, received[self.key])


@dataclass(frozen=True, slots=True)
class Zeros:
    """Recipe for zeros of the dtype and device of the local tensor."""

    shape: tuple[int, ...]

    def make(self, platform: Platform, received: Received, like: Tensor) -> Tensor:
        return platform.zeros(self.shape, like.dtype, platform.device_of(like))


@dataclass(frozen=True, slots=True)
class Joined:
    """Recipe for parts one after the other along a dimension."""

    dim: int
    parts: tuple[Recipe, ...]

    def make(self, platform: Platform, received: Received, like: Tensor) -> Tensor:
        return platform.ops.cat([part.make(platform, received, like) for part in self.parts], self.dim)


def recipe_over(
    pieces: Sequence[Sequence[Any]], cell: Callable[[tuple[Any, ...]], Recipe], chosen: tuple[Any, ...] = ()
) -> Recipe:
    """Return the recipe for a grid of cells, one for each combination of one piece per dimension."""
    dim = len(chosen)
    if dim == len(pieces):
        return cell(chosen)
    parts = tuple(recipe_over(pieces, cell, (*chosen, piece)) for piece in pieces[dim])
    return parts[0] if len(parts) == 1 else Joined(dim, parts)


Label = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of the result along one dimension, out of the messages with a label; label None stands for zeros."""

    label: Label | None
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Messages:
    """One rank's share of an exchange.

    Attributes:
        sends: region of the local tensor for each receiving rank.
        receives: shape of what comes from each rank.
        own: the region that stays here; None if nothing does.
        recipe: how the result is put together from what came from each rank and what stayed.
    """

    sends: dict[Coordinate, Region]
    receives: dict[Coordinate, tuple[int, ...]]
    own: Region | None
    recipe: Recipe


def exchange_messages(ownership: Ownership, me: Coordinate) -> Messages:
    """Return this rank's part in bringing everything from its owners to where the target wants it."""
    rows, owned = ownership.rows_wanted(me), ownership.rows_owned(me)
    held = tuple(_held(ownership, me, dim, dim_rows) for dim, dim_rows in enumerate(owned))
    pieces = tuple(_pieces(ownership, me, dim, dim_rows) for dim, dim_rows in enumerate(rows))
    shape = tuple(sum(piece.length for piece in parts) for parts in pieces)
    sends = _sends(ownership, me, owned, held)
    if not ownership.wants_any(me) or 0 in shape:
        return Messages(sends, {}, None, Zeros(shape))
    found: dict[tuple[Label, ...], tuple[Coordinate, tuple[int, ...]]] = {}
    own = None
    for labels in itertools.product(*(_labels(parts) for parts in pieces)):
        owner = _by_axis(ownership.owner_axes, labels)
        if ownership.owns(me, owner):
            own = _stays(ownership, me, owned, held)
            found[labels] = me, own.shape
        else:
            sizes = tuple(_length(parts, label) for parts, label in zip(pieces, labels, strict=True))
            found[labels] = ownership.sender(me, owner), sizes
    receives = {sender: sizes for sender, sizes in found.values() if sender != me}
    return Messages(sends, receives, own, recipe_over(pieces, functools.partial(_cell, found)))


def _cell(found: dict[tuple[Label, ...], tuple[Coordinate, tuple[int, ...]]], chosen: tuple[Piece, ...]) -> Recipe:
    labels = tuple(piece.label for piece in chosen if piece.label is not None)
    if len(labels) < len(chosen):
        return Zeros(tuple(piece.length for piece in chosen))
    sender, sizes = found[labels]
    return Part(sender, Region([((piece.offset, piece.length),) for piece in chosen], sizes))


def reduction_regions(ownership: Ownership, me: Coordinate) -> dict[Coordinate, Region | None]:
    """Return, for each rank of this one's line over the reduced axes, the region of the partial results it will own."""
    rows = ownership.rows_partial(me)
    whole = ownership.source_ranges(me)
    sizes = [size_of(ranges) for ranges in whole]
    choices = [range(n) if a in ownership.reduced else (me[a],) for a, n in enumerate(ownership.mesh_shape)]
    result: dict[Coordinate, Region | None] = {}
    for member in itertools.product(*choices):
        ranges = [_held(ownership, member, dim, dim_rows) for dim, dim_rows in enumerate(rows)]
        region = Region([runs_in(part, held) for part, held in zip(ranges, whole, strict=True)], sizes)
        result[member] = region if ownership.holds_any(member) else None
    return result


def _sends(
    ownership: Ownership, me: Coordinate, rows: Sequence[Sequence[Row]], held: Sequence[Ranges]
) -> dict[Coordinate, Region]:
    if not ownership.moving or not ownership.holds_any(me):
        return {}
    wanted: list[dict[Label, list[tuple[int, int]]]] = []
    for dim, dim_rows in enumerate(rows):
        mine = tuple(me[a] for a in ownership.owner_axes[dim])
        by_target: dict[Label, list[tuple[int, int]]] = defaultdict(list)
        for start, stop, owner, target in dim_rows:
            if owner == mine:
                by_target[target].append((start, stop))
        wanted.append(by_target)
    here = {axis: me[axis] for axes in ownership.owner_axes for axis in axes}
    result = {}
    for targets in itertools.product(*wanted):
        region = None
        for receiver in ownership.receivers(me, _by_axis(ownership.target_axes, targets)):
            if ownership.owns(receiver, here) or ownership.sender(receiver, here) != me:
                continue
            if region is None:
                ranges = [join_ranges(by[target]) for by, target in zip(wanted, targets, strict=True)]
                runs = [runs_in(part, whole) for part, whole in zip(ranges, held, strict=True)]
                region = Region(runs, [size_of(whole) for whole in held])
            result[receiver] = region
    return result


def _pieces(ownership: Ownership, me: Coordinate, dim: int, rows: Sequence[Row]) -> tuple[Piece, ...]:
    """Return the runs of this rank's result along a dimension, neighbours with one label joined."""
    mine = tuple(me[a] for a in ownership.target_axes[dim])
    partial = [i for i, a in enumerate(ownership.owner_axes[dim]) if ownership.target[a].is_partial()]
    axes = ownership.owner_axes[dim]
    result: list[Piece] = []
    passed: dict[Label | None, int] = defaultdict(int)
    for start, stop, owner, target in rows:
        if target != mine:
            continue
        # Where the target is partial, one rank of a line has the value and the others zeros, whose sum it is.
        label = owner if all(owner[i] == me[axes[i]] for i in partial) else None
        if result and result[-1].label == label:
            last = result.pop()
            result.append(Piece(label, last.offset, last.length + stop - start))
        else:
            result.append(Piece(label, passed[label], stop - start))
        passed[label] += stop - start
    return tuple(result)


def _labels(pieces: Sequence[Piece]) -> list[Label]:
    return list(dict.fromkeys(piece.label for piece in pieces if piece.label is not None))


def _length(pieces: Sequence[Piece], label: Label) -> int:
    return sum(piece.length for piece in pieces if piece.label == label)


def _held(ownership: Ownership, me: Coordinate, dim: int, rows: Sequence[Row]) -> Ranges:
    mine = tuple(me[a] for a in ownership.owner_axes[dim])
    return join_ranges([(start, stop) for start, stop, owner, _ in rows if owner == mine])


def _stays(ownership: Ownership, me: Coordinate, rows: Sequence[Sequence[Row]], held: Sequence[Ranges]) -> Region:
    """Return the region of what this rank owns that it also wants."""
    result = []
    for dim, dim_rows in enumerate(rows):
        owner = tuple(me[a] for a in ownership.owner_axes[dim])
        target = tuple(me[a] for a in ownership.target_axes[dim])
        ranges = join_ranges([(start, stop) for start, stop, o, t in dim_rows if o == owner and t == target])
        result.append(runs_in(ranges, held[dim]))
    return Region(result, [size_of(ranges) for ranges in held])


def _by_axis(axes: Sequence[Sequence[int]], digits: Sequence[Sequence[int]]) -> dict[int, int]:
    return {a: d for some, theirs in zip(axes, digits, strict=True) for a, d in zip(some, theirs, strict=True)}


class Exchange(Step):
    """Exchange in which each rank receives exactly what it lacks; without axes, a change of the local data alone.

    Args:
        ownership: who holds what before; see there.
    """

    ownership: Ownership

    def run(self, local: Tensor) -> Tensor:
        if not self.axes:
            return self.assemble(local, {})
        platform = self.platform
        sends: list[Tensor | None] = [None] * self.group.size
        receives: list[Tensor | None] = [None] * self.group.size
        for i, message in self.leaving(local):
            sends[i] = message
        received: Received = {}
        device = platform.device_of(local)
        for i, peer, shape in self.arriving:
            received[peer] = receives[i] = platform.empty(shape, local.dtype, device)
        self.group.exchange(sends, receives)
        return self.assemble(local, received)

    def leaving(self, local: Tensor) -> list[tuple[int, Tensor]]:
        """Return (rank in the group, its message) in the group's order."""
        return [(i, self.platform.contiguous(region.of(self.platform, local))) for i, region in self._leaving]

    def start(self, local: Tensor) -> Callable[[], Tensor]:
        """Begin one variable all-to-all of flat messages, which can go on by itself."""
        if not self.axes:
            return super().start(local)
        platform, group = self.platform, self.group
        leaving, arriving = [0] * group.size, [0] * group.size
        for i, region in self._leaving:
            leaving[i] = math.prod(region.shape)
        for i, _, shape in self.arriving:
            arriving[i] = math.prod(shape)
        flat = platform.empty((sum(arriving),), local.dtype, platform.device_of(local))
        work = group.all_to_all_into(flat, self._flat(local), arriving, leaving, True)
        return after(work, lambda: self.assemble(local, self._unpacked(flat)))

    def _flat(self, local: Tensor) -> Tensor:
        """Return all messages that leave, one after the other in one dimension."""
        platform = self.platform
        messages = [message for _, message in self.leaving(local)]
        if not messages:
            return platform.empty((0,), local.dtype, platform.device_of(local))
        return platform.contiguous(platform.ops.cat([platform.ops.reshape(x, (-1,)) for x in messages], 0))

    def _unpacked(self, flat: Tensor) -> Received:
        platform, passed = self.platform, 0
        received: Received = {}
        for _, peer, shape in self.arriving:
            part = platform.ops.narrow(flat, 0, passed, math.prod(shape))
            # Cloned: a result that is one message would else keep the whole buffer of all messages alive.
            received[peer] = platform.ops.reshape(platform.ops.clone(part), shape)
            passed += math.prod(shape)
        return received

    def assemble(self, local: Tensor, received: Received) -> Tensor:
        """Return the step's result from the messages, by their senders' coordinates, and from what stays here."""
        platform, messages = self.platform, self._messages
        # What stays here is not sent to itself, but takes its place in the recipe like a message.
        if messages.own is not None:
            received[self.coordinate] = messages.own.of(platform, local)
        result = messages.recipe.make(platform, received, local)
        if type(messages.recipe) is not Part:
            return result
        # It may be a view of the local tensor, or that itself.
        return compact_copy(platform, result) if self.axes else platform.ops.clone(result)

    @functools.cached_property
    def _messages(self) -> Messages:
        messages = exchange_messages(self.ownership, self.coordinate)
        assert self.axes or not messages.receives, f"{self.source} -> {self.target} needs communication"
        return messages

    @functools.cached_property
    def _leaving(self) -> list[tuple[int, Region]]:
        """Pairs (rank in the group, region of the local tensor) in the group's order."""
        return sorted(((self._index[peer], region) for peer, region in self._messages.sends.items()), key=_first)

    @functools.cached_property
    def arriving(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Triples (rank in the group, its coordinate, shape of its message) in the group's order."""
        return sorted(((self._index[peer], peer, shape) for peer, shape in self._messages.receives.items()), key=_first)

    @functools.cached_property
    def _index(self) -> dict[tuple[int, ...], int]:
        return {member: i for i, member in enumerate(self.mesh.members_over(self.axes))}


class ReduceToOwners(Step):
    """Reduction of partial results by the one rank of the axes that will own them, in rank order."""

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
        # This rank's own part is put among those of the others, so that the sum goes in rank order on every owner, and
        # a run can be repeated bit by bit.
        receives[rank], sends[rank] = sends[rank], None
        self.group.exchange(sends, [None if j == rank else x for j, x in enumerate(receives)])
        # A rank that owns nothing has taken part by sending; the next step does not look at what it holds.
        if mine is None:
            return platform.zeros((), local.dtype, device)
        result = functools.reduce(_reduction(platform, self.op), receives)
        return platform.ops.reshape(result, self._empty_shape) if 0 in shape and 0 in self._empty_shape else result

    @functools.cached_property
    def _empty_shape(self) -> tuple[int, ...]:
        """Shape of what the target places on this rank, which for an owner of nothing may differ from what it owns."""
        wanted = Ownership(self.ownership.shape, self.ownership.mesh_shape, self.target, self.target)
        held = wanted.source_ranges(self.coordinate)
        return tuple(sum(stop - start for start, stop in ranges) for ranges in held)

    @functools.cached_property
    def _regions(self) -> list[Region | None]:
        regions = reduction_regions(self.ownership, self.coordinate)
        return [regions[member] for member in self.mesh.members_over(self.axes)]


def _reduction(platform: Platform, op: str) -> Any:
    ops = platform.ops
    return {"max": ops.maximum, "min": ops.minimum, "product": ops.mul}.get(op, ops.add)


_first = operator.itemgetter(0)
