"""What this rank sends and receives in a direct exchange, as parts of its local tensor."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.platform import Platform
from hp_dtensor.redistribute.ownership import Coordinate, Ownership, Row
from hp_dtensor.spec import Ranges, join_ranges

Tensor = Any
Runs = tuple[tuple[int, int], ...]
"""(offset, length) pairs along one dimension of a local tensor."""
Label = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a local tensor: along each dimension some runs."""

    runs: tuple[Runs, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(length for _, length in runs) for runs in self.runs)

    def of(self, platform: Platform, x: Tensor) -> Tensor:
        """That part of `x`; may share its storage."""
        for dim, runs in enumerate(self.runs):
            if runs == ((0, x.shape[dim]),):
                continue
            pieces = [platform.ops.narrow(x, dim, offset, length) for offset, length in runs or ((0, 0),)]
            x = pieces[0] if len(pieces) == 1 else platform.ops.cat(pieces, dim)
        return x


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of the result along one dimension: from the messages with a label, or zeros (label None)."""

    label: Label | None
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Messages:
    """One rank's share of an exchange.

    Attributes:
        sends: region of the local tensor for each receiving rank.
        receives: shape and labels of what comes from each rank.
        own: the region that stays here, with its labels; None if nothing does.
        pieces: how the result is put together along each dimension; None: it is all zeros.
        shape: of the result.
    """

    sends: dict[Coordinate, Region]
    receives: dict[Coordinate, tuple[tuple[int, ...], tuple[Label, ...]]]
    own: tuple[Region, tuple[Label, ...]] | None
    pieces: tuple[tuple[Piece, ...], ...] | None
    shape: tuple[int, ...]

    def assemble(self, platform: Platform, received: dict[tuple[Label, ...], Tensor], like: Tensor) -> Tensor:
        """The result of all messages by their labels; a tensor of its own."""
        if self.pieces is None or 0 in self.shape:
            return platform.zeros(self.shape, like.dtype, platform.device_of(like))
        return self._build(platform, received, like, ())

    def _build(
        self, platform: Platform, received: dict[tuple[Label, ...], Tensor], like: Tensor, chosen: tuple[Piece, ...]
    ) -> Tensor:
        assert self.pieces is not None
        dim = len(chosen)
        if dim == len(self.shape):
            return _cell(platform, received, like, chosen)
        parts = [self._build(platform, received, like, (*chosen, piece)) for piece in self.pieces[dim]]
        return parts[0] if len(parts) == 1 else platform.ops.cat(parts, dim)


def _cell(
    platform: Platform, received: dict[tuple[Label, ...], Tensor], like: Tensor, chosen: tuple[Piece, ...]
) -> Tensor:
    labels = tuple(piece.label for piece in chosen if piece.label is not None)
    if len(labels) < len(chosen):
        return platform.zeros([piece.length for piece in chosen], like.dtype, platform.device_of(like))
    return Region(tuple(((piece.offset, piece.length),) for piece in chosen)).of(platform, received[labels])


def exchange_messages(ownership: Ownership, me: Coordinate) -> Messages:
    """This rank's part in bringing everything from its owners to where the target wants it."""
    rows, owned = ownership.rows_wanted(me), ownership.rows_owned(me)
    held = tuple(_held(ownership, me, dim, dim_rows) for dim, dim_rows in enumerate(owned))
    pieces = tuple(_pieces(ownership, me, dim, dim_rows) for dim, dim_rows in enumerate(rows))
    shape = tuple(sum(piece.length for piece in parts) for parts in pieces)
    if not ownership.wants_any(me):
        return Messages(_sends(ownership, me, owned, held), {}, None, None, shape)
    receives: dict[Coordinate, tuple[tuple[int, ...], tuple[Label, ...]]] = {}
    own = None
    for labels in itertools.product(*(_labels(parts) for parts in pieces)):
        owner = _by_axis(ownership.owner_axes, labels)
        if ownership.owns(me, owner):
            own = _stays(ownership, me, owned, held), labels
        else:
            lengths = tuple(_length(parts, label) for parts, label in zip(pieces, labels, strict=True))
            receives[ownership.sender(me, owner)] = lengths, labels
    return Messages(_sends(ownership, me, owned, held), receives, own, pieces, shape)


def reduction_regions(ownership: Ownership, me: Coordinate) -> dict[Coordinate, Region | None]:
    """For each rank of this one's line over the reduced axes, the part of the partial results that it will own."""
    rows = ownership.rows_partial(me)
    whole = ownership.source_ranges(me)
    choices = [range(n) if a in ownership.reduced else (me[a],) for a, n in enumerate(ownership.mesh_shape)]
    result: dict[Coordinate, Region | None] = {}
    for member in itertools.product(*choices):
        ranges = [_held(ownership, member, dim, dim_rows) for dim, dim_rows in enumerate(rows)]
        region = Region(tuple(runs_in(part, held) for part, held in zip(ranges, whole, strict=True)))
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
                region = Region(tuple(runs_in(r, h) for r, h in zip(ranges, held, strict=True)))
            result[receiver] = region
    return result


def _pieces(ownership: Ownership, me: Coordinate, dim: int, rows: Sequence[Row]) -> tuple[Piece, ...]:
    """The runs of this rank's result along a dimension, neighbours with one label joined."""
    mine = tuple(me[a] for a in ownership.target_axes[dim])
    partial = [i for i, a in enumerate(ownership.owner_axes[dim]) if ownership.target[a].is_partial()]
    axes = ownership.owner_axes[dim]
    result: list[Piece] = []
    passed: dict[Label | None, int] = defaultdict(int)
    for start, stop, owner, target in rows:
        if target != mine:
            continue
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
    """The part of what this rank owns that it also wants."""
    result = []
    for dim, dim_rows in enumerate(rows):
        owner = tuple(me[a] for a in ownership.owner_axes[dim])
        target = tuple(me[a] for a in ownership.target_axes[dim])
        ranges = join_ranges([(start, stop) for start, stop, o, t in dim_rows if o == owner and t == target])
        result.append(runs_in(ranges, held[dim]))
    return Region(tuple(result))


def runs_in(ranges: Ranges, held: Ranges) -> Runs:
    """Where `ranges`, which `held` contains, lie in a local tensor that holds `held`."""
    result: list[tuple[int, int]] = []
    passed = i = 0
    for start, stop in ranges:
        while i < len(held) and held[i][1] <= start:
            passed += held[i][1] - held[i][0]
            i += 1
        while start < stop:
            low, high = held[i]
            offset, length = passed + start - low, min(stop, high) - start
            if result and sum(result[-1]) == offset:
                result[-1] = (result[-1][0], result[-1][1] + length)
            else:
                result.append((offset, length))
            start += length
            if start < stop:
                passed += high - low
                i += 1
    return tuple(result)


def _by_axis(axes: Sequence[Sequence[int]], digits: Sequence[Sequence[int]]) -> dict[int, int]:
    return {a: d for some, theirs in zip(axes, digits, strict=True) for a, d in zip(some, theirs, strict=True)}
