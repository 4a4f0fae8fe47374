"""Commands that train: in a new run, in one to start or continue, from a checkpoint, with a profile, as a sweep."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from hp_dtensor.launch import is_launched
from hp_trainer._coordination import Interrupted
from hp_trainer.checkpoint import delete_leftovers, list_checkpoints, open_step, set_aside_newer
from hp_trainer.cli.commands import Overrides, SettingsCommand, config_argument, run_argument
from hp_trainer.cli.main import print_if_read
from hp_trainer.cli.shared import (
    load,
    newest,
    note_other_model,
    on_installed_platform,
    open_folder,
    print_message,
    refuse,
    report_rebuilt,
    require_platform,
    resolved,
)
from hp_trainer.config import LoadedConfig, TrainerConfig
from hp_trainer.config.yaml_tree import read_yaml
from hp_trainer.exceptions import ConfigError, Problem
from hp_trainer.launch import (
    check_new_run,
    check_resumed_run,
    check_settings,
    is_first_process,
    launch_training,
    take_node,
    world_size_of,
)
from hp_trainer.plugins import registries
from hp_trainer.registries import is_python_name
from hp_trainer.report import compare_runs
from hp_trainer.run import (
    RunFolder,
    check_model,
    checkpoint_storage,
    chosen_run_folder,
    complete_run,
    create_run,
    default_run_folder,
    prepare_again,
)
from hp_trainer.training.checkpoints import Choice


@click.command("train", cls=SettingsCommand)
@config_argument
def train_command(config: str, overrides: Overrides) -> int:
    """Train the model of CONFIG in a new run folder: run.folder, or by default runs/NAME-DATE-TIME.

    It starts launch.local_ranks ranks on this machine; under torchrun, msrun or srun it is one of their ranks.

    Ctrl-C and SIGTERM stop training after the current step, with a checkpoint; a second signal stops it at once. The
    word `train` may be left out.
    """
    return start(config, load(config, overrides), may_continue=False)


@click.command("run", cls=SettingsCommand)
@config_argument
def run_command(config: str, overrides: Overrides) -> int:
    """Start the run in the folder --run.folder=RUN, or continue it if it exists.

    The same command serves for the first start and for every restart of a job.
    """
    try:
        loaded = load(config, overrides)
    except ConfigError as error:
        loaded = _load_with_copy(config, overrides, error)
    if loaded.config.run.folder is None:
        raise click.UsageError("run needs the folder of the run to start or continue: --run.folder=RUN")
    return start(config, loaded, may_continue=True)


def _load_with_copy(config: str, overrides: Overrides, error: ConfigError) -> LoadedConfig:
    """Load a run whose `model.from` alone is missing with the run's own copy of it; else raise `error`."""
    if [problem.path for problem in error.problems] != ["model.from"]:
        raise error
    run = RunFolder(chosen_run_folder(load(config, [*overrides, ("model.from", "null")]), Path(config)))
    if not (run.config_file.is_file() and (run.model_files / "config.json").is_file()):
        raise error
    before = run.load_config().config
    if before.model.source is None or Path(before.model.source).exists():
        raise error
    if not list_checkpoints(checkpoint_storage(run, before)):
        raise error
    print_message(f"{before.model.source} is missing; the run continues with its own copy, {run.model_files}")
    loaded = load(config, [*overrides, ("model.from", str(run.model_files.absolute()))])
    model = dataclasses.replace(loaded.config.model, source=before.model.source)
    return dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, model=model))


@click.command("resume", cls=SettingsCommand)
@run_argument
@click.option("--from-step", type=int, metavar="N", help="Continue from this checkpoint; later ones are moved aside.")
@click.option("--reset-optimizer", is_flag=True, help="Load only the weights: optimizer and averages start again.")
def resume_command(run: str, from_step: int | None, reset_optimizer: bool, overrides: Overrides) -> int:
    """Continue RUN from its newest valid checkpoint.

    Layout, number of ranks, platform and most settings may change; model and data may not. Another optimizer or
    training.freeze needs --reset-optimizer.
    """
    folder = open_folder(Path(run))
    require_platform(str(folder.config_file))
    refuse(_other_components(folder, overrides), str(folder.config_file))
    loaded = on_installed_platform(folder.load_config(overrides), overrides)
    before = _before(folder, loaded.config)
    if loaded.config.launch.nodes is not None:
        raise click.UsageError("with launch.nodes, continue the run with `hp-train run CONFIG --run.folder=RUN`")
    problems = [*check_resumed_run(loaded, before, world_size_of(loaded.config), registries())]
    # An earlier checkpoint may be from before the optimizer was changed: the ranks compare it with the settings.
    if not reset_optimizer and from_step is None:
        problems += _new_optimizer(folder, before, loaded.config)
    refuse(problems, str(folder.config_file))
    config = resolved(loaded.config, folder.path)
    # An agent of torchrun repeats the command when it restarts the ranks, and the run has a new optimizer by then.
    reset_optimizer = reset_optimizer and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    choice: Choice = "newest that fits"
    if reset_optimizer or from_step is not None:
        choice = "without optimizer" if reset_optimizer else "exactly"
    return _report(launch_training(config, folder.path, lambda: _take_up(folder, config, from_step), choice), config)


def _other_components(run: RunFolder, overrides: Overrides) -> list[Problem]:
    """Return the problems of another model or dataset, whose options could not be read as those of the run."""
    problems = []
    for part in ("model", "data"):
        old, new = _written_name(run, part), dict(overrides).get(f"{part}.name")
        # A Python file may have moved, and its function may have another name.
        if old is not None and new not in (None, old) and not (is_python_name(old) and is_python_name(str(new))):
            what, hint = "cannot change after the start of a run", "a new run with `hp-train CONFIG`"
            problems.append(Problem(path=f"{part}.name", what=what, expected=old, got=new, hint=hint))
    return problems


def _written_name(run: RunFolder, section: str) -> str | None:
    """Return the name of a component in the configuration of a run; None if it has none, or cannot be read."""
    try:
        written = read_yaml(run.config_file)
    except ValueError:
        # Reported with its line when the configuration is loaded.
        return None
    found = written.get(section) if isinstance(written, dict) else None
    return found.get("name") if isinstance(found, dict) else None


def _before(run: RunFolder, config: TrainerConfig) -> TrainerConfig:
    """Return the configuration that a run had, with the components of `config` that may have changed."""
    names = {"optimizer.name": config.optimizer.name, "checkpoint.storage.name": config.checkpoint.storage.name}
    parts = {f"{part}.name": getattr(config, part).name for part in ("model", "data")}
    moved = {path: name for path, name in parts.items() if is_python_name(name)}
    known = [*names.items(), ("metrics.trackers", "[]")]
    try:
        return run.load_config([*known, *moved.items()]).config
    except ConfigError:
        if not moved:
            raise
    # Another component, with other options: the comparison with the run's own one reports each difference.
    return run.load_config(known).config


def _new_optimizer(run: RunFolder, before: TrainerConfig, config: TrainerConfig) -> list[Problem]:
    """Return the settings that no checkpoint of a run fits any more. Its configuration must not be changed by them."""
    # `before` has the new name, with which the old options could be read.
    written = _written_name(run, "optimizer")
    changed = {
        "optimizer.name": (config.optimizer.name if written is None else written, config.optimizer.name),
        "training.freeze": (list(before.training.freeze), list(config.training.freeze)),
    }
    return [
        Problem(
            path=path,
            what="differs from the run's, whose checkpoints have other optimizer states",
            expected=str(old),
            got=str(new),
            hint=f"hp-train resume {run.path} --reset-optimizer, which starts with new optimizer states",
        )
        for path, (old, new) in changed.items()
        if old != new
    ]


def start(title: str, loaded: LoadedConfig, *, may_continue: bool) -> int:
    """Train a new run, or with `may_continue` the one that its folder has."""
    node = take_node(loaded.config)
    if node is not None and not may_continue:
        raise click.UsageError(
            "launch.nodes needs a run folder that all machines know: hp-train run CONFIG --run.folder=RUN"
        )
    folder = chosen_run_folder(loaded, Path(title))
    config = resolved(loaded.config, folder)
    num_ranks = world_size_of(config)
    storage = checkpoint_storage(RunFolder(folder), config)

    def check() -> None:
        if may_continue:
            report_rebuilt(folder, RunFolder.restore(folder, storage))
        if not may_continue or not RunFolder.exists(folder):
            return refuse(check_new_run(loaded, folder, num_ranks, registries()), title)
        run = RunFolder.open(folder)
        # Without the file the run was killed while it was created, and nothing can have changed.
        before = _before(run, loaded.config) if run.config_file.exists() else loaded.config
        problems = list(check_resumed_run(loaded, before, num_ranks, registries()))
        if run.config_file.exists() and list_checkpoints(storage):
            problems += _new_optimizer(run, before, loaded.config)
        return refuse(problems, title)

    def prepare() -> str | None:
        # Again for `run`: another job may have created the run since.
        if is_launched() or may_continue:
            check()
        if not may_continue or not RunFolder.exists(folder):
            print_message("preparing the data")
            create_run(folder, config)
            return None
        run = RunFolder.open(folder)
        if list_checkpoints(storage):
            return _take_up(run, config)
        # The run was killed before its first checkpoint, and starts from the beginning.
        complete_run(run, config)
        return None

    # Before anything is locked or created. Under a launcher only the settings are checked here: rank 0 checks folder
    # and data in `prepare`, once the ranks are connected and its errors reach all of them.
    if is_launched() or (node is not None and node.number):
        refuse(check_settings(loaded, num_ranks, registries()), title)
    else:
        check()
    path = launch_training(config, folder, prepare, node=node)
    return 0 if node is not None and node.number else _report(path, config)


def _take_up(run: RunFolder, config: TrainerConfig, from_step: int | None = None) -> str:
    """Verify the checkpoint and data that a run continues with, and return the name of the checkpoint.

    Newer checkpoints, which are damaged or after `from_step`, are moved aside.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or of another model.
        DataError: the prepared data have changed.
    """
    storage = checkpoint_storage(run, config)
    checkpoint = newest(run, config) if from_step is None else open_step(storage, from_step)
    check_model(checkpoint, config)
    if from_step is not None:
        note_other_model(checkpoint, config)
    report_rebuilt(run.path, prepare_again(run, config))
    source = registries().datasets.get(config.data.name).build(config.data.options)
    # Before anything is moved or deleted, so that a run that cannot continue is left unchanged.
    run.refuse_other_kinds()
    source.verify(run.data, config.launch.verify_data)
    # Moved aside before training starts: if the job is killed from here on, this checkpoint is already the newest.
    for name in set_aside_newer(storage, checkpoint.folder):
        print_message(f"moved {storage.describe(name)} aside; delete it when it is no longer needed")
    # Under the lock: no other job writes these files.
    run.sweep()
    delete_leftovers(storage, of_other_machines=True)
    # The ranks read their configuration from the folder, also after a restart.
    run.write_config(config)
    return checkpoint.folder


def _report(path: Path, config: TrainerConfig) -> int:
    """Print the sample texts of a finished run and its folder, and return the exit code 0."""
    if is_first_process():
        samples = RunFolder(path).samples_file
        if config.generate.prompts and samples.is_file():
            print_if_read(samples.read_text(encoding="utf-8").removesuffix("\n"))
        print_if_read(f"run folder: {path}")
    return 0


@click.command("profile", cls=SettingsCommand)
@config_argument
@click.option("--steps", default="4-5", show_default=True, metavar="FIRST-LAST", help="Steps to profile.")
def profile_command(config: str, steps: str, overrides: Overrides) -> int:
    """Train a few steps of CONFIG in a new run, and profile the last ones.

    The run folder gets a trace and the memory of every rank.
    """
    return start(config, load(config, [*profile_settings(steps), *overrides]), may_continue=False)


def profile_settings(steps: str) -> Overrides:
    """Return the settings of a run up to the last of the steps `FIRST-LAST`, which are profiled."""
    found = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", steps)
    if found is None:
        raise click.UsageError(f"--steps: expected a step or FIRST-LAST, such as 4-5, got {steps!r}")
    first, last = found[1], found[2] or found[1]
    return [("profile.first", first), ("profile.last", last), ("training.steps", last), ("generate.prompts", "[]")]


@click.command("sweep", cls=SettingsCommand)
@config_argument
def sweep_command(config: str, overrides: Overrides) -> int:
    """Train every combination of values, such as --optimizer.lr=1e-3,3e-3, one run after the other.

    All combinations are checked before the first one trains. The runs are folders in --run.folder, next to a
    comparison of those that succeeded.
    """
    if is_launched():
        raise click.UsageError("sweep starts its runs itself; do not start it under torchrun or msrun")
    wanted = dict(overrides).get("run.folder")
    base = default_run_folder(Path(config)) if wanted is None else Path(wanted).expanduser()
    runs = plan_sweep([one for one in overrides if one[0] != "run.folder"], base)
    # All runs before the first one starts: a typing error must not be found after hours.
    problems: list[Problem] = []
    for folder, chosen in runs.items():
        loaded = load(config, chosen)
        found = check_new_run(loaded, folder, world_size_of(loaded.config), registries())
        # Most problems are the same in every run.
        problems += [problem for problem in found if problem not in problems]
    refuse(problems, config)
    failed = [folder for folder, chosen in runs.items() if not _train(config, chosen, folder, len(runs))]
    done = [folder for folder in runs if folder not in failed]
    if len(done) > 1:
        print(compare_runs(done, base / "comparison.html"))
        print(f"\ncurves: {base / 'comparison.html'}")
    for folder in failed:
        print_message(f"{folder} failed")
    return 1 if failed else 0


def plan_sweep(overrides: Overrides, base: Path) -> dict[Path, Overrides]:
    """Return the settings of each run by folder: all combinations of values, the last setting varying fastest."""
    choices = [[(path, value) for value in split_values(text)] for path, text in overrides]
    # Folder names have only the settings in which the runs differ.
    varied = {path for path, text in overrides if len(split_values(text)) > 1}
    if not varied:
        raise click.UsageError("sweep needs a setting with several values, --optimizer.lr=1e-3,3e-3")
    runs: dict[Path, Overrides] = {}
    for number, chosen in enumerate(itertools.product(*choices)):
        label = "-".join(f"{path.rpartition('.')[2]}={value}" for path, value in chosen if path in varied)
        runs[base / f"{number:03}-{label.replace('/', '_')}"] = list(chosen)
    return runs


def split_values(text: str) -> list[str]:
    """Split a text at commas outside of brackets, braces and quotes: `1,[2,3]` gives `1` and `[2,3]`."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += 0 if quote else (character in "[{") - (character in "]}")
        if character == "," and depth == 0 and not quote:
            values.append("")
        else:
            values[-1] += character
    return values


def _train(config: str, overrides: Overrides, folder: Path, count: int) -> bool:
    """Train one run in a process of its own, and return whether it succeeded."""
    print(f"run {folder.name} (of {count})", flush=True)
    settings = [f"--{path}={value}" for path, value in (*overrides, ("run.folder", str(folder)))]
    # -P keeps the working directory off the import path. In a session of its own the run does not get the terminal's
    # signals directly, only once, from here.
    command: Sequence[str] = [sys.executable, "-P", "-m", "hp_trainer", "train", config, *settings]
    process = subprocess.Popen(command, start_new_session=True)
    stopped: Interrupted | None = None
    while True:
        try:
            code = process.wait()
        except Interrupted as interrupted:
            # Every signal is passed on: the first one lets the run save a checkpoint, the second one ends it.
            stopped = stopped or interrupted
            process.send_signal(interrupted.signal)
        else:
            break
    if stopped is not None:
        raise stopped
    return code == 0
