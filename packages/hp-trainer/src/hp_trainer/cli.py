"""The command `hp-train`."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hp_dtensor.exceptions import HPError, LaunchError
from hp_trainer.exceptions import ProblemsError, StoppedError

if TYPE_CHECKING:
    from hp_trainer.checkpoint import Checkpoint
    from hp_trainer.config import LoadedConfig, Option, TrainerConfig
    from hp_trainer.exceptions import Problem
    from hp_trainer.run_folder import RunFolder

Overrides = list[tuple[str, str]]

USAGE = """\
usage: hp-train CONFIG [--section.setting=value ...]
       hp-train resume RUN [--section.setting=value ...]
       hp-train generate RUN [--prompt TEXT ...] [--section.setting=value ...]
       hp-train layouts [CONFIG] [--world-size N] [--section.setting=value ...]
       hp-train --help | --version"""

INTRODUCTION = """\
Train the model that a YAML file describes, on PyTorch or on MindSpore, in any parallel layout.

commands:
  CONFIG      train from the beginning, in a new run folder
  resume      go on from the newest sound checkpoint of a run folder; layout, number of ranks and platform may
              change, the model and its data may not
  generate    continue prompts with the model of a run folder
  layouts     list every parallel layout for a number of ranks, and why others cannot be used

hp-train starts launch.local_ranks ranks on this machine. Started by torchrun, msrun or srun it is one of theirs.
Ctrl-C and SIGTERM end the training after the step under way, with a checkpoint; a second one ends it at once.
Exit code: 0 done, 1 failed, 2 bad input, 130 stopped by Ctrl-C, 143 by SIGTERM.

Every setting of the YAML file is an option too (--section.setting=value, or with a space); the command line wins.
settings, with what they take and their default:"""


class UsageError(HPError, ValueError):
    """A command line that makes no sense."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{USAGE}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    0: all done. 1: it failed while running. 2: bad input. 128 + n: stopped by signal n (130 for Ctrl-C, 143 for
    SIGTERM), training after the step under way and with a checkpoint of it.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    from hp_trainer.signals import Interrupted, interruptible

    try:
        with interruptible():
            return _dispatch(given)
    except BrokenPipeError:
        # The reader of our output has gone (`hp-train --help | head`); Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Interrupted as interrupted:
        return _fail(f"stopped by {interrupted.signal.name}", 128 + interrupted.signal)
    except StoppedError as stopped:
        return _fail(str(stopped), 128 + stopped.signal)
    except (ProblemsError, UsageError) as error:
        return _fail(str(error), 2)
    except HPError as error:
        return _fail(str(error), 2 if isinstance(error, ValueError) else 1, every_rank=True)
    except OSError as error:
        # The system's own words say what and where; a traceback would hide them.
        advice = "; free some space, then run the same command again" if error.errno == errno.ENOSPC else ""
        return _fail(f"{error}{advice}", 1, every_rank=True)


def _dispatch(given: list[str]) -> int:
    if not given:
        raise UsageError(f"give a CONFIG or a command; `hp-train --help` tells more\n{USAGE}")
    if "--help" in given or "-h" in given:
        print(help_text())
        return 0
    if given[0] in _COMMANDS:
        return _COMMANDS[given[0]](given[1:])
    if given == ["--version"]:
        from importlib.metadata import version

        print(version("hp-trainer"))
        return 0
    return _train(given)


def _fail(message: str, code: int, *, every_rank: bool = False) -> int:
    """Tell what went wrong; of a launcher's ranks, one tells what they all find in what they were given."""
    from hp_dtensor.launch import rank_environment

    try:
        found = rank_environment()
    except LaunchError:
        # That is what the message is about.
        found = None
    if found is None or found.rank == 0:
        print(f"hp-train: {message}", file=sys.stderr)
    elif every_rank:
        print(f"hp-train: rank {found.rank}: {message}", file=sys.stderr)
    return code


# Commands ----------------------------------------------------------------------------------------------------


def _train(given: list[str]) -> int:
    parser = _Parser(prog="hp-train", add_help=False)
    parser.add_argument("config", metavar="CONFIG")
    options, overrides = _parse(parser, given)
    loaded = _load(options.config, overrides)
    from hp_trainer.run_folder import default_run_folder

    wanted = loaded.config.run.folder
    folder = default_run_folder(Path(options.config)) if wanted is None else Path(wanted)
    from hp_dtensor.launch import is_launched
    from hp_trainer import launching
    from hp_trainer.plugins import registries
    from hp_trainer.preflight import check_new_run, check_settings

    world_size = launching.world_size_of(loaded.config)

    def check() -> None:
        _refuse(check_new_run(loaded, folder, world_size, registries()), options.config)

    def prepare() -> tuple[Path, str | None]:
        if is_launched():
            check()
        return launching.begin_run(folder, config).path, None

    # Of a launcher's ranks one looks at folder and data, when the others can learn from it what it finds.
    if is_launched():
        _refuse(check_settings(loaded, world_size, registries()), options.config)
    else:
        check()
    config = _resolved(loaded.config, folder)
    return _done(launching.train(config, prepare), config)


def _resume(given: list[str]) -> int:
    parser = _Parser(prog="hp-train resume", add_help=False)
    parser.add_argument("run", metavar="RUN")
    options, overrides = _parse(parser, given)
    from hp_trainer import launching
    from hp_trainer.plugins import registries
    from hp_trainer.preflight import check_resumed_run
    from hp_trainer.run_folder import RunFolder

    run = RunFolder.open(Path(options.run))
    loaded, before = run.load_config(overrides), run.load_config().config
    world_size = launching.world_size_of(loaded.config)
    _refuse(check_resumed_run(loaded, before, world_size, registries()), str(run.config_file))
    config = _resolved(loaded.config, run.path)
    checkpoint = _latest(run, config).folder if launching.is_first_process() else None

    def prepare() -> tuple[Path, str | None]:
        run.write_config(config)
        return run.path, checkpoint

    return _done(launching.train(config, prepare), config)


def _generate(given: list[str]) -> int:
    parser = _Parser(prog="hp-train generate", add_help=False)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--prompt", action="append", metavar="TEXT")
    options, overrides = _parse(parser, given)
    from hp_trainer import launching
    from hp_trainer.run_folder import RunFolder

    run = RunFolder.open(Path(options.run))
    config = _resolved(run.load_config(overrides).config, run.path)
    prompts = options.prompt or list(config.generate.prompts)
    for text in launching.generate(run, config, prompts, _latest(run, config).folder):
        print(text)
    return 0


def _layouts(given: list[str]) -> int:
    parser = _Parser(prog="hp-train layouts", add_help=False)
    parser.add_argument("config", metavar="CONFIG", nargs="?")
    parser.add_argument("--world-size", type=int, metavar="N")
    options, overrides = _parse(parser, given)
    if options.config is None and (options.world_size is None or overrides):
        raise UsageError(f"layouts needs a CONFIG, or a --world-size without settings\n{USAGE}")
    if options.world_size is not None and options.world_size < 1:
        raise UsageError(f"--world-size must be at least 1, got {options.world_size}\n{USAGE}")
    from hp_trainer.launching import world_size_of
    from hp_trainer.layouts import describe_layouts, list_layouts
    from hp_trainer.preflight import training_problems

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


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "resume": _resume,
    "generate": _generate,
    "layouts": _layouts,
}


# Parts -------------------------------------------------------------------------------------------------------


def _parse(parser: argparse.ArgumentParser, given: list[str]) -> tuple[argparse.Namespace, Overrides]:
    """The command's own arguments, and every other option as an override."""
    known = {name for action in parser._actions for name in action.option_strings}
    own: list[str] = []
    overrides: Overrides = []
    rest = iter(given)
    for word in rest:
        if not word.startswith("--"):
            own.append(word)
            continue
        name, equals, value = word.partition("=")
        if not equals:
            value = _following(name, rest)
        if name in known:
            own.append(f"{name}={value}")
        else:
            overrides.append((name.removeprefix("--"), value))
    return parser.parse_args(own), overrides


def _following(name: str, rest: Iterator[str]) -> str:
    """The value of an option that stands in a word of its own."""
    value = next(rest, None)
    if value is None:
        raise UsageError(f"{name} needs a value: {name}=...\n{USAGE}")
    return value


def _load(path: str, overrides: Overrides) -> LoadedConfig:
    from hp_trainer.config import load_config

    return load_config(path, overrides)


def _refuse(problems: list[Problem], title: str) -> None:
    from hp_trainer.exceptions import ConfigError, raise_if_any

    raise_if_any(problems, ConfigError, title)


def _resolved(config: TrainerConfig, folder: Path) -> TrainerConfig:
    """The configuration with what was chosen for it."""
    from hp_trainer.preflight import chosen_platform

    run = dataclasses.replace(config.run, folder=str(folder))
    platform = chosen_platform(config.platform)
    return dataclasses.replace(config, run=run, platform=platform if isinstance(platform, str) else config.platform)


def _latest(run: RunFolder, config: TrainerConfig) -> Checkpoint:
    """The newest sound checkpoint; tells which were passed over.

    Raises:
        CheckpointError: there is none, or it is of another model.
    """
    from hp_trainer.checkpoint import find_latest, open_latest
    from hp_trainer.config import to_plain
    from hp_trainer.launching import storage_of

    storage = storage_of(run, config)
    found = find_latest(storage)
    for reason in found.skipped:
        print(f"hp-train: passed over a checkpoint: {reason}", file=sys.stderr)
    checkpoint = found.checkpoint if found.checkpoint is not None else open_latest(storage)
    checkpoint.check_model(to_plain(config.model))
    return checkpoint


def _done(path: Path, config: TrainerConfig) -> int:
    """Show what the model writes, and where everything is."""
    from hp_trainer.launching import is_first_process
    from hp_trainer.run_folder import RunFolder

    if is_first_process():
        samples = RunFolder(path).samples_file
        if config.generate.prompts and samples.is_file():
            print(samples.read_text(encoding="utf-8"), end="")
        print(f"run folder: {path}")
    return 0


def help_text() -> str:
    """All of `hp-train --help`."""
    from hp_trainer.config import list_options
    from hp_trainer.plugins import registries

    lines = [USAGE, "", INTRODUCTION]
    section = when = ""
    for option in list_options(registries()):
        head = option.path.partition(".")[0]
        if head != section:
            section, when = head, ""
            lines += ["", f"{section}:"]
        if option.when and option.when != when:
            when = option.when
            lines.append(f"  with {when}:")
        lines.append(describe_option(option))
    return "\n".join(lines)


def describe_option(option: Option) -> str:
    """One line of help, two where it is long."""
    default = "must be given" if option.default is None else f"default {option.default}"
    head = f"  --{option.path}=({option.takes}; {default})"
    return f"{head}\n      {option.help}" if option.help else head
