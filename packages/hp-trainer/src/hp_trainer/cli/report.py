"""Commands that read runs: list checkpoints, write a report, compare."""

from __future__ import annotations

from pathlib import Path

import click

from hp_trainer.checkpoint import Checkpoint, Storage, list_checkpoints, list_set_aside
from hp_trainer.checkpoint.index import step_in_name
from hp_trainer.cli.commands import Command, Overrides, SettingsCommand, run_argument
from hp_trainer.cli.completion import run_folders
from hp_trainer.cli.shared import open_run
from hp_trainer.exceptions import CheckpointError
from hp_trainer.report import compare_runs, report_run
from hp_trainer.run import checkpoint_storage


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
    """Return the checkpoints of a storage as a table, newest first, and whether all of them are valid.

    All files are read and compared with their checksums. Checkpoints moved aside by `resume --from-step` come last.
    """
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
