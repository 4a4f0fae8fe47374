"""Commands about runs: begin one, go on with one, list its checkpoints; each returns the exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hp_dtensor.launch import is_launched
from hp_trainer.checkpoint import delete_leftovers, list_checkpoints, open_step, set_aside_later
from hp_trainer.cli.arguments import Parser, UsageError, parse
from hp_trainer.cli.checkpoint_table import describe_checkpoints
from hp_trainer.cli.output import print_if_read
from hp_trainer.cli.shared import (
    load,
    newest,
    on_installed_platform,
    open_run,
    refuse,
    require_platform,
    resolved,
    tell,
)
from hp_trainer.config import LoadedConfig, TrainerConfig
from hp_trainer.exceptions import Problem
from hp_trainer.launch import (
    check_new_run,
    check_resumed_run,
    check_settings,
    is_first_process,
    launch_training,
    world_size_of,
)
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, check_model, checkpoint_storage, chosen_run_folder, complete_run, create_run


def train_command(given: list[str]) -> int:
    """Train from the beginning in a new run folder: `hp-train CONFIG`."""
    parser = Parser(prog="hp-train", add_help=False)
    parser.add_argument("config", metavar="CONFIG")
    options, overrides = parse(parser, given)
    loaded = load(options.config, overrides)
    folder = chosen_run_folder(loaded, Path(options.config))
    config = resolved(loaded.config, folder)

    def check() -> None:
        refuse(check_new_run(loaded, folder, world_size_of(config), registries()), options.config)

    def prepare() -> str | None:
        if is_launched():
            check()
        create_run(folder, config)
        return None

    _check_early(loaded, options.config, check)
    return _report(launch_training(config, folder, prepare), config)


def run_command(given: list[str]) -> int:
    """Begin a run, or go on with it where it has begun: `hp-train run CONFIG --run.folder=RUN`."""
    parser = Parser(prog="hp-train run", add_help=False)
    parser.add_argument("config", metavar="CONFIG")
    options, overrides = parse(parser, given)
    loaded = load(options.config, overrides)
    if loaded.config.run.folder is None:
        raise UsageError("run needs the folder to begin or to go on with: --run.folder=RUN")
    folder = chosen_run_folder(loaded, Path(options.config))
    config = resolved(loaded.config, folder)

    def check() -> None:
        refuse(_run_problems(loaded, folder), options.config)

    def prepare() -> str | None:
        check()
        if not RunFolder.is_begun(folder):
            create_run(folder, config)
            return None
        run = RunFolder.open(folder)
        if list_checkpoints(checkpoint_storage(run, config)):
            return _take_up(run, config)
        # Killed before its first checkpoint: from the beginning.
        complete_run(run, config)
        return None

    _check_early(loaded, options.config, check)
    return _report(launch_training(config, folder, prepare), config)


def resume_command(given: list[str]) -> int:
    """Go on from the newest sound checkpoint, or from an earlier one: `hp-train resume RUN [--from-step N]`."""
    parser = Parser(prog="hp-train resume", add_help=False)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--from-step", type=int, metavar="N")
    options, overrides = parse(parser, given)
    run = RunFolder.open(Path(options.run))
    require_platform(str(run.config_file))
    loaded, before = on_installed_platform(run.load_config(overrides), overrides), run.load_config().config
    refuse(check_resumed_run(loaded, before, world_size_of(loaded.config), registries()), str(run.config_file))
    config = resolved(loaded.config, run.path)
    return _report(launch_training(config, run.path, lambda: _take_up(run, config, options.from_step)), config)


def checkpoints_command(given: list[str]) -> int:
    """List the checkpoints of a run, verified: `hp-train checkpoints RUN`; exit code 1 if one is damaged."""
    parser = Parser(prog="hp-train checkpoints", add_help=False)
    parser.add_argument("run", metavar="RUN")
    options, overrides = parse(parser, given)
    table, all_sound = describe_checkpoints(checkpoint_storage(*open_run(options.run, overrides)))
    print(table)
    return 0 if all_sound else 1


def _check_early(loaded: LoadedConfig, title: str, check: Callable[[], None]) -> None:
    """Refuse what a run cannot be begun or gone on with, before anything is locked or made.

    Of a launcher's ranks one looks at folder and data by `check`, when the others can learn from it what it finds.
    """
    if is_launched():
        refuse(check_settings(loaded, world_size_of(loaded.config), registries()), title)
    else:
        check()


def _run_problems(loaded: LoadedConfig, folder: Path) -> list[Problem]:
    """Return what keeps a run from beginning in `folder`, or from going on there as configured now."""
    size = world_size_of(loaded.config)
    if not RunFolder.is_begun(folder):
        return check_new_run(loaded, folder, size, registries())
    run = RunFolder.open(folder)
    before = run.load_config().config if run.config_file.exists() else loaded.config
    return check_resumed_run(loaded, before, size, registries())


def _take_up(run: RunFolder, config: TrainerConfig, from_step: int | None = None) -> str:
    """Verify what a run goes on with, and return the name of its checkpoint; later ones are set aside.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or of another model.
        DataError: the prepared data have changed.
    """
    storage = checkpoint_storage(run, config)
    checkpoint = newest(run, config) if from_step is None else open_step(storage, from_step)
    check_model(checkpoint, config)
    source = registries().datasets.get(config.data.name).build(config.data.options)
    source.verify(run.data, config.launch.verify_data)
    # Set aside before the run goes on: killed from here on, it finds the step that was asked for as its newest.
    if from_step is not None:
        for name in set_aside_later(storage, from_step):
            tell(f"set aside {storage.describe(name)}; delete it when it is not needed any more")
    run.sweep()
    delete_leftovers(storage)
    run.write_config(config)
    return checkpoint.folder


def _report(path: Path, config: TrainerConfig) -> int:
    """Show what the finished run's model writes, and where everything is."""
    if is_first_process():
        samples = RunFolder(path).samples_file
        if config.generate.prompts and samples.is_file():
            print_if_read(samples.read_text(encoding="utf-8").removesuffix("\n"))
        print_if_read(f"run folder: {path}")
    return 0
