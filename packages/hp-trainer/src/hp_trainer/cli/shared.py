"""Steps that several commands take: reading the configuration, refusing what is wrong, finding the checkpoint."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from hp_trainer.checkpoint import Checkpoint, find_latest
from hp_trainer.cli.arguments import Overrides, UsageError
from hp_trainer.config import LoadedConfig, TrainerConfig, load_config
from hp_trainer.exceptions import CheckpointError, ConfigError, Problem, raise_if_any
from hp_trainer.launch import chosen_platform, no_platform
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, check_model, checkpoint_storage

# Which weights of a checkpoint are used.
WEIGHTS = ("last", "ema")
MAX_WORLD_SIZE = 10_000_000


def tell(line: str) -> None:
    """Write a line for the user beside the output."""
    print(f"hp-train: {line}", file=sys.stderr, flush=True)


def load(path: str, overrides: Overrides) -> LoadedConfig:
    """Read a configuration with overrides.

    Raises:
        ConfigError: listing every problem.
    """
    require_platform(path)
    return load_config(path, overrides, registered=registries())


def open_run(path: str, overrides: Overrides) -> tuple[RunFolder, TrainerConfig]:
    """Return the run in a folder, and its configuration with overrides.

    Raises:
        RunFolderError: there is no run in it.
        ConfigError: listing every problem.
    """
    run = RunFolder.open(Path(path))
    require_platform(str(run.config_file))
    return run, resolved(on_installed_platform(run.load_config(overrides), overrides).config, run.path)


def on_installed_platform(loaded: LoadedConfig, overrides: Overrides) -> LoadedConfig:
    """Return a run's configuration for a platform that is here: it may have been trained on another machine's.

    A platform that was asked for stays, and so does one that is missing where several could take its place.
    """
    platform = loaded.config.platform
    if platform is None or isinstance(chosen_platform(platform), str) or "platform" in dict(overrides):
        return loaded
    other = chosen_platform(None)
    if not isinstance(other, str):
        return loaded
    tell(f"the run was last on {platform}, which is not installed here; going on with {other}")
    return dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, platform=other))


def require_platform(title: str) -> None:
    """Refuse to read settings without any platform: names that platforms register would be called unknown."""
    problem = no_platform()
    refuse([] if problem is None else [problem], title)


def refuse(problems: list[Problem], title: str) -> None:
    """Raise a `ConfigError` about what is called `title` when there are problems."""
    raise_if_any(problems, ConfigError, title)


def refuse_settings(command: str, overrides: Overrides) -> None:
    """Refuse options that a command without a configuration does not have.

    Raises:
        UsageError: there is one.
    """
    if overrides:
        raise UsageError(f"{command} takes no settings, got --{overrides[0][0]}")


def check_world_size(world_size: int | None) -> None:
    """Refuse a number of ranks that no job has.

    Raises:
        UsageError: it is below 1, or so large that its layouts could not be counted in an hour.
    """
    if world_size is not None and not 1 <= world_size <= MAX_WORLD_SIZE:
        raise UsageError(f"--world-size must be from 1 to {MAX_WORLD_SIZE:,}, got {world_size}")


def check_file_to_write(option: str, path: str | None) -> None:
    """Refuse, before any work is done, a path that cannot be the name of a file; None: no file is wanted.

    Raises:
        UsageError: it is empty or a folder, or in no folder that exists.
    """
    if path is None:
        return
    if not path or not Path(path).name or Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        raise UsageError(f"{option}: expected a file in a folder that exists, got {path!r}")


def resolved(config: TrainerConfig, folder: Path) -> TrainerConfig:
    """Return the configuration with the run folder and the platform that were chosen for it."""
    run = dataclasses.replace(config.run, folder=str(folder))
    platform = chosen_platform(config.platform)
    return dataclasses.replace(config, run=run, platform=platform if isinstance(platform, str) else config.platform)


def newest(run: RunFolder, config: TrainerConfig) -> Checkpoint:
    """Return the newest sound checkpoint; tell which were passed over.

    Raises:
        CheckpointError: there is none, or it is of another model.
    """
    storage = checkpoint_storage(run, config)
    found = find_latest(storage)
    for reason in found.skipped:
        tell(f"passed over a checkpoint: {reason}")
    if found.checkpoint is None:
        if found.skipped:
            way = "bring one of them back, or begin a new run in another folder"
        else:
            way = f"`hp-train run {run.config_file} --run.folder={run.path}` begins again"
        raise CheckpointError(f"{storage.describe('')} has no sound checkpoint; {way}")
    check_model(found.checkpoint, config)
    return found.checkpoint
