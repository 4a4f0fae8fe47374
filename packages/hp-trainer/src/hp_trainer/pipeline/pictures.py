"""Timelines of schedules as text and as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hp_trainer._files import replacing
from hp_trainer.exceptions import ScheduleError
from hp_trainer.pipeline.actions import Action, Kind
from hp_trainer.pipeline.simulation import Timeline

MAX_TEXT_COLUMNS = 400
_COLOURS = {Kind.FORWARD: "#6aa5e3", Kind.BACKWARD: "#63b17a", Kind.INPUT_GRAD: "#8fd0a5", Kind.WEIGHT_GRAD: "#e8c15c"}
_LABELS = {
    Kind.FORWARD: "F: forward",
    Kind.BACKWARD: "B: backward",
    Kind.INPUT_GRAD: "I: input gradient",
    Kind.WEIGHT_GRAD: "W: weight gradient",
}


def describe_timeline(timeline: Timeline) -> str:
    """Return a timeline as text: a row for each rank and a column for each unit of time, then the idle times.

    An action is written at its start, as stage, kind and micro-batch; `=` marks that it continues and `.` that the rank
    idles. The rows are left out if times are not integers or rows would be too long.

    Examples:
        >>> from hp_trainer.pipeline import build_schedule, describe_timeline, simulate
        >>> print(describe_timeline(simulate(build_schedule("1f1b", num_ranks=2, num_microbatches=2))))
        rank 0: 0F0 0F1  .   .  0B0  =   .  0B1  =
        rank 1:  .  1F0 1B0  =  1F1 1B1  =   .   .
        rank 0: idle 3 of 9, at most 2 activations held
        rank 1: idle 3 of 9, at most 1 activation held
        bubble: 50.0% (largest ratio of idle to busy time)
    """
    lines = [*_rows(timeline)]
    for rank, (idle, peak) in enumerate(zip(timeline.idle, timeline.peak_activations, strict=True)):
        activations = f"{peak} activation{'s' if peak != 1 else ''}"
        lines.append(f"rank {rank}: idle {idle:g} of {timeline.end:g}, at most {activations} held")
    lines.append(f"bubble: {timeline.bubble:.1%} (largest ratio of idle to busy time)")
    return "\n".join(lines)


def _rows(timeline: Timeline) -> list[str]:
    """Return one line of text per rank; none if times are not integers or lines would be too long."""
    times = {time for span in timeline.spans.values() for time in span}
    width = max((len(str(action)) for action in timeline.spans), default=0)
    if any(not float(time).is_integer() for time in times) or timeline.end * (width + 1) > MAX_TEXT_COLUMNS:
        return []
    rows = []
    for rank, actions in enumerate(timeline.schedule.actions):
        cells = ["."] * int(timeline.end)
        for action in actions:
            begin, end = (int(time) for time in timeline.spans[action])
            # An action without duration replaces no cell.
            cells[begin:end] = [str(action), *["="] * (end - begin - 1)][: end - begin]
        rows.append(f"rank {rank}: {' '.join(cell.center(width) for cell in cells)}".rstrip())
    return rows


def draw_timeline(timeline: Timeline, picture: Path | str) -> None:
    """Draw a timeline to a file, whose suffix selects the format (`.png`, `.svg`, `.pdf`).

    Actions of later stages of a rank are drawn darker.

    Raises:
        ScheduleError: matplotlib does not support the format.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from hp_trainer.pipeline import build_schedule, draw_timeline, simulate
        >>> timeline = simulate(build_schedule("zero_bubble_v", num_ranks=2, num_microbatches=4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_timeline(timeline, Path(folder) / "schedule.png")
    """
    # Not pyplot, which would select a backend for the whole process.
    from matplotlib.figure import Figure

    schedule = timeline.schedule
    figure = Figure(figsize=(14, 1.2 + 0.55 * schedule.num_ranks), layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    suffix = Path(picture).suffix.removeprefix(".")
    if suffix not in formats:
        raise ScheduleError(f"picture {picture}: expected a name that ends in one of .{', .'.join(sorted(formats))}")
    axes = figure.add_subplot()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            # Micro-batch numbers are legible only in small schedules.
            _draw_action(axes, timeline, rank, action, show_text=len(timeline.spans) <= 600)
    # Inverted, so that rank 0 is at the top.
    axes.set(xlim=(0, timeline.end or 1), ylim=(schedule.num_ranks - 0.5, -0.5), xlabel="time")
    axes.set_yticks(range(schedule.num_ranks), [f"rank {rank}" for rank in range(schedule.num_ranks)])
    _add_legend(axes, timeline)
    axes.set_title(
        f"bubble {timeline.bubble:.1%}, activations held per rank: {', '.join(map(str, timeline.peak_activations))}",
        fontsize="medium",
        loc="right",
    )
    with replacing(Path(picture)) as out:
        figure.savefig(out, format=Path(picture).suffix.removeprefix(".") or "png", dpi=120)


def _draw_action(axes: Any, timeline: Timeline, rank: int, action: Action, *, show_text: bool) -> None:
    begin, end = timeline.spans[action]
    mine = [stage for stage, owner in enumerate(timeline.schedule.rank_of_stage) if owner == rank]
    alpha = 0.55 + 0.45 * (mine.index(action.stage) + 1) / len(mine)
    axes.broken_barh(
        [(begin, end - begin)], (rank - 0.4, 0.8), facecolors=_COLOURS[action.kind], edgecolor="white", alpha=alpha
    )
    if show_text:
        axes.text((begin + end) / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=7)


def _add_legend(axes: Any, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    kinds = [kind for kind in _COLOURS if any(action.kind is kind for action in timeline.spans)]
    handles = [Patch(color=_COLOURS[kind], label=_LABELS[kind]) for kind in kinds]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=max(1, len(handles)), frameon=False)
