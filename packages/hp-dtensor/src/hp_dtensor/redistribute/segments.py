"""Segments of a tensor dimension by the ranks that hold them, and the number of elements that need not move.

A placement that shards a dimension maps each index of it to a coordinate on its mesh axis. Chunked, strided and ragged
shards and any nesting of them differ only in this map. So one table of segments per dimension describes all of them,
uneven and empty shards included.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from hp_dtensor.spec.placements import Placement
from hp_dtensor.spec.tensor_spec import split_ranges

Placements = tuple[Placement, ...]
AxisSharding = tuple[int, Placement]
"""(mesh axis, its placement) of an axis that shards a dimension."""
Segment = tuple[int, int, tuple[int, ...]]
"""(start, stop, coordinates): the indices held by the ranks with these coordinates on the sharding axes."""

MAX_COUNTED_SHARDS = 1024
"""With more shards than this, `elements_in_place` estimates instead of counting."""


def shardings_of(placements: Sequence[Placement], dim: int) -> tuple[AxisSharding, ...]:
    """Return the (axis, placement) pairs that shard a tensor dimension, outermost first."""
    return tuple([(axis, placement) for axis, placement in enumerate(placements) if placement.is_shard(dim)])


def product(values: Sequence[int], axes: Sequence[int]) -> int:
    """Return the product of the values at `axes`, such as the number of ranks over several mesh axes."""
    return math.prod(values[axis] for axis in axes)


def segments(
    size: int, shardings: Sequence[AxisSharding], mesh_shape: Sequence[int], fixed: Mapping[int, int] | None = None
) -> list[Segment]:
    """Return the non-empty segments of a dimension in ascending order, with one coordinate per sharding axis.

    Args:
        fixed: axis -> the only coordinate to list. Ragged shard sizes need to be known only there.
    """
    held: list[tuple[tuple[tuple[int, int], ...], tuple[int, ...]]] = [(((0, size),), ())]
    for axis, placement in shardings:
        # An inner sharding splits what the outer ones left on a rank, even where that is several ranges.
        only = None if fixed is None else fixed.get(axis)
        held = [
            (shard, (*coordinates, i))
            for ranges, coordinates in held
            for i, shard in enumerate(split_ranges(ranges, placement, mesh_shape[axis]))
            if only is None or i == only
        ]
    return sorted((start, stop, coordinates) for ranges, coordinates in held for start, stop in ranges if start < stop)


def overlaps(
    first: Sequence[Segment], second: Sequence[Segment]
) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Return the intersections of two lists of segments, ascending, as (start, stop, coordinates, coordinates)."""
    result = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            result.append((start, stop, first[i][2], second[j][2]))
        # Advance past the segment that ends first. At a tie the rest of the other one is empty and is passed next.
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return result


# Elements that need not move ------------------------------------------------------------------------------


def elements_in_place(shape: Sequence[int], mesh_shape: Sequence[int], source: Placements, target: Placements) -> int:
    """Return the number of elements that at least one rank holds in `source` and needs in `target`.

    Those are the elements with the same coordinate in both on every axis that shards in both. Above
    `MAX_COUNTED_SHARDS` shards the result is an estimate, so that the cost of planning is bounded for any mesh.
    """
    shared = {a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s.is_shard() and t.is_shard()}
    for dim in range(len(shape)):
        shared -= _equal_outer_axes(shardings_of(source, dim), shardings_of(target, dim))
    elements = math.prod(shape)
    if not shared:
        return elements
    if max(_num_shards(mesh_shape, source), _num_shards(mesh_shape, target)) > MAX_COUNTED_SHARDS:
        # As if the coordinates in source and target were independent. Never all elements: a volume of zero would
        # stand for a redistribution that communicates nothing.
        return min(elements // product(mesh_shape, sorted(shared)), max(elements - 1, 0))
    unsharded = 1
    counts: list[_Counts] = []
    for dim, size in enumerate(shape):
        before, after = shardings_of(source, dim), shardings_of(target, dim)
        if shared & {axis for axis, _ in (*before, *after)}:
            counts.append(_count_by_coordinates(size, before, after, mesh_shape, shared))
        else:
            unsharded *= size
    return unsharded * _count_agreeing(counts)


def _num_shards(mesh_shape: Sequence[int], placements: Placements) -> int:
    return math.prod(n for n, p in zip(mesh_shape, placements, strict=True) if p.is_shard())


def _equal_outer_axes(first: Sequence[AxisSharding], second: Sequence[AxisSharding]) -> set[int]:
    """Return the axes of the outer shardings that both have in common: coordinates on these always agree."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return {sharding[0] for sharding, _ in pairs}


_Counts = tuple[tuple[int, ...], dict[tuple[int, ...], int]]
"""Axes, and the number of indices of a dimension for each combination of coordinates on them."""


def _count_by_coordinates(
    size: int,
    before: Sequence[AxisSharding],
    after: Sequence[AxisSharding],
    mesh_shape: Sequence[int],
    shared: set[int],
) -> _Counts:
    """Count the indices of one dimension by their coordinates on the shared axes that shard it once.

    An axis that shards the dimension both before and after is settled here: only indices that agree on it count. An
    axis that shards this dimension before and another one after, or the reverse, is matched in `_count_agreeing`.
    """
    axes_before, axes_after = [axis for axis, _ in before], [axis for axis, _ in after]
    both = [(axes_before.index(a), axes_after.index(a)) for a in shared if a in axes_before and a in axes_after]
    only_before = [i for i, a in enumerate(axes_before) if a in shared and a not in axes_after]
    only_after = [i for i, a in enumerate(axes_after) if a in shared and a not in axes_before]
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    for start, stop, s, t in overlaps(segments(size, before, mesh_shape), segments(size, after, mesh_shape)):
        if all(s[i] == t[j] for i, j in both):
            counts[(*(s[i] for i in only_before), *(t[i] for i in only_after))] += stop - start
    return (*(axes_before[i] for i in only_before), *(axes_after[i] for i in only_after)), counts


def _count_agreeing(counts: Sequence[_Counts]) -> int:
    """Return the number of combinations of one index per dimension whose coordinates agree on every axis."""
    # A natural join, dimension by dimension, of tables whose columns are mesh axes.
    axes: tuple[int, ...] = ()
    found: dict[tuple[int, ...], int] = {(): 1}
    for more_axes, more in counts:
        common = [axis for axis in more_axes if axis in axes]
        rest = [axis for axis in more_axes if axis not in axes]
        by_common: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = defaultdict(list)
        for coordinates, n in more.items():
            by_axis = dict(zip(more_axes, coordinates, strict=True))
            by_common[tuple(by_axis[a] for a in common)].append((tuple(by_axis[a] for a in rest), n))
        joined: dict[tuple[int, ...], int] = defaultdict(int)
        remaining = [i for i, axis in enumerate(axes) if axis not in common]
        where = [axes.index(axis) for axis in common]
        for coordinates, n in found.items():
            for others, m in by_common[tuple(coordinates[i] for i in where)]:
                joined[(*(coordinates[i] for i in remaining), *others)] += n * m
        axes = (*(axes[i] for i in remaining), *rest)
        found = joined
    return sum(found.values())
