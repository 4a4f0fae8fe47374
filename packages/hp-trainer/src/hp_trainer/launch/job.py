"""A training job: ranks started on this machine, or joined where a launcher has started them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import HPError
from hp_dtensor.launch import from_environment, is_launched, rank_environment
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_trainer._exchange import coordinator
from hp_trainer.checkpoint import find_latest
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import RunFolderError, StoppedError, TrainingError
from hp_trainer.generation import write_samples
from hp_trainer.launch.restarts import run_with_restarts
from hp_trainer.launch.world_size import world_size_of
from hp_trainer.run import RunFolder, RunLock, checkpoint_storage
from hp_trainer.training import Trainer


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
        ended_by = _as_training_error(run_rank, path, owner, checkpoint, platform.name, False)
        platform.disconnect()
        if ended_by is None and is_first_process():
            write_samples(RunFolder(Path(path)), config)
    else:
        path, owner, checkpoint = begin()
        arguments = (path, owner, checkpoint, platform.name, True)
        if world_size_of(config) == 1 and not config.launch.max_restarts:
            ended_by = _as_training_error(run_rank, *arguments)
        else:
            ended_by = run_with_restarts(run_rank, arguments, config, platform)
    if ended_by is not None:
        raise StoppedError(_how_far(RunFolder(Path(path)), config, ended_by), ended_by)
    return Path(path)


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
    """
    run, chosen = RunFolder.open(Path(folder), owner), get_platform(platform)
    config = run.load_config().config
    trainer = Trainer(run, config, chosen)
    if checkpoint is not None:
        trainer.resume(checkpoint)
    ended_by = trainer.run()
    if samples and ended_by is None and current_world(chosen).rank == 0:
        write_samples(run, config)
    return ended_by


def _as_training_error(run_rank: Callable[..., int | None], *arguments: object) -> int | None:
    """Do one rank's part in this process; what goes wrong there is no bad input, as it is none in ranks started here.

    Raises:
        TrainingError: in place of an error that names a user's mistake.
    """
    try:
        return run_rank(*arguments)
    except HPError as error:
        if isinstance(error, ValueError):
            raise TrainingError(str(error)) from error
        raise


def _remove_empty(folder: Path) -> None:
    """Take away the folder that was made for a run which could not begin."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _how_far(run: RunFolder, config: TrainerConfig, number: int) -> str:
    """Tell how far a stopped run has come, and how to go on."""
    name, newest = signal.Signals(number).name, find_latest(checkpoint_storage(run, config), content=False).checkpoint
    if newest is None:
        return f"stopped by {name} before the first checkpoint of {run.path}"
    return (
        f"stopped by {name}; the newest checkpoint is of step {newest.step} of {config.training.steps}. "
        f"Go on with `hp-train resume {run.path}`"
    )
