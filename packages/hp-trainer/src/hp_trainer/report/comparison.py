"""The comparison of several runs: their numbers, their curves over each other, the settings that differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hp_trainer._files import write_atomically
from hp_trainer.config import settings_by_path
from hp_trainer.report.curves import draw_curve, order
from hp_trainer.report.history import RunHistory
from hp_trainer.report.html import page, table

# They differ in every run and say nothing about it.
_PLACES = ("run.folder", "checkpoint.folder")


def compare_runs(runs: Sequence[Path], to: Path) -> str:
    """Write the comparison of runs as an HTML file, and return its table of numbers as text.

    Raises:
        RunFolderError: a folder holds no run.
    """
    histories = [RunHistory.read(run) for run in runs]
    names = _distinct_names(histories)
    summaries = [history.summary() for history in histories]
    wanted = list(dict.fromkeys(key for summary in summaries for key in summary))
    numbers = [[key, *(summary.get(key, "") for summary in summaries)] for key in wanted]
    differences = [[path, *values] for path, values in different_settings(histories).items()]
    header = ["", *names]
    curves = {name: history.curves for name, history in zip(names, histories, strict=True)}
    drawn = "".join(
        draw_curve(name, curves) for name in order(list({name for each in curves.values() for name in each}))
    )
    sections = [
        ("Numbers", table(numbers, header)),
        ("Settings that differ", table(differences, header) if differences else "<p>None.</p>"),
        ("Curves", f'<div class="curves">{drawn}</div>'),
    ]
    write_atomically(to, page(f"Comparison of {len(runs)} runs", sections))
    return _as_text([header, *differences, *numbers])


def different_settings(histories: Sequence[RunHistory]) -> dict[str, list[Any]]:
    """Return the values of each setting that is not the same in all runs; one that a run does not have is empty."""
    settings = [settings_by_path(history.config) for history in histories]
    paths = dict.fromkeys(path for each in settings for path in each)
    values = {path: [each.get(path, "") for each in settings] for path in paths if path not in _PLACES}
    return {path: found for path, found in values.items() if any(value != found[0] for value in found)}


def _distinct_names(histories: Sequence[RunHistory]) -> list[str]:
    """Return the names of the folders, or their paths where two have the same name."""
    names = [history.name for history in histories]
    return [str(history.path) if names.count(history.name) > 1 else history.name for history in histories]


def _as_text(rows: Sequence[Sequence[object]]) -> str:
    """Return rows as text, the columns aligned."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts)
    return "\n".join(line.rstrip() for line in lines)
