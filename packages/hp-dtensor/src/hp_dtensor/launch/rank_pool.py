"""Ranks that stay for several calls: for tests, where starting processes takes longer than the calls."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from hp_dtensor.launch.local_ranks import LocalRanks, Output
from hp_dtensor.launch.target_names import target_name
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform


class RankPool:
    """A pool of `num_ranks` connected local processes, started when first needed and again after any failure.

    A context manager; `close` ends the processes, and so does the end of this process, however it comes.

    Args:
        platform: a platform or its name; None for the selected one.
        timeout_seconds: for joining the job, and for each collective where the platform can limit that.
    """

    def __init__(self, platform: Platform | str | None, num_ranks: int, timeout_seconds: float = 120.0) -> None:
        self.platform = get_platform(platform)
        self.num_ranks = num_ranks
        self._timeout_seconds = timeout_seconds
        self._ranks: LocalRanks | None = None

    def run(self, target: str | Callable[..., Any], *args: Any, timeout_seconds: float | None = 300.0) -> list[Any]:
        """Run `target(*args)` on every rank and return the results by rank.

        Args:
            target: a top-level function, or its name, `"module:function"`.
            args: picklable arguments, the same for every rank.

        Raises:
            LaunchError: a rank failed, died or took too long; all have been ended, and the next call starts
                new ones.
        """
        name = target_name(target)
        ranks = self._ranks if self._ranks is not None else self._start()
        try:
            return ranks.run(name, args, timeout_seconds)
        except BaseException:
            self._ranks = None
            raise

    def close(self) -> None:
        """End the processes; a later `run` starts new ones."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.stop()

    def _start(self) -> LocalRanks:
        ranks = LocalRanks(self.platform, self.num_ranks, Output(terminal=False), self._timeout_seconds)
        ranks.start()
        self._ranks = ranks
        return ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
