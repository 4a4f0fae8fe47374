"""A training job: ranks started on this machine, or joined where a launcher has started them.

Local ranks, started again from the newest checkpoint when one of them fails.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import HPError, LaunchError
from hp_dtensor.launch import from_environment, is_launched, launch, rank_environment
from hp_dtensor.launch.local_launch import STOP_SIGNALS
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_trainer._coordination import coordinator
from hp_trainer.checkpoint import find_latest
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import (
    ConfigError,
    DataError,
    MachineError,
    RunFolderError,
    RunLockedError,
    StoppedError,
    TrainingError,
)
from hp_trainer.failures import describe_exit, describe_machine_error
from hp_trainer.generation import write_samples
from hp_trainer.launch.platforms import world_size_of
from hp_trainer.run import RunFolder, RunLock, checkpoint_storage
from hp_trainer.stop_signals import Interrupted
from hp_trainer.training import Trainer
from hp_trainer.training.stalls import watched_set_up


def is_first_process() -> bool:
    """Return whether this process speaks for the job: it was not started by a launcher, or it is rank 0."""
    found = rank_environment() if is_launched() else None
    return found is None or (found.rank == 0 and not found.is_scheduler)


def launch_training(config: TrainerConfig, folder: Path, prepare: Callable[[], str | None]) -> Path:
    """Train on all ranks of a job; return the run folder when every rank has finished.

    Args:
        config: says how many ranks to start here, and on which platform.
        folder: the run folder; it is locked for this job until its end.
        prepare: called once in the whole job, under the lock and before any rank needs it; fills or opens the run
            folder and returns the name of the checkpoint to go on from (None: from the beginning).

    Raises:
        RunLockedError: another job trains this run.
        LaunchError: a local rank failed.
        StoppedError: a signal ended the run before its last step.
        HPError: what `prepare` or, where this process is a rank, the training raises.
    """
    platform = get_platform(config.platform)
    with ExitStack() as held:

        def begin() -> tuple[str, str, str | None]:
            if not folder.exists():
                held.callback(_remove_empty, folder)
                folder.mkdir(parents=True)
            lock = held.enter_context(RunLock(folder))
            # Ranks on other machines may stand in another folder.
            return str(folder.absolute() if is_launched() else folder), lock.nonce, prepare()

        return _train(config, platform, begin)


def _train(config: TrainerConfig, platform: Platform, begin: Callable[[], tuple[str, str, str | None]]) -> Path:
    """Train on all ranks; `begin` locks and prepares the run, and returns its folder, lock and checkpoint."""
    if is_launched():
        world = from_environment(platform, config.launch.timeout_seconds)
        path, owner, checkpoint = coordinator(world.all, "preparing the run", begin, RunFolderError)
        ended_by = _train_here(config, path, owner, checkpoint, platform.name, False)
        # The world ends first: other ranks need not wait while rank 0 writes the samples.
        platform.disconnect()
        if ended_by is None and is_first_process():
            write_samples(RunFolder(Path(path)), config)
    else:
        path, owner, checkpoint = begin()
        arguments = (path, owner, checkpoint, platform.name, True)
        if world_size_of(config) == 1 and not config.launch.max_restarts:
            ended_by = _train_here(config, *arguments)
        else:
            ended_by = _train_on_local_ranks(config, platform, arguments)
    if ended_by is not None:
        left = _what_is_left(RunFolder(Path(path)), config)
        raise StoppedError(f"stopped by {signal.Signals(ended_by).name}. {left}", ended_by)
    return Path(path)


def _train_on_local_ranks(config: TrainerConfig, platform: Platform, arguments: RankArguments) -> int | None:
    try:
        return run_with_restarts(run_rank, arguments, config, platform)
    except LaunchError as error:
        ended_by = stopped_by(error)
        if ended_by is not None:
            return ended_by
        left = _what_is_left(RunFolder(Path(arguments[0])), config)
        raise LaunchError(f"{error}\n{left}", error.rank, error.kind, error.signal) from error


def run_rank(folder: str, owner: str, checkpoint: str | None, platform: str, samples: bool) -> int | None:
    """Do one rank's part of a job; its world is connected.

    Args:
        folder: the run folder; its data are prepared.
        owner: name of the lock that the job holds on it.
        checkpoint: name of the checkpoint to go on from; None: from the beginning.
        platform: the platform's name.
        samples: rank 0 writes the samples of a finished run. Where ranks were started here this is the process that
            has the right number of threads for it.

    Returns:
        The signal that ended the run before its last step, the same on every rank; None: it is done.

    Raises:
        MachineError: a disk, a limit or the memory did not suffice.
        TrainingError: something, such as a tracker or a model that writes samples, left with SystemExit.
    """
    with _early_ends_told():
        return _run_rank(RunFolder.open(Path(folder), owner), checkpoint, get_platform(platform), samples)


def _run_rank(run: RunFolder, checkpoint: str | None, chosen: Platform, samples: bool) -> int | None:
    config = run.load_config().config
    with watched_set_up(run.stalls, current_world(chosen), config.launch.timeout_seconds):
        trainer = Trainer(run, config, chosen, initial_weights=checkpoint is None)
        if checkpoint is not None:
            trainer.resume(checkpoint)
    ended_by = trainer.run()
    if samples and ended_by is None and current_world(chosen).rank == 0:
        write_samples(run, config)
    return ended_by


@contextlib.contextmanager
def _early_ends_told() -> Iterator[None]:
    """Turn errors of the machine, and calls of `sys.exit`, into one line that says where and what to do."""
    try:
        yield
    except SystemExit as leaving:
        # A local rank that leaves with 0 would pass for one that is done.
        raise TrainingError(f"something {describe_exit(leaving, 'before the run was done')}") from leaving
    except Exception as error:
        told = describe_machine_error(error)
        if told is None or isinstance(error, HPError):
            raise
        raise MachineError(told) from error


def _train_here(config: TrainerConfig, path: str, *arguments: Any) -> int | None:
    """Do one rank's part in this process; what goes wrong there is no bad input, as it is none in ranks started here.

    Raises:
        TrainingError: in place of an error that names a user's mistake; tells what can be gone on with.
    """
    try:
        return run_rank(path, *arguments)
    except HPError as error:
        if error.needs_traceback:
            raise
        raise TrainingError(f"{error}\n{_what_is_left(RunFolder(Path(path)), config)}") from error


def _remove_empty(folder: Path) -> None:
    """Take away the folder that was made for a run which could not begin."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _what_is_left(run: RunFolder, config: TrainerConfig) -> str:
    """Tell how far a run that has ended early has come, and how to go on."""
    try:
        newest = find_latest(checkpoint_storage(run, config), content=False).checkpoint
    except OSError as error:
        return f"The checkpoints of {run.path} cannot be read: {error}"
    if newest is None:
        return f"There is no checkpoint yet; `hp-train run {run.config_file} --run.folder={run.path}` begins again"
    return (
        f"The newest checkpoint is of step {newest.step} of {config.training.steps}; go on with "
        f"`hp-train resume {run.path}`"
    )


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
