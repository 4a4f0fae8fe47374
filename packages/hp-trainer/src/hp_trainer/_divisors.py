"""Divisors and how to name them in a message."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt


def divisors(n: int) -> list[int]:
    """All divisors of `n`, ascending. O(sqrt(n))."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def nearest_divisors(n: int, target: int) -> list[int]:
    """The divisors of `n` next to `target` on either side (`target` itself when it is one)."""
    choices = divisors(n)
    below = [d for d in choices if d <= target]
    above = [d for d in choices if d >= target]
    return sorted({*below[-1:], *above[:1]})


def join_choices(values: Sequence[object]) -> str:
    """`2`, `2 or 4`, `1, 2 or 4`."""
    *rest, last = (str(value) for value in values)
    return f"{', '.join(rest)} or {last}" if rest else last
