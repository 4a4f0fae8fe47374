"""Patterns of names, as settings have them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of the patterns, whose `*` stands for anything; upper case counts."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
