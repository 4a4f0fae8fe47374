"""The load of every expert over a run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

from hp_trainer.metrics.jsonl import read_metrics
from hp_trainer.metrics.picture import new_figure, write_picture
from hp_trainer.metrics.scalars import EXPERT_LOAD
from hp_trainer.metrics.tracker import Tracker

# Steps beside each other in the picture at most; more are averaged.
_COLUMNS = 400


class ExpertLoadsTracker(Tracker):
    """Draws the heatmap from the metrics file when the run ends, the steps before a resume included.

    Args:
        metrics: the file of `JsonLinesTracker`.
        picture: PNG file to write; none is written for a model without experts.
    """

    def __init__(self, metrics: Path, picture: Path) -> None:
        self._metrics = metrics
        self._picture = picture

    def finish(self) -> None:
        draw_expert_loads(list(read_metrics(self._metrics)), self._picture)


def draw_expert_loads(events: list[dict[str, Any]], picture: Path) -> None:
    """Write the PNG: steps from left to right, the experts of one layer after the other from top to bottom.

    Colours are loads over the mean load of the layer: 1 is even, 0 an expert without tokens.
    """
    steps, loads = loads_of(events)
    if not loads:
        return
    rows = sum(len(layer) for layer in loads.values())
    figure = new_figure(9, min(2 + 0.12 * rows, 30))
    draw(figure, steps, loads)
    write_picture(figure, picture)


def loads_of(events: list[dict[str, Any]]) -> tuple[list[int], dict[str, numpy.ndarray]]:
    """Return the steps, and by layer the loads of its experts over the mean one: float64 `[experts, steps]`."""
    taken = [event for event in events if event.get("event") == "step" and _loads(event)]
    names: dict[str, int] = {}
    for event in taken:
        for key in _loads(event):
            layer, _, expert = key.removeprefix(EXPERT_LOAD).rpartition("/")
            names[layer] = max(names.get(layer, 0), int(expert) + 1)
    loads = {layer: numpy.full((experts, len(taken)), numpy.nan) for layer, experts in names.items()}
    for column, event in enumerate(taken):
        for key, value in _loads(event).items():
            layer, _, expert = key.removeprefix(EXPERT_LOAD).rpartition("/")
            loads[layer][int(expert), column] = value
    return [event["step"] for event in taken], loads


def draw(figure: Any, steps: list[int], loads: dict[str, numpy.ndarray]) -> None:
    """Draw the heatmap of all layers into a figure."""
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
    axes.set(xlabel="step", title="load of each expert over the mean of its layer")
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, extend="max")


def _loads(event: dict[str, Any]) -> dict[str, float]:
    metrics: dict[str, float] = event.get("metrics") or {}
    return {key: value for key, value in metrics.items() if key.startswith(EXPERT_LOAD)}
