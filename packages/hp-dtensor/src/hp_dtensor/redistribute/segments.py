"""Segments of a dimension, labelled with the coordinates of the ranks that hold them.

A placement that cuts a dimension maps each of its indices to a coordinate on the mesh axis, its digit. Chunk
order, strided and ragged shards and any nesting of them differ only in those maps, so one table per
dimension serves all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hp_dtensor.spec.placements import Placement
from hp_dtensor.spec.tensor_spec import split_ranges

Placements = tuple[Placement, ...]
Cut = tuple[int, Placement]
Segment = tuple[int, int, tuple[int, ...]]
"""(start, stop, digits): what ranks with those coordinates hold."""


def cuts_of(placements: Sequence[Placement], dim: int) -> tuple[Cut, ...]:
    """Return the (axis, placement) pairs that cut a dimension, outermost first."""
    return tuple([(axis, placement) for axis, placement in enumerate(placements) if placement.is_shard(dim)])


def segments(
    size: int, cuts: Sequence[Cut], mesh_shape: Sequence[int], fixed: Mapping[int, int] | None = None
) -> list[Segment]:
    """Return a dimension's segments, ascending, with one digit per cut; empty ones are left out.

    Args:
        fixed: axis -> coordinate to which it is restricted; ragged parts need not be known elsewhere.
    """
    held: list[tuple[tuple[tuple[int, int], ...], tuple[int, ...]]] = [(((0, size),), ())]
    for axis, placement in cuts:
        # Each cut divides what the cuts outside of it left to a rank, also where that is several ranges.
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
    """Return (start, stop, digits in the first, digits in the second), ascending, of two lists of segments."""
    result = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            result.append((start, stop, first[i][2], second[j][2]))
        # The one that ends first is done; at a tie the other one's rest is empty, and is passed next.
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return result


def product(values: Sequence[int], axes: Sequence[int]) -> int:
    return math.prod(values[axis] for axis in axes)
