"""A profile of chosen steps of a run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from hp_dtensor.platform.interface import Platform
from hp_trainer.config import ProfileConfig


class StepProfile:
    """Profiles the steps from `profile.first` to `profile.last` on every rank; ends what has begun with its block.

    Args:
        folder: `profile/` of the run folder.
    """

    def __init__(self, config: ProfileConfig, folder: Path, platform: Platform, rank: int) -> None:
        self._config, self._folder, self._platform, self._rank = config, folder, platform, rank
        self._open: AbstractContextManager[None] | None = None

    def __enter__(self) -> StepProfile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            opened.__exit__(kind, error, trace)

    def before_step(self, step: int) -> None:
        """Begin with the first step to profile; a run that goes on in their midst begins there."""
        first, last = self._config.first, self._config.last
        if self._open is None and first is not None and first <= step <= (last or first):
            self._folder.mkdir(exist_ok=True)
            self._open = self._platform.profile(self._folder, self._rank)
            self._open.__enter__()

    def after_step(self, step: int) -> None:
        """End after the last step to profile, and write the files."""
        if self._open is not None and step >= (self._config.last or self._config.first or 0):
            self.__exit__(None, None, None)
