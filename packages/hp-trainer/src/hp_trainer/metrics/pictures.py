"""Pictures of a run, drawn without a display: its loss curve, and the load of every expert over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy

from hp_trainer._files import replacing
from hp_trainer.metrics.tracker import EXPERT_LOAD, Tracker, read_metrics


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure; width and height are in inches."""
    # Not pyplot, which would choose a backend for the process. `savefig` selects the canvas by the format.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write_picture(figure: Any, picture: Path) -> None:
    """Write a figure as PNG, replacing the file atomically."""
    with replacing(picture) as out:
        figure.savefig(out, format="png", dpi=120)


Point = tuple[int, float]  # step, loss


class PictureTracker(Tracker):
    """Draws a picture from the metrics file when the run ends, including the steps before a resume.

    Args:
        metrics: the file of `JsonLinesTracker`.
        picture: PNG file to write.
        draw: `draw_loss_curve` or `draw_expert_loads`.
    """

    def __init__(self, metrics: Path, picture: Path, draw: Callable[[list[dict[str, Any]], Path], None]) -> None:
        self._metrics, self._picture, self._draw = metrics, picture, draw

    def finish(self) -> None:
        self._draw(list(read_metrics(self._metrics)), self._picture)


def draw_loss_curve(events: list[dict[str, Any]], picture: Path) -> None:
    """Write training and evaluation loss over the steps as PNG; nothing if there is no finite loss.

    The training loss is drawn twice: faintly per step, and as a running mean.
    """
    train = _points(events, "step")
    if not train:
        return
    figure = new_figure(8, 4.5)
    draw_losses(figure.add_subplot(), train, _points(events, "evaluation"))
    figure.suptitle(_title(events), fontsize="medium")
    write_picture(figure, picture)


def _points(events: list[dict[str, Any]], kind: str) -> list[Point]:
    pairs = [(event["step"], event.get("loss")) for event in events if event.get("event") == kind]
    return [(step, loss) for step, loss in pairs if isinstance(loss, (int, float)) and math.isfinite(loss)]


def draw_losses(axes: Any, train: list[Point], evaluation: list[Point]) -> None:
    """Draw both curves into the axes of a figure."""
    axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=0.8, alpha=0.35)
    # A thirtieth of the run smooths the noise of single batches and keeps the shape.
    window = max(1, len(train) // 30)
    smooth = running_means(train, window)
    label = "training" if window == 1 else f"training, mean over {window} steps"
    axes.plot(*zip(*smooth, strict=True), color="tab:blue", linewidth=1.8, label=label)
    if evaluation:
        # The last value is in the legend, where it cannot cover a curve.
        label = f"evaluation, last {evaluation[-1][1]:.3f}"
        axes.plot(*zip(*evaluation, strict=True), "o--", color="tab:orange", linewidth=1, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    # Steps are integers, so their ticks are too.
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()


def running_means(points: list[Point], window: int) -> list[Point]:
    """Return each point with the mean of the last `window` losses up to it (fewer at the start)."""
    losses = [loss for _, loss in points]
    ends = range(1, len(points) + 1)
    return [(points[end - 1][0], fmean(losses[max(0, end - window) : end])) for end in ends]


def _title(events: list[dict[str, Any]]) -> str:
    """Return the number of parameters, the ranks and the platform of the last start."""
    starts = [event for event in events if event.get("event") == "start"]
    if not starts:
        return ""
    start = starts[-1]
    ranks = "1 rank" if start["world_size"] == 1 else f"{start['world_size']} ranks"
    return f"{start['num_parameters'] / 1e6:.2f} million parameters, {ranks} on {start['platform']}"


# Most columns of the heatmap; a longer run averages neighbouring steps.
_COLUMNS = 400


def draw_expert_loads(events: list[dict[str, Any]], picture: Path) -> None:
    """Write the heatmap of expert loads as PNG: a column per step, a row per expert, layer by layer; nothing without
    experts.

    Colours are loads relative to the layer's mean load: 1 is balanced, 0 is an expert without tokens.
    """
    steps, loads = loads_of(events)
    if not loads:
        return
    rows = sum(len(layer) for layer in loads.values())
    figure = new_figure(9, min(2 + 0.12 * rows, 30))
    draw_loads(figure, steps, loads)
    write_picture(figure, picture)


def loads_of(events: list[dict[str, Any]]) -> tuple[list[int], dict[str, numpy.ndarray]]:
    """Return the steps, and for each layer the loads relative to its mean: float64 `[experts, steps]`."""
    taken = [event for event in events if event.get("event") == "step" and _loads(event)]
    names: dict[str, int] = {}
    for event in taken:
        for key in _loads(event):
            layer, _, expert = key.removeprefix(EXPERT_LOAD).rpartition("/")
            names[layer] = max(names.get(layer, 0), int(expert) + 1)
    # NaN is drawn empty: not every step has every layer.
    loads = {layer: numpy.full((experts, len(taken)), numpy.nan) for layer, experts in names.items()}
    for column, event in enumerate(taken):
        for key, value in _loads(event).items():
            layer, _, expert = key.removeprefix(EXPERT_LOAD).rpartition("/")
            loads[layer][int(expert), column] = value
    return [event["step"] for event in taken], loads


def draw_loads(figure: Any, steps: list[int], loads: dict[str, numpy.ndarray]) -> None:
    """Draw the heatmap of all layers into `figure`."""
    # More columns than pixels would be sampled, and peaks of single steps could vanish.
    columns = numpy.array_split(numpy.arange(len(steps)), min(len(steps), _COLUMNS))
    table = numpy.concatenate(list(loads.values()))
    means = numpy.stack([table[:, each].mean(1) for each in columns], 1)
    axes = figure.add_subplot()
    extent = (steps[0] - 0.5, steps[-1] + 0.5, len(table) - 0.5, -0.5)
    image = axes.imshow(means, aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=0, vmax=2, extent=extent)
    ends = numpy.cumsum([len(layer) for layer in loads.values()])
    for end in ends[:-1]:
        axes.axhline(end - 0.5, color="black", linewidth=0.6)
    axes.set_yticks([end - len(layer) / 2 - 0.5 for end, layer in zip(ends, loads.values(), strict=True)], [*loads])
    axes.set(xlabel="step", ylabel="layer", title="load of each expert over the mean of its layer")
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, extend="max")


def _loads(event: dict[str, Any]) -> dict[str, float]:
    metrics: dict[str, float] = event.get("metrics") or {}
    named = (key for key in metrics if key.startswith(EXPERT_LOAD) and key.rpartition("/")[2].isdecimal())
    return {key: metrics[key] for key in named}
