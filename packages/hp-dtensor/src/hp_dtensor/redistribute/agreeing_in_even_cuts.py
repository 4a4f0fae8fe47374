"""Even cuts as mixed-radix digits: counting agreeing elements without going through the ranks.

Where every cut is even, an index is a number whose leading digits say who holds it. Each mesh axis takes some
of those digits, so that two placements agree on an axis exactly where two groups of digits are equal. Counting
the elements for which several such equations hold takes a union of digits, whatever the number of ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from hp_dtensor.redistribute.segments import Cut, Placements, cuts_of
from hp_dtensor.spec.placements import Shard, StridedShard

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
            counts = {n for side in sides for n in _counts(_split(side, bounds))}
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


def _counts(digits: Digits) -> list[int]:
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
