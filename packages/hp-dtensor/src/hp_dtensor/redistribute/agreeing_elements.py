"""Number of elements for which some rank that holds them in a source also wants them in a target."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

from hp_dtensor.redistribute.agreeing_in_even_cuts import agreeing_evenly
from hp_dtensor.redistribute.segments import Cut, Placements, cuts_of, overlaps, segments

MOST_PARTS = 1024
"""Into how many parts a tensor may be cut to be counted through, where the cuts are not even."""


def agreeing(shape: Sequence[int], mesh_shape: Sequence[int], source: Placements, target: Placements) -> int:
    """Return the number of elements with the same digit in `source` and `target` on every axis that cuts in both.

    Those are the elements for which some rank that holds them is one that wants them. Dimensions that are cut
    unevenly, in a new order and into more than `MOST_PARTS` parts count as if their cuts were even.
    """
    shared = {a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s.is_shard() and t.is_shard()}
    for dim in range(len(shape)):
        shared -= _same_cuts(cuts_of(source, dim), cuts_of(target, dim))
    if not shared:
        return math.prod(shape)
    evenly = agreeing_evenly(shape, mesh_shape, source, target, shared)
    # By digits the cost does not depend on the number of ranks; only uneven cuts are gone through one by one.
    if evenly is not None:
        return evenly
    if _parts(mesh_shape, source, target) > MOST_PARTS:
        return _as_if_even(shape, mesh_shape, source, target, shared)
    return _counted(shape, mesh_shape, source, target, shared)


def _parts(mesh_shape: Sequence[int], source: Placements, target: Placements) -> int:
    return max(
        math.prod(n for n, p in zip(mesh_shape, placements, strict=True) if p.is_shard())
        for placements in (source, target)
    )


def _as_if_even(
    shape: Sequence[int], mesh_shape: Sequence[int], source: Placements, target: Placements, shared: set[int]
) -> int:
    """Return the number of agreeing elements in the proportion of a tensor that every cut divides.

    Never all of them: that would mean that nothing needs to move.
    """
    # Long enough for every cut of source and target to divide it, nested ones too.
    every = math.prod(mesh_shape) ** 2
    even = agreeing_evenly([every] * len(shape), mesh_shape, source, target, shared)
    whole = every ** len(shape)
    share = even if even is not None else whole // math.prod(mesh_shape[a] for a in shared)
    return max(0, min(int(math.prod(shape) * share // whole), math.prod(shape) - 1))


def _counted(
    shape: Sequence[int], mesh_shape: Sequence[int], source: Placements, target: Placements, shared: set[int]
) -> int:
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
    """Return the axes of the outer cuts that both have in common: on these the digits always agree."""
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
    """Return the number of combinations of one index per dimension whose digits agree on every axis."""
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
