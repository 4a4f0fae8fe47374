"""The report of one run."""

from __future__ import annotations

from pathlib import Path

import yaml

from hp_trainer._files import write_atomically
from hp_trainer.report.curves import draw_curve, order
from hp_trainer.report.history import RunHistory
from hp_trainer.report.html import page, preformatted, table
from hp_trainer.report.layout import draw_layout


def report_run(run: Path, to: Path | None = None) -> Path:
    """Write the report of a run, finished or not, and return its file.

    Args:
        run: the run folder.
        to: the HTML file; None: `report.html` in the run folder.

    Raises:
        RunFolderError: there is no run in the folder.
    """
    history = RunHistory.read(run)
    to = run / "report.html" if to is None else to
    write_atomically(to, page(history.name, _sections(history)))
    return to


def _sections(history: RunHistory) -> list[tuple[str, str]]:
    starts, curves = history.of("start"), {history.name: history.curves}
    sections = [("Summary", table(list(history.summary().items())))]
    if history.curves:
        drawn = "".join(draw_curve(name, curves) for name in order(list(history.curves)))
        sections.append(("Curves", f'<div class="curves">{drawn}</div>'))
    if starts:
        sections.append(("Layout", draw_layout(history.config, starts[-1]["world_size"])))
        rows = [[each["first_step"], each["platform"], each["world_size"]] for each in starts]
        sections.append(("Starts", table(rows, ["after step", "platform", "ranks"])))
    if checkpoints := history.of("checkpoint"):
        rows = [[each["step"], each["folder"], f"{each['seconds']:.2f}"] for each in checkpoints]
        sections.append(("Checkpoints", table(rows, ["step", "folder", "seconds"])))
    sections.append(("Configuration", preformatted(yaml.safe_dump(history.config, sort_keys=False, width=110))))
    return sections
