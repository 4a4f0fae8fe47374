"""Commands that read runs: list checkpoints, write a report, compare, evaluate, and generate text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import click

from hp_dtensor.comm.world import current_world
from hp_dtensor.launch import from_environment, is_launched, launch
from hp_dtensor.platform.selection import get_platform
from hp_trainer._coordination import Alone, Group, coordinator
from hp_trainer.checkpoint import Checkpoint, Storage, list_checkpoints, list_set_aside
from hp_trainer.checkpoint.index import step_in_name
from hp_trainer.cli.commands import Command, Overrides, SettingsCommand, run_argument
from hp_trainer.cli.completion import run_folders
from hp_trainer.cli.shared import newest, open_run, refuse, weights_option
from hp_trainer.config import ParallelConfig, TrainerConfig
from hp_trainer.evaluation import Perplexity, generate, measure_perplexity, run_harness
from hp_trainer.exceptions import CheckpointError, Problem
from hp_trainer.launch import check_evaluation, import_platform, is_first_process, world_size_of
from hp_trainer.plugins import registries
from hp_trainer.report import compare_runs, report_run
from hp_trainer.run import RunFolder, checkpoint_storage


@click.command("checkpoints", cls=SettingsCommand)
@run_argument
def checkpoints_command(run: str, overrides: Overrides) -> int:
    """List the checkpoints of RUN with step, loss and size, newest first, and verify their checksums.

    The exit code is 1 if one is damaged.
    """
    table, all_valid = describe_checkpoints(checkpoint_storage(*open_run(run, overrides)))
    print(table)
    return 0 if all_valid else 1


def describe_checkpoints(storage: Storage) -> tuple[str, bool]:
    """Return all checkpoints, fully read, as a table, newest first, moved ones last; and whether all are valid."""
    rows, all_valid = [("step", "loss", "size", "state", "folder")], True
    for name in [*list_checkpoints(storage), *list_set_aside(storage)]:
        try:
            row = _describe(storage, name)
        except (CheckpointError, OSError) as error:
            state = "damaged" if isinstance(error, CheckpointError) else "unreadable"
            row, all_valid = (str(step_in_name(name.partition(".")[0])), "-", "-", f"{state}: {error}", name), False
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


@click.command("report", cls=Command)
@run_argument
@click.option("--to", type=click.Path(path_type=Path), metavar="FILE", help="File to write; default: RUN/report.html.")
def report_command(run: str, to: Path | None) -> int:
    """Write an HTML file with the curves, layout, starts, checkpoints and settings of RUN."""
    print(report_run(Path(run), to))
    return 0


@click.command("compare", cls=Command)
@click.argument("runs", nargs=-1, metavar="RUN RUN...", shell_complete=run_folders)
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    metavar="FILE",
    default=Path("comparison.html"),
    show_default=True,
    help="File with the curves.",
)
def compare_command(runs: tuple[str, ...], to: Path) -> int:
    """Print the results of runs and the settings that differ, and draw their curves into an HTML file."""
    if len(runs) < 2:
        raise click.UsageError("compare needs at least two runs")
    print(compare_runs([Path(run) for run in runs], to))
    print(f"\ncurves: {to}")
    return 0


@click.command("evaluate", cls=SettingsCommand)
@run_argument
@weights_option
@click.option("--tasks", metavar="NAME,...", help="Tasks of lm-eval; RUN is then an exported model.")
def evaluate_command(run: str, weights: str | None, tasks: str | None, overrides: Overrides) -> int:
    """Print loss and perplexity of RUN on its evaluation data, or on other data (--data.path=FILE).

    A run is evaluated on one rank, on several with --launch.local_ranks=N, or on the ranks of a launcher. With --tasks
    other options are lm-eval's, such as --limit=100.
    """
    # With tasks the settings are options of lm-eval.
    if tasks is not None:
        return run_harness(Path(run), tasks, [f"--{name}={value}" for name, value in overrides])
    _, config = _open(run, overrides)
    # One rank, unless a launcher or the command line says otherwise: the setting of the training does not count.
    asked = any(name == "launch.local_ranks" for name, _ in overrides)
    num_ranks = world_size_of(config) if asked or is_launched() else 1
    problems: list[Problem] = []
    if _has_other_data(overrides):
        source = registries().datasets.get(config.data.name).build(config.data.options)
        problems += [problem.within("data") for problem in source.problems()]
    if num_ranks > 1:
        problems += check_evaluation(config, num_ranks, registries())
    refuse(problems, "evaluate")
    platform = import_platform(config.platform)
    arguments = (run, overrides, weights, platform.name, num_ranks > 1)
    if is_launched():
        from_environment(platform, config.launch.timeout_seconds)
        step, loss, tokens = evaluate_on_rank(*arguments)
        platform.disconnect()
    elif num_ranks == 1:
        step, loss, tokens = evaluate_on_rank(*arguments)
    else:
        timeout = config.launch.timeout_seconds
        step, loss, tokens = launch(
            evaluate_on_rank, arguments, num_ranks=num_ranks, platform=platform, timeout_seconds=timeout
        )[0]
    if is_first_process():
        perplexity = Perplexity(loss, tokens).perplexity
        print(f"step {step}: loss {loss:.4f} nats per token, perplexity {perplexity:.4g}, over {tokens:,} tokens")
    return 0


def evaluate_on_rank(
    path: str, overrides: Overrides, weights: str | None, platform_name: str, on_all_ranks: bool
) -> tuple[int, float, int]:
    """Evaluate the run on this rank or on all; return the step, the mean loss in nats, and the number of targets."""
    run, config = _open(path, overrides)
    platform = get_platform(platform_name)
    group: Group = current_world(platform).all if on_all_ranks else Alone()
    # Rank 0 reads and verifies the full checkpoint; every rank verifies the blocks that it reads.
    name = coordinator(group, "looking for a checkpoint", lambda: newest(run, config).folder, CheckpointError)
    checkpoint = Checkpoint(checkpoint_storage(run, config), name)
    averaged = weights == "ema"
    data: Literal["run", "evaluation", "all"] = "all" if _has_other_data(overrides) else "run"
    if any(name == "data.eval" for name, _ in overrides):
        data = "evaluation"
    found = measure_perplexity(
        run, config, platform, checkpoint, data=data, averaged=averaged, on_all_ranks=on_all_ranks
    )
    return checkpoint.step, found.loss, found.tokens


def _open(path: str, overrides: Overrides) -> tuple[RunFolder, TrainerConfig]:
    """Return a run and its configuration for an evaluation, by default with weights sharded over all ranks."""
    run, config = open_run(path, overrides)
    given = {name.partition(".")[2] for name, _ in overrides if name.startswith("parallel.")}
    parallel = {name: getattr(config.parallel, name) for name in (*given, "tp_plan", "fsdp_units")}
    return run, dataclasses.replace(config, parallel=ParallelConfig(**parallel))


def _has_other_data(overrides: Overrides) -> bool:
    return any(name.startswith("data.") for name, _ in overrides)


@click.command("generate", cls=SettingsCommand)
@run_argument
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Continue TEXT instead of generate.prompts.")
def generate_command(run: str, prompts: tuple[str, ...], overrides: Overrides) -> int:
    """Continue prompts with the model of RUN."""
    folder, config = open_run(run, overrides)
    asked = list(prompts or config.generate.prompts)
    for text in generate(config, import_platform(str(config.platform)), asked, newest(folder, config)):
        print(text)
    return 0
