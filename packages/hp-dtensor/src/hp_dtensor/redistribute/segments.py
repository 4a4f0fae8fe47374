"""Segments of a dimension, labelled with the coordinates of the ranks that hold them.

A placement that cuts a dimension maps each of its indices to a coordinate on the mesh axis, its digit. Chunk
order, strided and ragged shards and any nesting of them differ only in those maps, so one table per
dimension serves all.

Number of elements for which some rank that holds them in a source also wants them in a target.

Even cuts as mixed-radix digits: counting agreeing elements without going through the ranks.

Where every cut is even, an index is a number whose leading digits say who holds it. Each mesh axis takes some
of those digits, so that two placements agree on an axis exactly where two groups of digits are equal. Counting
the elements for which several such equations hold takes a union of digits, whatever the number of ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hp_dtensor.spec.placements import Placement, Shard, StridedShard
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


Span = tuple[int, int]
"""The digits of a dimension between `low` and `high` parts: `low` divides `high`."""
Digits = list[tuple[int, Span]]
"""(dimension, span) pairs, the most significant first."""


def agreeing_evenly(
    shape: Sequence[int], mesh_shape: Sequence[int], source: Placements, target: Placements, shared: Iterable[int]
) -> int | None:
    """Return the number of elements with equal digits in both on axes `shared`, or None if cuts are not even."""
    first, second = _spans(shape, mesh_shape, source), _spans(shape, mesh_shape, target)
    if first is None or second is None:
        return None
    bounds = [{1} for _ in shape]
    for digits in (*first.values(), *second.values()):
        for dim, span in digits:
            bounds[dim].update(span)
    pairs = [(first[axis], second[axis]) for axis in shared]
    if not _refine(bounds, pairs):
        return None
    equal = [pair for a, b in pairs for pair in zip(_split(a, bounds), _split(b, bounds), strict=True)]
    return math.prod(shape) // _restriction(equal)


def _spans(shape: Sequence[int], mesh_shape: Sequence[int], placements: Placements) -> dict[int, Digits] | None:
    """Return the digits that each axis takes, or None if a cut is not even."""
    result: dict[int, Digits] = {}
    for dim, size in enumerate(shape):
        free: list[Span] = [(1, size)]
        for axis, placement in cuts_of(placements, dim):
            taken = _take(free, (axis, placement), mesh_shape[axis])
            if taken is None:
                return None
            result[axis] = [(dim, span) for span in taken]
    return result


def _take(free: list[Span], cut: Cut, ranks: int) -> list[Span] | None:
    """Take the leading free digits; for a strided shard those after its split factor."""
    _, placement = cut
    if isinstance(placement, StridedShard):
        passed = _lead(free, placement.split_factor)
        taken = _lead(free, ranks) if passed is not None else None
        if passed is not None:
            free[:0] = passed
        return taken
    return _lead(free, ranks) if isinstance(placement, Shard) else None


def _lead(free: list[Span], parts: int) -> list[Span] | None:
    """Remove the leading digits that count `parts` and return them, or None if the rest shares a digit."""
    taken: list[Span] = []
    while parts > 1:
        if not free:
            return None
        low, high = free.pop(0)
        # A cut into 6 takes a digit of 2 and 3 of the next one's 9; one that shares a digit with what is left has no
        # such form, and elements are counted one by one instead.
        here = math.gcd(parts, high // low)
        if here < parts and here < high // low:
            return None
        taken.append((low, low * here))
        if low * here < high:
            free.insert(0, (low * here, high))
        parts //= here
    return taken


def _refine(bounds: list[set[int]], pairs: Sequence[tuple[Digits, Digits]]) -> bool:
    """Split digits until both sides of every equation have the same ones, and return whether that is possible."""
    before = -1
    while before != (before := sum(map(len, bounds))):
        if not all(_is_chain(found) for found in bounds):
            return False
        for sides in pairs:
            counts = {n for side in sides for n in _part_counts(_split(side, bounds))}
            for side in sides:
                _add(side, counts, bounds)
    return all(_radices(_split(a, bounds)) == _radices(_split(b, bounds)) for a, b in pairs)


def _is_chain(numbers: Iterable[int]) -> bool:
    return all(b % a == 0 for a, b in itertools.pairwise(sorted(numbers)))


def _split(digits: Digits, bounds: Sequence[set[int]]) -> Digits:
    result: Digits = []
    for dim, (low, high) in digits:
        marks = sorted(mark for mark in bounds[dim] if low <= mark <= high)
        result += [(dim, span) for span in itertools.pairwise(marks)]
    return result


def _radices(digits: Digits) -> list[int]:
    return [high // low for _, (low, high) in digits]


def _part_counts(digits: Digits) -> list[int]:
    """Return the number of parts that the first one, two, ... of the digits cut into."""
    return list(itertools.accumulate(_radices(digits), int.__mul__))


def _add(digits: Digits, counts: Iterable[int], bounds: list[set[int]]) -> None:
    """Add the boundaries at which the leading digits count one of `counts`."""
    passed = 1
    for dim, (low, high) in digits:
        for count in counts:
            if passed < count < passed * (high // low) and count % passed == 0:
                bounds[dim].add(low * (count // passed))
        passed *= high // low


def _restriction(equal: Sequence[tuple[tuple[int, Span], tuple[int, Span]]]) -> int:
    """Return the factor by which the equations make the combinations of digits fewer."""
    parent: dict[tuple[int, Span], tuple[int, Span]] = {}

    def root(digit: tuple[int, Span]) -> tuple[int, Span]:
        while parent.get(digit, digit) != digit:
            digit = parent[digit]
        return digit

    factor = 1
    for a, b in equal:
        # Union-find: an equation between digits that are equal already restricts nothing further.
        first, second = root(a), root(b)
        if first != second:
            parent[first] = second
            factor *= a[1][1] // a[1][0]
    return factor
