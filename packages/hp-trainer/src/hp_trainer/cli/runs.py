"""Commands about runs: train, resume, profile and sweep; list checkpoints, report and compare."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hp_dtensor.launch import is_launched
from hp_trainer.checkpoint import (
    Checkpoint,
    Storage,
    delete_leftovers,
    list_checkpoints,
    list_set_aside,
    open_step,
    set_aside_later,
)
from hp_trainer.checkpoint.index import step_in_name
from hp_trainer.cli.arguments import Overrides, Parser, UsageError, parse
from hp_trainer.cli.output import print_if_read
from hp_trainer.cli.shared import (
    load,
    newest,
    on_installed_platform,
    open_run,
    print_message,
    refuse,
    refuse_settings,
    require_platform,
    resolved,
)
from hp_trainer.config import LoadedConfig, TrainerConfig
from hp_trainer.exceptions import CheckpointError, Problem
from hp_trainer.launch import (
    check_new_run,
    check_resumed_run,
    check_settings,
    is_first_process,
    launch_training,
    world_size_of,
)
from hp_trainer.plugins import registries
from hp_trainer.report import compare_runs, report_run
from hp_trainer.run import (
    RunFolder,
    check_model,
    checkpoint_storage,
    chosen_run_folder,
    complete_run,
    create_run,
    default_run_folder,
)
from hp_trainer.stop_signals import Interrupted

_COLUMNS = ("step", "loss", "size", "state", "folder")


def describe_checkpoints(storage: Storage) -> tuple[str, bool]:
    """Return the checkpoints of a storage as a table, newest first, and whether all of them are valid.

    All files are read and compared with their checksums. Checkpoints moved aside by `resume --from-step` come last.
    """
    rows, all_valid = [_COLUMNS], True
    for name in [*list_checkpoints(storage), *list_set_aside(storage)]:
        try:
            row = _describe(storage, name)
        except (CheckpointError, OSError) as error:
            row, all_valid = (str(step_in_name(name.partition(".")[0])), "-", "-", f"damaged: {error}", name), False
        rows.append(row)
    if len(rows) == 1:
        return f"{storage.describe('')} has no checkpoint", True
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(text.rjust(width) for text, width in zip(row, widths, strict=False)), *row[3:]]) for row in rows
    ]
    return "\n".join(lines), all_valid


def _describe(storage: Storage, name: str) -> tuple[str, str, str, str, str]:
    checkpoint = Checkpoint(storage, name)
    loss = checkpoint.state.get("loss")
    # A loss that is not finite is stored as text.
    shown = f"{loss:.4f}" if isinstance(loss, float) else str(loss or "-")
    size = sum(checkpoint.index.shard_bytes) / 2**20
    # Last, since it reads all files; the columns above come from the index.
    checkpoint.verify()
    return str(checkpoint.step), shown, f"{size:,.1f} MiB", "valid", name


def train_command(given: list[str]) -> int:
    """Train in a new run folder: `hp-train CONFIG`."""
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
    """Start a run, or continue it if it exists: `hp-train run CONFIG --run.folder=RUN`."""
    parser = Parser(prog="hp-train run", add_help=False)
    parser.add_argument("config", metavar="CONFIG")
    options, overrides = parse(parser, given)
    loaded = load(options.config, overrides)
    if loaded.config.run.folder is None:
        raise UsageError("run needs the folder of the run to start or continue: --run.folder=RUN")
    folder = chosen_run_folder(loaded, Path(options.config))
    config = resolved(loaded.config, folder)

    def check() -> None:
        refuse(_run_problems(loaded, folder), options.config)

    def prepare() -> str | None:
        check()
        if not RunFolder.exists(folder):
            create_run(folder, config)
            return None
        run = RunFolder.open(folder)
        if list_checkpoints(checkpoint_storage(run, config)):
            return _take_up(run, config)
        # The run was killed before its first checkpoint, and starts from the beginning.
        complete_run(run, config)
        return None

    _check_early(loaded, options.config, check)
    return _report(launch_training(config, folder, prepare), config)


def resume_command(given: list[str]) -> int:
    """Continue from the newest valid checkpoint, or from an earlier one: `hp-train resume RUN [--from-step N]`."""
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
    """List and verify the checkpoints of a run: `hp-train checkpoints RUN`. Return 1 if one is damaged."""
    parser = Parser(prog="hp-train checkpoints", add_help=False)
    parser.add_argument("run", metavar="RUN")
    options, overrides = parse(parser, given)
    table, all_valid = describe_checkpoints(checkpoint_storage(*open_run(options.run, overrides)))
    print(table)
    return 0 if all_valid else 1


def _check_early(loaded: LoadedConfig, title: str, check: Callable[[], None]) -> None:
    """Raise for problems of a run before anything is locked or created.

    Under a launcher only the settings are checked here. Rank 0 checks folder and data in `prepare`, once the ranks are
    connected and its errors reach all of them.
    """
    if is_launched():
        refuse(check_settings(loaded, world_size_of(loaded.config), registries()), title)
    else:
        check()


def _run_problems(loaded: LoadedConfig, folder: Path) -> list[Problem]:
    """Return the problems of starting a run in `folder`, or of continuing the one there."""
    size = world_size_of(loaded.config)
    if not RunFolder.exists(folder):
        return check_new_run(loaded, folder, size, registries())
    run = RunFolder.open(folder)
    # Without the file the run was killed while it was created, and nothing can have changed.
    before = run.load_config().config if run.config_file.exists() else loaded.config
    return check_resumed_run(loaded, before, size, registries())


def _take_up(run: RunFolder, config: TrainerConfig, from_step: int | None = None) -> str:
    """Verify the checkpoint and data that a run continues with, and return the name of the checkpoint.

    With `from_step`, later checkpoints are moved aside.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or of another model.
        DataError: the prepared data have changed.
    """
    storage = checkpoint_storage(run, config)
    checkpoint = newest(run, config) if from_step is None else open_step(storage, from_step)
    check_model(checkpoint, config)
    source = registries().datasets.get(config.data.name).build(config.data.options)
    # Before anything is moved or deleted, so that a run that cannot continue is left unchanged.
    source.verify(run.data, config.launch.verify_data)
    # Moved aside before training starts: if the job is killed from here on, the requested step is already the newest.
    if from_step is not None:
        for name in set_aside_later(storage, from_step):
            print_message(f"moved {storage.describe(name)} aside; delete it when it is no longer needed")
    # Under the lock: no other job writes these files.
    run.sweep()
    delete_leftovers(storage)
    # The ranks read their configuration from the folder, also after a restart.
    run.write_config(config)
    return checkpoint.folder


def _report(path: Path, config: TrainerConfig) -> int:
    """Print the sample texts of a finished run and its folder."""
    if is_first_process():
        samples = RunFolder(path).samples_file
        if config.generate.prompts and samples.is_file():
            print_if_read(samples.read_text(encoding="utf-8").removesuffix("\n"))
        print_if_read(f"run folder: {path}")
    return 0


def profile_command(given: list[str]) -> int:
    """Train a few steps in a new run and profile the last ones: `hp-train profile CONFIG`."""
    return train_command(profile_arguments(given))


def profile_arguments(given: list[str]) -> list[str]:
    """Return the arguments of a new run for `hp-train profile CONFIG [--steps=FIRST-LAST]`.

    The first steps of a run load kernels and compile, so steps 4 and 5 are profiled by default.
    """
    parser = Parser(prog="hp-train profile", add_help=False)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--steps", default="4-5", metavar="FIRST-LAST")
    options, overrides = parse(parser, given)
    found = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", options.steps)
    if found is None:
        raise UsageError(f"--steps: expected a step or FIRST-LAST, such as 4-5, got {options.steps!r}")
    first, last = found[1], found[2] or found[1]
    # Given first, so that settings of the command line override them.
    settings = [("profile.first", first), ("profile.last", last), ("training.steps", last), ("generate.prompts", "[]")]
    return [options.config, *(f"--{path}={value}" for path, value in [*settings, *overrides])]


def sweep_command(given: list[str]) -> int:
    """Train every combination of the given values: `hp-train sweep CONFIG --optimizer.lr=1e-3,3e-3`.

    All combinations are checked before the first one trains. The runs are folders in `--run.folder`, next to a
    comparison of those that succeeded.
    """
    parser = Parser(prog="hp-train sweep", add_help=False)
    parser.add_argument("config", metavar="CONFIG")
    options, overrides = parse(parser, given)
    if is_launched():
        raise UsageError("sweep starts its runs itself; do not start it under torchrun or msrun")
    wanted = dict(overrides).get("run.folder")
    base = default_run_folder(Path(options.config)) if wanted is None else Path(wanted).expanduser()
    runs = plan_sweep([one for one in overrides if one[0] != "run.folder"], base)
    # All runs before the first one starts: a typing error must not be found after hours.
    _check(Path(options.config), runs)
    failed = [folder for folder, chosen in runs.items() if not _train(options.config, chosen, folder, len(runs))]
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
        raise UsageError("sweep needs a setting with several values, --optimizer.lr=1e-3,3e-3")
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


def _check(config: Path, runs: dict[Path, Overrides]) -> None:
    """Raise for the problems of all runs of a sweep, each once."""
    problems: list[Problem] = []
    for folder, overrides in runs.items():
        loaded = load(str(config), overrides)
        found = check_new_run(loaded, folder, world_size_of(loaded.config), registries())
        # Most problems are the same in every run.
        problems += [problem for problem in found if problem not in problems]
    refuse(problems, str(config))


def _train(config: str, overrides: Overrides, folder: Path, count: int) -> bool:
    """Train one run in a process of its own, and return whether it succeeded."""
    print(f"run {folder.name} (of {count})", flush=True)
    settings = [f"--{path}={value}" for path, value in (*overrides, ("run.folder", str(folder)))]
    # -P keeps the working directory off the import path. In a session of its own the run does not get the terminal's
    # signals directly, only once, from here.
    command: Sequence[str] = [sys.executable, "-P", "-m", "hp_trainer", config, *settings]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait() == 0
    except Interrupted as interrupted:
        _end(process, interrupted.signal)
        raise


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal, and every further one that arrives, to a run, and wait for it to end."""
    while True:
        process.send_signal(number)
        try:
            process.wait()
        except Interrupted as again:
            number = again.signal
        else:
            return


def report_command(given: list[str]) -> int:
    """Write the report of a run: `hp-train report RUN [--to FILE]`."""
    parser = Parser(prog="hp-train report", add_help=False)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--to", metavar="FILE", type=Path)
    options, overrides = parse(parser, given)
    refuse_settings("report", overrides)
    print(report_run(Path(options.run), options.to))
    return 0


def compare_command(given: list[str]) -> int:
    """Compare runs in a table and a picture: `hp-train compare RUN RUN ... [--to FILE]`."""
    parser = Parser(prog="hp-train compare", add_help=False)
    parser.add_argument("runs", metavar="RUN", nargs="+")
    parser.add_argument("--to", metavar="FILE", type=Path, default=Path("comparison.html"))
    options, overrides = parse(parser, given)
    refuse_settings("compare", overrides)
    if len(options.runs) < 2:
        raise UsageError("compare needs at least two runs")
    print(compare_runs([Path(run) for run in options.runs], options.to))
    print(f"\ncurves: {options.to}")
    return 0
