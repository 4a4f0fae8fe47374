"""Picture of a plan's memory: a bar for each place in the pipeline, stacked by what holds it."""

from __future__ import annotations

from pathlib import Path

from hp_trainer.metrics.picture import new_figure, write_picture
from hp_trainer.planning.plan import StepPlan


def draw_memory(plan: StepPlan, device_memory: float, picture: str | Path) -> None:
    """Write the memory of each place in the pipeline as a PNG, with the device's memory as a line."""
    figure = new_figure(max(5.0, 2.5 + 0.5 * len(plan.memory)), 5.0)
    axes = figure.subplots()
    below = [0.0] * len(plan.memory)
    places = range(len(plan.memory))
    for name in plan.memory[0].parts():
        sizes = [each.parts()[name] / 2**30 for each in plan.memory]
        if any(sizes):
            axes.bar(places, sizes, bottom=below, label=name, width=0.6)
            below = [a + b for a, b in zip(below, sizes, strict=True)]
    axes.axhline(device_memory / 2**30, color="black", linestyle="--", label="device memory")
    axes.set_xticks(list(places), [str(place) if len(plan.memory) > 1 else "every rank" for place in places])
    axes.set_xlabel("place in the pipeline" if len(plan.memory) > 1 else "")
    axes.set_ylabel("GiB at the fullest moment")
    figure.legend(loc="outside right upper")
    write_picture(figure, Path(picture))
