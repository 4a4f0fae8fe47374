"""Who holds which element: every dimension as segments labelled with the ranks' coordinates.

A placement that cuts a dimension maps each of its indices to a coordinate on the mesh axis, its digit. Chunk
order, strided and ragged shards and any nesting of them differ only in those maps, so one table per
dimension serves all.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from hp_dtensor.placements import Placement
from hp_dtensor.spec import split_ranges

Placements = tuple[Placement, ...]
Cut = tuple[int, Placement]
Segment = tuple[int, int, tuple[int, ...]]
"""(start, stop, digits): what ranks with those coordinates hold."""


def cuts_of(placements: Sequence[Placement], dim: int) -> tuple[Cut, ...]:
    """The (axis, placement) pairs that cut a dimension, outermost first."""
    return tuple((axis, placement) for axis, placement in enumerate(placements) if placement.is_shard(dim))


def segments(
    size: int, cuts: Sequence[Cut], mesh_shape: Sequence[int], fixed: Mapping[int, int] | None = None
) -> list[Segment]:
    """A dimension's segments, ascending, with one digit per cut; empty ones are left out.

    Args:
        fixed: axis -> coordinate to which it is restricted; ragged parts need not be known elsewhere.
    """
    held: list[tuple[tuple[tuple[int, int], ...], tuple[int, ...]]] = [(((0, size),), ())]
    for axis, placement in cuts:
        only = None if fixed is None else fixed.get(axis)
        held = [
            (part, (*digits, i))
            for ranges, digits in held
            for i, part in enumerate(split_ranges(ranges, placement, mesh_shape[axis]))
            if only is None or i == only
        ]
    return sorted((start, stop, digits) for ranges, digits in held for start, stop in ranges if start < stop)


def overlaps(
    first: Sequence[Segment], second: Sequence[Segment]
) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """(start, stop, digits in the first, digits in the second), ascending, of two lists of segments."""
    result = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            result.append((start, stop, first[i][2], second[j][2]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return result


def agreeing(shape: Sequence[int], mesh_shape: Sequence[int], source: Placements, target: Placements) -> int:
    """How many elements have the same digit in `source` and `target` on every axis that cuts in both.

    Those are the elements for which some rank that holds them is one that wants them.
    """
    shared = {a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s.is_shard() and t.is_shard()}
    for dim in range(len(shape)):
        shared -= _same_cuts(cuts_of(source, dim), cuts_of(target, dim))
    total = 1
    counts: list[_Counts] = []
    for dim, size in enumerate(shape):
        first, second = cuts_of(source, dim), cuts_of(target, dim)
        if shared & {axis for axis, _ in (*first, *second)}:
            counts.append(_count(size, first, second, mesh_shape, shared))
        else:
            total *= size
    return total * _joined(counts)


_Counts = tuple[tuple[int, ...], dict[tuple[int, ...], int]]
"""Axes, and how many indices have each combination of their digits."""


def _same_cuts(first: Sequence[Cut], second: Sequence[Cut]) -> set[int]:
    """The axes of the common outer cuts: their digits always agree."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return {cut[0] for cut, _ in pairs}


def _count(
    size: int, first: Sequence[Cut], second: Sequence[Cut], mesh_shape: Sequence[int], shared: set[int]
) -> _Counts:
    first_axes, second_axes = [axis for axis, _ in first], [axis for axis, _ in second]
    twice = [(first_axes.index(a), second_axes.index(a)) for a in shared if a in first_axes and a in second_axes]
    keys_first = [i for i, a in enumerate(first_axes) if a in shared and a not in second_axes]
    keys_second = [i for i, a in enumerate(second_axes) if a in shared and a not in first_axes]
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    for start, stop, s, t in overlaps(segments(size, first, mesh_shape), segments(size, second, mesh_shape)):
        if all(s[i] == t[j] for i, j in twice):
            counts[(*(s[i] for i in keys_first), *(t[i] for i in keys_second))] += stop - start
    return (*(first_axes[i] for i in keys_first), *(second_axes[i] for i in keys_second)), counts


def _joined(counts: Sequence[_Counts]) -> int:
    """The number of combinations of one index per dimension whose digits agree on every axis."""
    axes: tuple[int, ...] = ()
    found: dict[tuple[int, ...], int] = {(): 1}
    for more_axes, more in counts:
        common = [axis for axis in more_axes if axis in axes]
        rest = [axis for axis in more_axes if axis not in axes]
        by_common: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = defaultdict(list)
        for digits, n in more.items():
            by_axis = dict(zip(more_axes, digits, strict=True))
            by_common[tuple(by_axis[a] for a in common)].append((tuple(by_axis[a] for a in rest), n))
        joined: dict[tuple[int, ...], int] = defaultdict(int)
        kept = [i for i, axis in enumerate(axes) if axis not in common]
        where = [axes.index(axis) for axis in common]
        for digits, n in found.items():
            for others, m in by_common[tuple(digits[i] for i in where)]:
                joined[(*(digits[i] for i in kept), *others)] += n * m
        axes = (*(axes[i] for i in kept), *rest)
        found = joined
    return sum(found.values())


def product(values: Sequence[int], axes: Sequence[int]) -> int:
    return math.prod(values[axis] for axis in axes)
