"""Messages between `LocalRanks` and the process of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Setup:
    """First message to a rank: its place in the job."""

    platform: str
    rank: int
    size: int
    timeout_seconds: float
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """Report of an exception in a rank: the phase (`start` or `run`), the exception, its time and its class."""

    phase: str
    what: str
    traceback: str
    when: float
    kind: str


@dataclass(frozen=True, slots=True)
class Returned:
    """Report of a function's result."""

    value: Any


@dataclass(frozen=True, slots=True)
class Run:
    """Request to run a function, by name. The arguments stay pickled until the function's module is there."""

    target: str
    args: bytes
