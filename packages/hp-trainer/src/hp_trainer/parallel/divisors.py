"""Divisors of a number, and the nearest ones to suggest."""

from __future__ import annotations

from math import isqrt


def divisors(n: int) -> list[int]:
    """Return all divisors of `n`, ascending. O(sqrt(n))."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def nearest_divisors(n: int, target: int) -> list[int]:
    """Return the divisors of `n` next to `target` on either side (`target` itself when it is one)."""
    choices = divisors(n)
    below = [d for d in choices if d <= target]
    above = [d for d in choices if d >= target]
    return sorted({*below[-1:], *above[:1]})
