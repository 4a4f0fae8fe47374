"""Commands of `hp-train`: each takes its words and returns the exit code."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from hp_dtensor.launch import is_launched
from hp_dtensor.platform.selection import get_platform
from hp_trainer.checkpoint import Checkpoint, find_latest, open_latest
from hp_trainer.cli.arguments import Overrides, Parser, UsageError, parse
from hp_trainer.cli.check import check_command
from hp_trainer.cli.help import USAGE
from hp_trainer.cli.report_commands import compare_command, report_command
from hp_trainer.cli.sweep import sweep_command
from hp_trainer.config import LoadedConfig, TrainerConfig, load_config, to_plain
from hp_trainer.exceptions import ConfigError, Problem, raise_if_any
from hp_trainer.generation import generate
from hp_trainer.launch import (
    check_new_run,
    check_resumed_run,
    check_settings,
    chosen_platform,
    is_first_process,
    launch_training,
    no_platform,
    training_problems,
    world_size_of,
)
from hp_trainer.parallel import describe_layouts, list_layouts
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, checkpoint_storage, chosen_run_folder, create_run


def train_command(given: list[str]) -> int:
    """Train from the beginning in a new run folder: `hp-train CONFIG`."""
    parser = Parser(prog="hp-train", add_help=False)
    parser.add_argument("config", metavar="CONFIG")
    options, overrides = parse(parser, given)
    loaded = _load(options.config, overrides)
    folder = chosen_run_folder(loaded, Path(options.config))
    world_size = world_size_of(loaded.config)

    def check() -> None:
        _refuse(check_new_run(loaded, folder, world_size, registries()), options.config)

    def prepare() -> str | None:
        if is_launched():
            check()
        create_run(folder, config)
        return None

    # Of a launcher's ranks one looks at folder and data, when the others can learn from it what it finds.
    if is_launched():
        _refuse(check_settings(loaded, world_size, registries()), options.config)
    else:
        check()
    config = _resolved(loaded.config, folder)
    return _report(launch_training(config, folder, prepare), config)


def resume_command(given: list[str]) -> int:
    """Go on from the newest sound checkpoint: `hp-train resume RUN`."""
    parser = Parser(prog="hp-train resume", add_help=False)
    parser.add_argument("run", metavar="RUN")
    options, overrides = parse(parser, given)
    run = RunFolder.open(Path(options.run))
    _require_platform(str(run.config_file))
    loaded, before = run.load_config(overrides), run.load_config().config
    world_size = world_size_of(loaded.config)
    _refuse(check_resumed_run(loaded, before, world_size, registries()), str(run.config_file))
    config = _resolved(loaded.config, run.path)

    def prepare() -> str | None:
        checkpoint = _newest(run, config)
        registries().datasets.get(config.data.name).build(config.data.options).verify(run.data)
        run.write_config(config)
        return checkpoint.folder

    return _report(launch_training(config, run.path, prepare), config)


def generate_command(given: list[str]) -> int:
    """Print what the model of a run makes of prompts: `hp-train generate RUN`."""
    parser = Parser(prog="hp-train generate", add_help=False)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--prompt", action="append", metavar="TEXT")
    options, overrides = parse(parser, given)
    run = RunFolder.open(Path(options.run))
    _require_platform(str(run.config_file))
    config = _resolved(run.load_config(overrides).config, run.path)
    prompts = options.prompt or list(config.generate.prompts)
    newest = _newest(run, config).folder
    for text in generate(run, config, get_platform(config.platform), prompts, newest):
        print(text)
    return 0


def layouts_command(given: list[str]) -> int:
    """Print every parallel layout, and why others cannot be used: `hp-train layouts [CONFIG]`."""
    parser = Parser(prog="hp-train layouts", add_help=False)
    parser.add_argument("config", metavar="CONFIG", nargs="?")
    parser.add_argument("--world-size", type=int, metavar="N")
    options, overrides = parse(parser, given)
    if options.config is None and (options.world_size is None or overrides):
        raise UsageError(f"layouts needs a CONFIG, or a --world-size without settings\n{USAGE}")
    if options.world_size is not None and options.world_size < 1:
        raise UsageError(f"--world-size must be at least 1, got {options.world_size}\n{USAGE}")
    if options.config is None:
        print(describe_layouts(list_layouts(options.world_size), options.world_size))
        return 0
    config = _load(options.config, overrides).config
    world_size = options.world_size or world_size_of(config)
    layouts = list_layouts(
        world_size,
        has_experts=bool(getattr(config.model.options, "num_experts", None)),
        checks=[lambda dims: training_problems(dims, config)],
    )
    print(describe_layouts(layouts, world_size))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "resume": resume_command,
    "generate": generate_command,
    "check": check_command,
    "sweep": sweep_command,
    "report": report_command,
    "compare": compare_command,
    "layouts": layouts_command,
}


def _load(path: str, overrides: Overrides) -> LoadedConfig:
    _require_platform(path)
    return load_config(path, overrides, registered=registries())


def _require_platform(title: str) -> None:
    """Refuse to read settings without any platform: names that platforms register would be called unknown."""
    problem = no_platform()
    _refuse([] if problem is None else [problem], title)


def _refuse(problems: list[Problem], title: str) -> None:
    raise_if_any(problems, ConfigError, title)


def _resolved(config: TrainerConfig, folder: Path) -> TrainerConfig:
    """Return the configuration with the run folder and the platform that were chosen for it."""
    run = dataclasses.replace(config.run, folder=str(folder))
    platform = chosen_platform(config.platform)
    return dataclasses.replace(config, run=run, platform=platform if isinstance(platform, str) else config.platform)


def _newest(run: RunFolder, config: TrainerConfig) -> Checkpoint:
    """Return the newest sound checkpoint; tell which were passed over.

    Raises:
        CheckpointError: there is none, or it is of another model.
    """
    storage = checkpoint_storage(run, config)
    found = find_latest(storage)
    for reason in found.skipped:
        print(f"hp-train: passed over a checkpoint: {reason}", file=sys.stderr)
    checkpoint = found.checkpoint if found.checkpoint is not None else open_latest(storage)
    checkpoint.check_model(to_plain(config.model))
    return checkpoint


def _report(path: Path, config: TrainerConfig) -> int:
    """Show what the finished run's model writes, and where everything is."""
    if is_first_process():
        samples = RunFolder(path).samples_file
        if config.generate.prompts and samples.is_file():
            print(samples.read_text(encoding="utf-8"), end="")
        print(f"run folder: {path}")
    return 0
