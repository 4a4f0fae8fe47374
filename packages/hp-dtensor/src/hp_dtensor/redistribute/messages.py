"""One rank's messages in a direct exchange, as regions of its local tensor."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hp_dtensor.redistribute.ownership import Coordinate, Ownership, Row
from hp_dtensor.redistribute.regions import Part, Recipe, Region, Zeros, recipe_over, runs_in, size_of
from hp_dtensor.spec.tensor_spec import Ranges, join_ranges

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
