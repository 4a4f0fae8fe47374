"""`hp-train sweep`: one run for every combination of settings, one after the other."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hp_dtensor.launch import is_launched
from hp_trainer.cli.arguments import Overrides, Parser, UsageError, parse
from hp_trainer.cli.shared import load, refuse, tell
from hp_trainer.exceptions import Problem
from hp_trainer.launch import check_new_run, world_size_of
from hp_trainer.plugins import registries
from hp_trainer.report import compare_runs
from hp_trainer.run import default_run_folder
from hp_trainer.stop_request import Interrupted


def sweep_command(given: list[str]) -> int:
    """Train every combination of the values given: `hp-train sweep CONFIG --optimizer.lr=1e-3,3e-3`.

    Every combination is checked before the first one trains. The runs are folders within `--run.folder`; a comparison
    of those that ended well stands beside them.
    """
    parser = Parser(prog="hp-train sweep", add_help=False)
    parser.add_argument("config", metavar="CONFIG")
    options, overrides = parse(parser, given)
    if is_launched():
        raise UsageError("sweep starts one run after the other by itself; do not start it under torchrun or msrun")
    wanted = dict(overrides).get("run.folder")
    base = default_run_folder(Path(options.config)) if wanted is None else Path(wanted).expanduser()
    runs = plan_sweep([one for one in overrides if one[0] != "run.folder"], base)
    _check(Path(options.config), runs)
    failed = [folder for folder, chosen in runs.items() if not _train(options.config, chosen, folder, len(runs))]
    done = [folder for folder in runs if folder not in failed]
    if len(done) > 1:
        print(compare_runs(done, base / "comparison.html"))
        print(f"\ncurves: {base / 'comparison.html'}")
    for folder in failed:
        tell(f"{folder} failed")
    return 1 if failed else 0


def plan_sweep(overrides: Overrides, base: Path) -> dict[Path, Overrides]:
    """Return the settings of each run by its folder: every combination of values, the last setting changing fastest."""
    choices = [[(path, value) for value in split_values(text)] for path, text in overrides]
    varied = {path for path, text in overrides if len(split_values(text)) > 1}
    if not varied:
        raise UsageError("sweep needs a setting with several values, --optimizer.lr=1e-3,3e-3")
    runs: dict[Path, Overrides] = {}
    for number, chosen in enumerate(itertools.product(*choices)):
        label = "-".join(f"{path.rpartition('.')[2]}={value}" for path, value in chosen if path in varied)
        runs[base / f"{number:03}-{label.replace('/', '_')}"] = list(chosen)
    return runs


def split_values(text: str) -> list[str]:
    """Split a text at its commas, but for those within brackets, braces or quotes: `1,[2,3]` is `1` and `[2,3]`."""
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
    """Refuse the whole sweep if one of its runs could not train."""
    problems: list[Problem] = []
    for folder, overrides in runs.items():
        loaded = load(str(config), overrides)
        found = check_new_run(loaded, folder, world_size_of(loaded.config), registries())
        problems += [problem for problem in found if problem not in problems]
    refuse(problems, str(config))


def _train(config: str, overrides: Overrides, folder: Path, count: int) -> bool:
    """Train one run in a process of its own, and return whether it ended well."""
    print(f"run {folder.name} (of {count})", flush=True)
    settings = [f"--{path}={value}" for path, value in (*overrides, ("run.folder", str(folder)))]
    # -P: the working directory is not searched for modules. A session of its own: a signal of the terminal comes here
    # first, and reaches the run once.
    command: Sequence[str] = [sys.executable, "-P", "-m", "hp_trainer", config, *settings]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait() == 0
    except Interrupted as interrupted:
        _end(process, interrupted.signal)
        raise


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    """Hand a signal, and every further one, to a run, and wait for its end."""
    while True:
        process.send_signal(number)
        try:
            process.wait()
        except Interrupted as again:
            number = again.signal
        else:
            return
