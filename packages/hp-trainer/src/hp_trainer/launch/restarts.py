"""Local ranks, started again from the newest checkpoint when one of them fails."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.launch import launch
from hp_dtensor.launch.local_launch import STOP_SIGNALS
from hp_dtensor.platform.interface import Platform
from hp_trainer.checkpoint import find_latest
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import ConfigError, DataError, RunFolderError, RunLockedError, TrainingError
from hp_trainer.launch.world_size import world_size_of
from hp_trainer.run import RunFolder, checkpoint_storage
from hp_trainer.stop_request import Interrupted

RankArguments = tuple[str, str, str | None, str, bool]

# Errors that would come again: a number that is not finite, input that is wrong, a run that is another job's.
_FINAL = {error.__name__ for error in (ConfigError, DataError, RunFolderError, RunLockedError, TrainingError)}
_PAUSE_SECONDS = 1.0


def run_with_restarts(
    run_rank: Callable[..., int | None], arguments: RankArguments, config: TrainerConfig, platform: Platform
) -> int | None:
    """Run a job on local ranks; return the signal that ended it before its last step, or None when it is done.

    After a failure the ranks are started again from the newest sound checkpoint, `launch.max_restarts` times without
    a newer checkpoint between. Logs of a rank that failed keep their name with `.failed-1`, `.failed-2`, ...

    Args:
        run_rank: takes `arguments`, whose third is the name of the checkpoint to go on from.

    Raises:
        LaunchError: a rank failed, and no restart is left or none would help.
    """
    path, owner, checkpoint, *rest = arguments
    run = RunFolder(Path(path), owner)
    left, failures = config.launch.max_restarts, 0
    while True:
        try:
            return _run_once(run_rank, (path, owner, checkpoint, *rest), config, platform, run.logs)
        except LaunchError as error:
            # A rank that was told to stop has not failed.
            if not config.launch.max_restarts or error.kind in _FINAL or stopped_by(error) is not None:
                raise
            newest = find_latest(checkpoint_storage(run, config)).checkpoint
            # Progress since the last restart gives back all restarts.
            if newest is not None and newest.folder != checkpoint:
                left, checkpoint = config.launch.max_restarts, newest.folder
            if not left:
                raise
            left, failures = left - 1, failures + 1
            # Another job may have taken the run over while the ranks ended.
            run.check_owner()
            _keep_logs(run.logs, failures)
            _tell(error, config, left, newest.step if newest is not None else 0)
            time.sleep(_PAUSE_SECONDS)


def stopped_by(error: LaunchError) -> int | None:
    """Return the signal to stop that one rank alone received before it could tell the others; None: it failed."""
    if error.kind == "KeyboardInterrupt":
        return signal.SIGINT
    return error.signal if error.signal in STOP_SIGNALS else None


def _run_once(
    run_rank: Callable[..., int | None],
    arguments: tuple[object, ...],
    config: TrainerConfig,
    platform: Platform,
    logs: Path,
) -> int | None:
    try:
        ended_by: list[int | None] = launch(
            run_rank,
            arguments,
            num_ranks=world_size_of(config),
            platform=platform,
            log_dir=logs,
            timeout_seconds=config.launch.timeout_seconds,
            stop_seconds=config.launch.stop_seconds,
        )
    except Interrupted as interrupted:
        # The ranks have ended by now, in their own time.
        return int(interrupted.signal)
    return ended_by[0]


def _keep_logs(logs: Path, failures: int) -> None:
    """Rename the logs of ranks that have ended, which the next ones would write over."""
    for log in logs.glob("rank*.log"):
        if log.stem.removeprefix("rank").isdecimal():
            log.rename(log.with_name(f"{log.stem}.failed-{failures}.log"))


def _tell(error: LaunchError, config: TrainerConfig, left: int, step: int) -> None:
    print(
        f"hp-train: {error}\nhp-train: starting the ranks again from step {step} of {config.training.steps}; "
        f"restarts left without a newer checkpoint: {left}",
        file=sys.stderr,
        flush=True,
    )
