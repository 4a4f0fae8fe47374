"""The loss curve of a run as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hp_trainer.metrics.jsonl import read_metrics
from hp_trainer.metrics.tracker import Tracker


class LossCurveTracker(Tracker):
    """Draws the curve from the metrics file when the run ends, those before a resume included.

    Args:
        metrics: the file of `JsonLinesTracker`.
        picture: PNG file to write.
    """

    def __init__(self, metrics: Path, picture: Path) -> None:
        self._metrics = metrics
        self._picture = picture

    def finish(self) -> None:
        draw_loss_curve(list(read_metrics(self._metrics)), self._picture)


def draw_loss_curve(events: list[dict[str, Any]], picture: Path) -> None:
    """Write the PNG of training and evaluation loss over steps; nothing where there is no finite loss."""
    train = _points(events, "step")
    evaluation = _points(events, "evaluation")
    if not train:
        return
    # Figure and canvas by hand: pyplot would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*train, strict=True), label="training", linewidth=1)
    if evaluation:
        axes.plot(*zip(*evaluation, strict=True), label="evaluation", marker="o")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = picture.with_name(f"{picture.name}.incomplete")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(picture)


def _points(events: list[dict[str, Any]], kind: str) -> list[tuple[int, float]]:
    pairs = [(event["step"], event["loss"]) for event in events if event.get("event") == kind]
    return [(step, loss) for step, loss in pairs if isinstance(loss, (int, float)) and math.isfinite(loss)]
