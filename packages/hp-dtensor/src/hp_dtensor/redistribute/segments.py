"""Segments of a tensor dimension by the ranks that hold them, and the number of elements that need not move.

A placement that shards a dimension maps each index of it to a coordinate on its mesh axis. Chunked, strided and ragged
shards and any nesting of them differ only in this map. So one table of segments per dimension describes all of them,
uneven and empty shards included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from hp_dtensor.spec.placements import Placement, RaggedShard, Shard, StridedShard
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


def sharded_dim(placement: Placement) -> int:
    """Return the tensor dimension that a placement shards."""
    assert isinstance(placement, (Shard, StridedShard, RaggedShard))
    return placement.dim


def product(values: Sequence[int], axes: Sequence[int]) -> int:
    """Return the product of the values at `axes`, such as the number of ranks over several mesh axes."""
    return math.prod(values[axis] for axis in axes)


def segments(
    size: int, shardings: Sequence[AxisSharding], mesh_shape: Sequence[int], fixed: Mapping[int, int] | None = None
) -> list[Segment]:
    """Return the non-empty segments of a dimension; `fixed`: axis -> the coordinate to list, which ragged ones need."""
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


def elements_in_place(shape: Sequence[int], mesh_shape: Sequence[int], source: Placements, target: Placements) -> int:
    """Return the number of elements that stay on a rank, estimated above `MAX_COUNTED_SHARDS` shards."""
    shared = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s.is_shard() and t.is_shard()]
    for dim in range(len(shape)):
        # Coordinates on the outer axes that shard the dimension alike in both always agree.
        pairs = zip(shardings_of(source, dim), shardings_of(target, dim), strict=False)
        alike = {first[0] for first, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)}
        shared = [axis for axis in shared if axis not in alike]
    elements = math.prod(shape)
    if not shared:
        return elements
    num_shards = [product(mesh_shape, [a for a, p in enumerate(each) if p.is_shard()]) for each in (source, target)]
    if max(num_shards) > MAX_COUNTED_SHARDS:
        # As if the coordinates in source and target were independent. Never all elements: a volume of zero would
        # stand for a redistribution that communicates nothing.
        return min(elements // product(mesh_shape, shared), max(elements - 1, 0))
    operands: list[Any] = []
    for dim, size in enumerate(shape):
        before, after = shardings_of(source, dim), shardings_of(target, dim)
        operands += _count_by_coordinates(size, before, after, mesh_shape, shared)
    # Dimensions are independent once the coordinates on the shared axes are given, so the number of elements that agree
    # on them is a product of the counts summed over these coordinates: an Einstein sum whose labels are mesh axes.
    return int(numpy.einsum(*operands, []))


def _count_by_coordinates(
    size: int,
    before: Sequence[AxisSharding],
    after: Sequence[AxisSharding],
    mesh_shape: Sequence[int],
    shared: Sequence[int],
) -> tuple[numpy.ndarray[Any, Any], list[int]]:
    """Return counts of indices by coordinates on the shared axes, and the mesh axis of each of their dimensions."""
    axes = [axis for axis, _ in (*before, *after)]
    columns = [i for i, axis in enumerate(axes) if axis in shared]
    if not columns:
        return numpy.array(size), []
    counts = numpy.zeros([mesh_shape[axes[i]] for i in columns], numpy.int64)
    for start, stop, s, t in overlaps(segments(size, before, mesh_shape), segments(size, after, mesh_shape)):
        coordinates = (*s, *t)
        counts[tuple([coordinates[i] for i in columns])] += stop - start
    return counts, [axes[i] for i in columns]
