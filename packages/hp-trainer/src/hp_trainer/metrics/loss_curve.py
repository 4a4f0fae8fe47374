"""The loss curve of a run as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

from hp_trainer.metrics.jsonl import read_metrics
from hp_trainer.metrics.picture import new_figure, write_picture
from hp_trainer.metrics.tracker import Tracker

Point = tuple[int, float]  # step, loss


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
    """Write the PNG of training and evaluation loss over steps; nothing where there is no finite loss.

    The training loss is drawn as it is, faintly, and as its mean over the last steps.
    """
    train = _points(events, "step")
    if not train:
        return
    figure = new_figure(8, 4.5)
    draw(figure.add_subplot(), train, _points(events, "evaluation"))
    figure.suptitle(_title(events), fontsize="medium")
    write_picture(figure, picture)


def _points(events: list[dict[str, Any]], kind: str) -> list[Point]:
    pairs = [(event["step"], event["loss"]) for event in events if event.get("event") == kind]
    return [(step, loss) for step, loss in pairs if isinstance(loss, (int, float)) and math.isfinite(loss)]


def draw(axes: Any, train: list[Point], evaluation: list[Point]) -> None:
    """Draw both curves into the axes of a figure."""
    axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=0.8, alpha=0.35)
    window = max(1, len(train) // 30)
    smooth = running_means(train, window)
    label = "training" if window == 1 else f"training, mean over {window} steps"
    axes.plot(*zip(*smooth, strict=True), color="tab:blue", linewidth=1.8, label=label)
    if evaluation:
        # The last value stands in the legend, where it cannot lie upon a curve.
        label = f"evaluation, last {evaluation[-1][1]:.3f}"
        axes.plot(*zip(*evaluation, strict=True), "o--", color="tab:orange", linewidth=1, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    # There is no half step.
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()


def running_means(points: list[Point], window: int) -> list[Point]:
    """Return each point with the mean of the last `window` losses up to it, of fewer at the beginning."""
    losses = [loss for _, loss in points]
    ends = range(1, len(points) + 1)
    return [(points[end - 1][0], fmean(losses[max(0, end - window) : end])) for end in ends]


def _title(events: list[dict[str, Any]]) -> str:
    """Return the title: sizes, ranks and platform of the last start."""
    starts = [event for event in events if event.get("event") == "start"]
    if not starts:
        return ""
    start = starts[-1]
    ranks = "1 rank" if start["world_size"] == 1 else f"{start['world_size']} ranks"
    return f"{start['num_parameters'] / 1e6:.2f} million parameters, {ranks} on {start['platform']}"
