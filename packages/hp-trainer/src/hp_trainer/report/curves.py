"""Curves as SVG pictures."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from hp_trainer.report.history import Point

MOST_POINTS = 1000

# The order of what people look at first; other numbers follow by name.
_FIRST = ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "seconds")
_UNITS = {
    "loss": "nats per token",
    "seconds": "seconds per step",
    "evaluation_seconds": "seconds per evaluation",
    "gradient_norm": "2-norm before clipping",
    "peak_memory_gib": "GiB",
}


def order(names: Sequence[str]) -> list[str]:
    """Return the curves in the order in which they are shown; that of evaluation stands with the training's."""
    rest = sorted(name for name in names if name not in _FIRST and name != "evaluation_loss")
    return [*(name for name in _FIRST if name in names), *rest]


def draw_curve(name: str, runs: Mapping[str, Mapping[str, Sequence[Point]]]) -> str:
    """Return the SVG of one number over the steps, of every run that has it.

    Args:
        runs: the curves of each run by its name; the evaluation loss is drawn beside the training loss.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    FigureCanvasSVG(figure)
    axes: Any = figure.add_subplot()
    for index, (run, curves) in enumerate(runs.items()):
        label, color = run if len(runs) > 1 else "", f"C{index}"
        if points := thin(curves.get(name, ())):
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.2, label=label or "training")
        if name == "loss" and (points := thin(curves.get("evaluation_loss", ()))):
            color = color if len(runs) > 1 else "C1"
            label = f"{label} evaluation".strip()
            axes.plot(*zip(*points, strict=True), "o--", color=color, linewidth=1, markersize=3, label=label)
    axes.set(xlabel="step", ylabel=_UNITS.get(name, ""), title=name.replace("_", " "))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if len(runs) > 1 or name == "loss":
        axes.legend(fontsize="small")
    return _svg(figure)


def thin(points: Sequence[Point]) -> list[Point]:
    """Return at most `MOST_POINTS` points: the means of as many neighbours as that takes, at their last step."""
    width = -(-len(points) // MOST_POINTS) or 1
    groups = (points[begin : begin + width] for begin in range(0, len(points), width))
    return [(group[-1][0], fmean(value for _, value in group)) for group in groups]


def _svg(figure: Any) -> str:
    text = io.StringIO()
    # Neither a date nor an id drawn at random: the same run gives the same file.
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "hp-train", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("<svg")[2].join(["<svg", ""])
