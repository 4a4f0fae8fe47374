"""From a checked configuration to ranks that train: started here, or joined where a launcher has started them."""

from __future__ import annotations

import dataclasses
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hp_dtensor.comm.world import current_world
from hp_dtensor.launch import from_environment, is_launched, launch, rank_environment
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_trainer._exchange import coordinator
from hp_trainer.checkpoint import Storage
from hp_trainer.config import ParallelConfig, TrainerConfig
from hp_trainer.data import Dataset
from hp_trainer.exceptions import DataError, RunFolderError, StoppedError
from hp_trainer.plugins import Registries, registries
from hp_trainer.run_folder import RunFolder
from hp_trainer.signals import Interrupted

T = TypeVar("T")


def world_size_of(config: TrainerConfig) -> int:
    """Ranks of the job: those of the launcher that started this process, else those to start here."""
    found = rank_environment() if is_launched() else None
    return found.size if found is not None else config.launch.local_ranks or 1


def is_first_process() -> bool:
    """Whether this process speaks for the job: it was not started by a launcher, or it is rank 0."""
    found = rank_environment() if is_launched() else None
    return found is None or (found.rank == 0 and not found.is_scheduler)


def begin_run(path: Path, config: TrainerConfig, registered: Registries | None = None) -> RunFolder:
    """Make the run folder and prepare the data in it; done by one process. Nothing of it is left when that fails.

    Raises:
        RunFolderError: the folder holds something.
        DataError: the data cannot be read, or are too few for a sample.
    """
    registered = registered if registered is not None else registries()
    run = RunFolder.create(path, config)
    try:
        source = registered.datasets.get(config.data.name).build(config.data.options)
        source.prepare(run.data)
        _check_data(source.open(run.data, config.training.sequence_length), config)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return run


def _check_data(dataset: Dataset, config: TrainerConfig) -> None:
    if config.training.eval_interval is not None and not len(dataset.evaluation):
        raise DataError(
            f"no sample is left to evaluate with every training.eval_interval={config.training.eval_interval} steps, "
            f"of training.sequence_length={config.training.sequence_length}; keep more text for evaluation "
            "(data.eval_fraction), or set training.eval_interval=null"
        )


def storage_of(run: RunFolder, config: TrainerConfig, registered: Registries | None = None) -> Storage:
    """Where the run's checkpoints are."""
    registered = registered if registered is not None else registries()
    folder = run.checkpoints if config.checkpoint.folder is None else Path(config.checkpoint.folder)
    component = config.checkpoint.storage
    storage: Storage = registered.checkpoint_storages.get(component.name).build(component.options, folder)
    return storage


def train(config: TrainerConfig, prepare: Callable[[], tuple[Path, str | None]]) -> Path:
    """Train on all ranks; returns the run folder when every rank has finished.

    Args:
        config: says how many ranks to start here, and on which platform.
        prepare: called once in the whole job, before any rank needs it; makes or opens the run folder and
            returns it with the name of the checkpoint to go on from (None: from the beginning).

    Raises:
        LaunchError: a local rank failed.
        StoppedError: a signal ended the run before its last step.
        HPError: what `prepare` or, where this process is a rank, the training raises.
    """
    platform = get_platform(config.platform)
    if is_launched():
        world = from_environment(platform, config.launch.timeout_seconds)
        folder, checkpoint = coordinator(world.all, "preparing the run", lambda: _as_text(prepare()), RunFolderError)
        ended_by = train_rank(folder, checkpoint, platform.name, False)
        platform.disconnect()
        path = Path(folder)
        if ended_by is None and is_first_process():
            write_samples(RunFolder(path), config)
    else:
        path, checkpoint = prepare()
        arguments = (str(path), checkpoint, platform.name, True)
        if world_size_of(config) == 1:
            ended_by = train_rank(*arguments)
        else:
            ended_by = _start(train_rank, arguments, config, platform, RunFolder(path).logs)
    if ended_by is not None:
        raise StoppedError(_how_far(RunFolder(path), config, ended_by), ended_by)
    return path


def write_samples(run: RunFolder, config: TrainerConfig) -> list[str]:
    """What the finished run's model writes after each configured prompt, kept in `samples.txt`.

    Nothing where its checkpoint is not of the last step.
    """
    from hp_trainer._files import write_atomically
    from hp_trainer.checkpoint import open_latest

    if not config.generate.prompts:
        return []
    newest = open_latest(storage_of(run, config), content=False)
    if newest.step < config.training.steps:
        return []
    texts = generate(run, config, config.generate.prompts, newest.folder)
    separator = "\n" + "-" * 80 + "\n"
    write_atomically(run.samples_file, f"after {newest.step} steps{separator}{separator.join(texts)}{separator}")
    return texts


def generate(run: RunFolder, config: TrainerConfig, prompts: Sequence[str], checkpoint: str) -> list[str]:
    """Text that the model of a checkpoint writes after each prompt, the prompts included; on one rank."""
    from hp_trainer.generation import generate as generate_text

    alone = dataclasses.replace(config, parallel=ParallelConfig())
    texts: list[str] = generate_text(run, alone, get_platform(config.platform), prompts, checkpoint)
    return texts


def train_rank(folder: str, checkpoint: str | None, platform: str, samples: bool) -> int | None:
    """One rank's part; its world is connected. Returns the signal that ended it early, if one did.

    Args:
        samples: rank 0 writes the samples of a finished run. Where ranks were started here this is the process that
            has the right number of threads for it.
    """
    from hp_trainer.loop import train as train_loop

    run, chosen = RunFolder.open(Path(folder)), get_platform(platform)
    config = run.load_config().config
    ended_by = train_loop(run, config, chosen, checkpoint)
    if samples and ended_by is None and current_world(chosen).rank == 0:
        write_samples(run, config)
    return ended_by


def _start(
    target: Callable[..., int | None],
    arguments: Sequence[object],
    config: TrainerConfig,
    platform: Platform,
    logs: Path,
) -> int | None:
    try:
        ended_by: list[int | None] = launch(
            target,
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


def _how_far(run: RunFolder, config: TrainerConfig, number: int) -> str:
    """What a stopped run has come to, and how to go on."""
    from hp_trainer.checkpoint import find_latest

    name, newest = signal.Signals(number).name, find_latest(storage_of(run, config), content=False).checkpoint
    if newest is None:
        return f"stopped by {name} before the first checkpoint of {run.path}"
    return (
        f"stopped by {name}; the newest checkpoint is of step {newest.step} of {config.training.steps}. "
        f"Go on with `hp-train resume {run.path}`"
    )


def _as_text(prepared: tuple[Path, str | None]) -> tuple[str, str | None]:
    path, checkpoint = prepared
    return str(path.absolute()), checkpoint
