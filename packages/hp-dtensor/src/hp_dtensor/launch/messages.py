"""Messages between `LocalRanks` and the process of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Setup:
    """What a rank is told first."""

    platform: str
    rank: int
    size: int
    timeout_seconds: float
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception in a rank: where it was (`start` or `run`), what it was, and when, on the machine's clock."""

    phase: str
    what: str
    traceback: str
    when: float


@dataclass(frozen=True, slots=True)
class Returned:
    """A function's result."""

    value: Any


@dataclass(frozen=True, slots=True)
class Run:
    """A function to run, by name; the arguments stay pickled until its module is there."""

    target: str
    args: bytes
