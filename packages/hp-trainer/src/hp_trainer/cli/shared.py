"""Steps that several commands share: load the configuration, raise for problems, find the checkpoint."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import click

from hp_trainer.checkpoint import Checkpoint, find_latest
from hp_trainer.cli.commands import Overrides
from hp_trainer.cli.main import mute
from hp_trainer.config import LoadedConfig, TrainerConfig, load_config
from hp_trainer.exceptions import CheckpointError, ConfigError, Problem, RunFolderError, raise_if_any
from hp_trainer.launch import chosen_platform, no_platform
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, check_model, checkpoint_storage

weights_option = click.option(
    "--weights",
    type=click.Choice(("last", "ema")),
    help="Weights of the last step (default), or their moving average (training.ema).",
)


def print_message(line: str) -> None:
    """Print a message to standard error, ignoring that it may be closed."""
    try:
        print(f"hp-train: {line}", file=sys.stderr, flush=True)
    except OSError:
        mute(sys.stderr)


def load(path: str, overrides: Overrides) -> LoadedConfig:
    """Load a configuration with overrides. A ConfigError lists every problem."""
    require_platform(path)
    return load_config(path, overrides, registered=registries())


def open_run(path: str, overrides: Overrides) -> tuple[RunFolder, TrainerConfig]:
    """Return the run in a folder, and its configuration with overrides."""
    # Before the platform is required, so that a wrong folder is the first problem named.
    run = open_folder(Path(path))
    require_platform(str(run.config_file))
    return run, resolved(on_installed_platform(run.load_config(overrides), overrides).config, run.path)


def open_folder(path: Path) -> RunFolder:
    """Return the run in a folder, and rebuild small files that it has lost; see `RunFolder.restore`."""
    report_rebuilt(path, RunFolder.restore(path))
    run = RunFolder.open(path)
    if not run.config_file.exists():
        raise RunFolderError(
            f"{run.config_file} is missing, and no checkpoint has a copy; continue with the configuration that started "
            f"the run: `hp-train run CONFIG --run.folder={path}`"
        )
    return run


def report_rebuilt(path: Path, names: list[str]) -> None:
    """Report the files of the run in `path` that were lost and rebuilt."""
    if names:
        print_message(f"rebuilt what {path} had lost: {', '.join(names)}")


def on_installed_platform(loaded: LoadedConfig, overrides: Overrides) -> LoadedConfig:
    """Return the configuration of a run with the one installed platform, if its own is not and none is given."""
    platform = loaded.config.platform
    if platform is None or isinstance(chosen_platform(platform), str) or "platform" in dict(overrides):
        return loaded
    # Not a string if several platforms are installed and none is chosen; then the checks report the missing one.
    other = chosen_platform(None)
    if not isinstance(other, str):
        return loaded
    print_message(f"the run was trained on {platform}, which is not installed here; continuing with {other}")
    return dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, platform=other))


def require_platform(title: str) -> None:
    """Raise if no platform is installed: names that platforms register would be reported as unknown."""
    problem = no_platform()
    refuse([] if problem is None else [problem], title)


def refuse(problems: list[Problem], title: str) -> None:
    """Raise a `ConfigError` titled `title` if there are problems."""
    raise_if_any(problems, ConfigError, title)


def check_file_to_write(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    """Return the path of an option, which must be a file in an existing folder, before any work is done."""
    if value is None:
        return None
    path = Path(value)
    if not value or not path.name or path.is_dir() or not path.absolute().parent.is_dir():
        raise click.BadParameter(f"expected a file in an existing folder, got {value!r}")
    return path


def resolved(config: TrainerConfig, folder: Path) -> TrainerConfig:
    """Return the configuration with the chosen run folder and platform filled in."""
    run = dataclasses.replace(config.run, folder=str(folder))
    # Ranks on this machine must not choose again: the environment of a resumed run may differ.
    platform = chosen_platform(config.platform)
    return dataclasses.replace(config, run=run, platform=platform if isinstance(platform, str) else config.platform)


def newest(run: RunFolder, config: TrainerConfig) -> Checkpoint:
    """Return the newest valid checkpoint of the run's model, and report those that were skipped."""
    storage = checkpoint_storage(run, config)
    found = find_latest(storage, check=lambda checkpoint: check_model(checkpoint, config))
    for reason in found.skipped:
        print_message(f"skipped a checkpoint: {reason}")
    if found.checkpoint is None:
        if found.skipped:
            advice = "restore one of them or its settings, or start a new run in another folder"
        else:
            advice = f"start again with `hp-train run {run.config_file} --run.folder={run.path}`"
        raise CheckpointError(f"{storage.describe('')} has no valid checkpoint; {advice}")
    note_other_model(found.checkpoint, config)
    return found.checkpoint


def note_other_model(checkpoint: Checkpoint, config: TrainerConfig) -> None:
    """Report if the checkpoint was saved with another `model.name`, such as a file that has moved since."""
    saved = checkpoint.index.model.get("name")
    if saved != config.model.name:
        print_message(f"the checkpoint is of {saved}, continued by {config.model.name}; its tensors are compared")
