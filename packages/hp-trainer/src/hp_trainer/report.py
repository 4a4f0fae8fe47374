"""Reports of runs as self-contained HTML files: one run, or several compared.

`hp-train report` and `hp-train compare` read run folders, also while a run trains, without loading a framework. A new
number in the metrics is shown without a change here. Text from a run is escaped.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml

from hp_trainer._files import write_atomically
from hp_trainer.config import settings_by_path
from hp_trainer.config.yaml_tree import read_yaml
from hp_trainer.exceptions import ParallelDimsError, RunFolderError
from hp_trainer.metrics import read_metrics
from hp_trainer.metrics.pictures import draw_loads, draw_losses, loads_of, new_figure
from hp_trainer.metrics.tracker import EXPERT_LOAD, report_damaged_lines
from hp_trainer.parallel import ParallelDims
from hp_trainer.run import RunFolder

Point = tuple[int, float]  # step, value

# Fields of an event that are not drawn as curves.
_NO_CURVE = ("event", "step", "tokens", "samples")


@dataclass(frozen=True)
class RunHistory:
    """The events of a run, and its configuration as plain dicts, which need neither plugins nor a framework."""

    path: Path
    events: tuple[dict[str, Any], ...]
    config: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> RunHistory:
        """Read a run folder."""
        run = RunFolder.open(path)
        try:
            config = read_yaml(run.config_file)
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{run.config_file} is damaged: {error}") from error
        if not isinstance(config, dict):
            raise RunFolderError(f"{run.config_file} is damaged: it has no settings")
        report_damaged_lines(run.metrics_file)
        return cls(path, tuple(read_metrics(run.metrics_file)), config)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind: `start`, `step`, `evaluation` or `checkpoint`."""
        return [event for event in self.events if event.get("event") == kind]

    @cached_property
    def curves(self) -> dict[str, list[Point]]:
        """Finite values of each metric over the steps, by name; those of evaluations start with `evaluation_`."""
        found: dict[str, list[Point]] = {}
        for kind, prefix in (("step", ""), ("evaluation", "evaluation_")):
            for event in self.of(kind):
                for name, value in _numbers(event):
                    found.setdefault(prefix + name, []).append((event["step"], value))
        return found

    def last(self, curve: str, count: int = 1) -> float | None:
        """Return the mean of the last `count` values of a curve; None if it has none."""
        points = self.curves.get(curve, [])
        return fmean(value for _, value in points[-count:]) if points else None

    def summary(self) -> dict[str, str]:
        """Return the main results of the run as texts, by name."""
        starts, steps = self.of("start"), self.of("step")
        start = starts[-1] if starts else {}
        evaluation = self.curves.get("evaluation_loss", [])
        speeds = [value for _, value in self.curves.get("tokens_per_second", [])]
        best = min(evaluation, key=lambda point: point[1], default=None)
        entries = {
            "parameters": _count(start.get("num_parameters")),
            "ranks": f"{start['world_size']} on {start['platform']}" if start else "",
            "lost replicas": str(start.get("lost_replicas", "")),
            "starts": str(len(starts)) if len(starts) > 1 else "",
            "steps": f"{steps[-1]['step']:,} of {self.config.get('training', {}).get('steps', '?')}" if steps else "",
            "tokens": _count(sum(event.get("tokens", 0) for event in steps)),
            "training loss, mean of the last 10 steps": _loss(self.last("loss", 10)),
            "last evaluation loss": _loss(self.last("evaluation_loss")),
            "best evaluation loss": f"{best[1]:.4f} at step {best[0]}" if best else "",
            "tokens/s, median": f"{median(speeds):,.0f}" if speeds else "",
            "checkpoints written": str(len(self.of("checkpoint"))),
        }
        return {name: text for name, text in entries.items() if text}


def _numbers(event: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the finite numbers of an event by name, including the model's metrics."""
    values = {name: value for name, value in event.items() if name not in (*_NO_CURVE, "metrics")}
    inner = event.get("metrics")
    values |= inner if isinstance(inner, dict) else {}
    return [
        (name, float(value))
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    ]


def _count(number: Any) -> str:
    """Format a number in words: `3.10 million`."""
    if not isinstance(number, (int, float)) or not number:
        return ""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.2f} {word}"
    return f"{number:,}"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


MOST_POINTS = 1000

# Curves that are shown first, in this order; the others follow by name.
_FIRST = ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "seconds")
_UNITS = {
    "loss": "nats per token",
    "seconds": "seconds per step",
    "evaluation_seconds": "seconds per evaluation",
    "gradient_norm": "2-norm before clipping",
    "peak_memory_gib": "GiB",
}


def draw_curves(runs: Mapping[str, Mapping[str, Sequence[Point]]]) -> str:
    """Return the HTML of every metric of some runs, in display order; constant metrics are listed in a table."""
    names = {name for curves in runs.values() for name in curves if not name.startswith(EXPERT_LOAD)}
    values = {name: {value for curves in runs.values() for _, value in curves.get(name, ())} for name in names}
    # The evaluation loss is drawn with the loss.
    rest = sorted(names - {*_FIRST, "evaluation_loss"})
    ordered = [*(name for name in _FIRST if name in names), *rest]
    drawn = "".join(draw_curve(name, runs) for name in ordered if name == "loss" or len(values[name]) > 1)
    constant = [[name, f"{values[name].pop():g}"] for name in ordered if name != "loss" and len(values[name]) == 1]
    return f'<div class="curves">{drawn}</div>' + (table(constant, ["constant", "value"]) if constant else "")


def draw_curve(name: str, runs: Mapping[str, Mapping[str, Sequence[Point]]]) -> str:
    """Return the SVG of one metric over the steps of each run; evaluation loss is drawn with the training loss."""
    figure = new_figure(6.4, 3.4)
    axes = figure.add_subplot()
    for index, (run, curves) in enumerate(runs.items()):
        label, color = run if len(runs) > 1 else "", f"C{index}"
        points, evaluation = thin(curves.get(name, ())), thin(curves.get("evaluation_loss", ()))
        if name == "loss" and len(runs) == 1 and points:
            draw_losses(axes, points, evaluation)
            continue
        if points:
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.2, label=label)
        if name == "loss" and evaluation:
            axes.plot(*zip(*evaluation, strict=True), "o--", color=color, markersize=3, label=f"{label} evaluation")
    axes.set(xlabel="step", ylabel=_UNITS.get(name, ""), title=name.replace("_", " "))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if len(runs) > 1:
        axes.legend(fontsize="small")
    return _as_svg(figure)


def draw_experts(events: Sequence[dict[str, Any]]) -> str:
    """Return the SVG of the experts' loads over the steps, a row per expert; empty for a model without experts."""
    steps, loads = loads_of(list(events))
    if not loads:
        return ""
    figure = new_figure(12.8, min(2 + 0.12 * sum(len(layer) for layer in loads.values()), 30))
    draw_loads(figure, steps, loads)
    return f'<div class="wide">{_as_svg(figure)}</div>'


def _as_svg(figure: Any) -> str:
    import matplotlib

    text = io.StringIO()
    # Without a date and without random ids, the same run gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "hp-train", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("<svg")[2].join(["<svg", ""])


def thin(points: Sequence[Point]) -> list[Point]:
    """Return at most `MOST_POINTS` points, each the mean of neighbouring points at their last step."""
    width = -(-len(points) // MOST_POINTS) or 1
    groups = (points[start : start + width] for start in range(0, len(points), width))
    return [(group[-1][0], fmean(value for _, value in group)) for group in groups]


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; } td, th { padding: .15rem .6rem; text-align: left; border: 1px solid #ddd; }
th { background: #f5f5f5; font-weight: 600; } td { font-variant-numeric: tabular-nums; }
pre { background: #f7f7f7; padding: 1rem; overflow-x: auto; font-size: .85rem; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)); gap: 1rem; }
.curves svg, .wide svg { width: 100%; height: auto; } .curves + table { margin-top: 1rem; }
"""


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """Return an HTML page; `sections` are pairs of a heading and its HTML."""
    body = "".join(f"<h2>{escape(heading)}</h2>\n{content}\n" for heading, content in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def table(rows: Iterable[Sequence[object]], header: Sequence[object] = ()) -> str:
    """Return an HTML table of texts. Without a header, the first column is bold."""
    head = "".join(f"<th>{escape(str(each))}</th>" for each in header)
    lines = [f"<tr>{head}</tr>"] if head else []
    for row in rows:
        cells = [escape(str(each)) for each in row]
        first = f"<td>{cells[0]}</td>" if header else f"<th>{cells[0]}</th>"
        lines.append(f"<tr>{first}{''.join(f'<td>{cell}</td>' for cell in cells[1:])}</tr>")
    return f"<table>{''.join(lines)}</table>"


def preformatted(text: str) -> str:
    """Return a text as preformatted HTML."""
    return f"<pre>{escape(text)}</pre>"


def describe_layout(config: dict[str, Any], world_size: int, lost_replicas: int) -> str:
    """Return the degrees of a run (configuration as plain dicts), less the lost replicas, in one line."""
    parallel, model = dict(config.get("parallel", {})), config.get("model", {})
    try:
        if lost_replicas:
            parallel["dp_replicate"] -= lost_replicas
        # The recorded settings are plain, and may be of another version.
        return ParallelDims.from_config(SimpleNamespace(**parallel), world_size, model.get("num_experts")).summary()
    except (ParallelDimsError, AttributeError, KeyError, TypeError) as error:
        return f"unknown: {error}"


def report_run(run: Path, to: Path | None = None) -> Path:
    """Write the report of a run, finished or not, to a file (None: `report.html` in its folder), and return that."""
    history = RunHistory.read(run)
    to = run / "report.html" if to is None else to
    write_atomically(to, page(history.name, _sections(history)))
    return to


def _sections(history: RunHistory) -> list[tuple[str, str]]:
    # A resumed run has several starts, perhaps with other ranks.
    starts, curves = history.of("start"), {history.name: history.curves}
    sections = [("Summary", table(list(history.summary().items())))]
    if slow := slow_ranks(history.of("step")):
        sections.append(("Slow ranks", table(slow, ["ranks", "from step", "to step", "times the others", "in"])))
    if seconds := rank_seconds(history.of("step")):
        sections.append(("Seconds per step of each rank, median", seconds))
    if history.curves:
        sections.append(("Curves", draw_curves(curves)))
    if experts := draw_experts(history.of("step")):
        sections.append(("Experts", experts))
    if starts:
        last = starts[-1]
        layout = describe_layout(history.config, last["world_size"], last.get("lost_replicas", 0))
        sections.append(("Layout", preformatted(layout)))
        names = ["first_step", "platform", "world_size", "lost_replicas"]
        rows = [[each.get(name, 0) for name in names] for each in starts]
        sections.append(("Starts", table(rows, ["after step", "platform", "ranks", "lost replicas"])))
    if checkpoints := history.of("checkpoint"):
        rows = [[each["step"], each["folder"], f"{each['seconds']:.2f}"] for each in checkpoints]
        sections.append(("Checkpoints", table(rows, ["step", "folder", "seconds"])))
    sections.append(("Configuration", preformatted(yaml.safe_dump(history.config, sort_keys=False, width=110))))
    return sections


def slow_ranks(events: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a row per period of slow ranks: ranks, first and last step, largest factor, kind of work."""
    found: dict[tuple[tuple[int, ...], int], list[Any]] = {}
    # Ranks remain named until the next exchange of times, which says of the steps up to it whether they were slow.
    for event in (each for each in events if each.get("rank_seconds")):
        for each in event.get("stragglers", ()):
            ranks, since, factor = tuple(each["ranks"]), each["since"], each["factor"]
            who = ", ".join(map(str, ranks)) + ("" if each["node"] is None else f" (node {each['node']})")
            _, _, _, most, _ = found.get((ranks, since), [None, None, None, 0.0, None])
            found[ranks, since] = [who, since, event["step"], max(most, factor), each["work"]]
    return [[who, str(since), str(to), f"{most:.1f}", work] for who, since, to, most, work in found.values()]


# Most ranks of the table of times.
MOST_RANKS = 64


def rank_seconds(events: Sequence[dict[str, Any]]) -> str:
    """Return the HTML of the times of the slowest `MOST_RANKS` ranks by kind; empty where they were not measured."""
    measured = [event["rank_seconds"] for event in events if event.get("rank_seconds")]
    if not measured:
        return ""
    counts = {kind: len(seconds) for kind, seconds in measured[-1].items()}
    # A resumed run may have another number of ranks.
    measured = [each for each in measured if {kind: len(seconds) for kind, seconds in each.items()} == counts]
    kinds, number = list(counts), min(counts.values())
    medians = {kind: np.median([each[kind] for each in measured], axis=0) for kind in kinds}
    shown, more = list(range(number)), ""
    if number > MOST_RANKS:
        own = sum(seconds for kind, seconds in medians.items() if kind != "waiting")
        shown = np.argsort(-own, kind="stable")[:MOST_RANKS].tolist()
        more = f"<p>The {MOST_RANKS} of {number:,} ranks with most time of their own.</p>"
    rows = [[rank, *(f"{medians[kind][rank]:.4f}" for kind in kinds)] for rank in shown]
    return table(rows, ["rank", *kinds]) + more


# Settings that differ in every run.
_PLACES = ("run.folder", "checkpoint.folder")


def compare_runs(runs: Sequence[Path], to: Path) -> str:
    """Write a comparison of runs as an HTML file, and return its table of results as text."""
    histories = [RunHistory.read(run) for run in runs]
    # The names of the folders, or their paths where two have the same name.
    folders = [history.name for history in histories]
    names = [str(x.path) if folders.count(x.name) > 1 else x.name for x in histories]
    summaries = [history.summary() for history in histories]
    wanted = list(dict.fromkeys(key for summary in summaries for key in summary))
    numbers = [[key, *(summary.get(key, "") for summary in summaries)] for key in wanted]
    differences = [[path, *values] for path, values in different_settings(histories).items()]
    header = ["", *names]
    curves = {name: history.curves for name, history in zip(names, histories, strict=True)}
    sections = [
        ("Numbers", table(numbers, header)),
        ("Settings that differ", table(differences, header) if differences else "<p>None.</p>"),
        ("Curves", draw_curves(curves)),
    ]
    write_atomically(to, page(f"Comparison of {len(runs)} runs", sections))
    texts = [[str(cell) for cell in row] for row in [header, *differences, *numbers]]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts)
    return "\n".join(line.rstrip() for line in lines)


def different_settings(histories: Sequence[RunHistory]) -> dict[str, list[Any]]:
    """Return the values of each setting that differs between runs; a setting that a run does not have is empty."""
    settings = [settings_by_path(history.config) for history in histories]
    paths = dict.fromkeys(path for each in settings for path in each)
    values = {path: [each.get(path, "") for each in settings] for path in paths if path not in _PLACES}
    return {path: found for path, found in values.items() if any(value != found[0] for value in found)}
