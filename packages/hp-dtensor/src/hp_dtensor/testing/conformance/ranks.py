"""Ranks of either kind, for programs that do not care which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_dtensor.launch import RankPool
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing.simulated import run_ranks


@dataclass(frozen=True)
class Ranks:
    """`size` ranks: simulated, or of `pool`."""

    size: int
    platform: Platform
    pool: RankPool | None

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """`program(platform, *args)` on every rank; the results by rank."""
        if self.pool is None:
            return run_ranks(program, self.size, self.platform, self.platform, *args)
        return self.pool.run(program, self.platform.name, *args)
