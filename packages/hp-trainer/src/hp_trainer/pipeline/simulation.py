"""Simulation and validation of schedules without ranks: times, idle time, memory, deadlocks; and their timelines."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hp_trainer._files import replacing
from hp_trainer.exceptions import ScheduleError
from hp_trainer.pipeline.actions import Action, Kind, Schedule


@dataclass(frozen=True, kw_only=True)
class ActionSeconds:
    """Duration of each kind of action of one stage and micro-batch, in seconds or any other unit.

    Attributes:
        forward: duration of `F`.
        input_grad: duration of `I`.
        weight_grad: duration of `W`; `B` takes the sum of `I` and `W`.
        transfer: delay before another rank can use the result of an action.

    Raises:
        ScheduleError: a duration is negative or not finite, or all actions take no time.

    Examples:
        >>> from hp_trainer.pipeline import build_schedule, simulate
        >>> schedule = build_schedule("1f1b", num_ranks=1, num_microbatches=2)
        >>> simulate(schedule, ActionSeconds(input_grad=2.0)).end
        8.0
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    transfer: float = 0.0

    def __post_init__(self) -> None:
        times = asdict(self)
        # Written as `not 0 <= time`, which also rejects NaN.
        wrong = [f"{name}={time}" for name, time in times.items() if not 0 <= time < math.inf]
        if wrong or not self.forward + self.input_grad + self.weight_grad:
            got = ", ".join(wrong) or "forward, input_grad and weight_grad of 0"
            raise ScheduleError(f"times of actions: expected finite numbers of at least 0, one above 0, got {got}")

    @property
    def by_kind(self) -> dict[Kind, float]:
        """The duration of an action of each kind."""
        return {
            Kind.FORWARD: self.forward,
            Kind.INPUT_GRAD: self.input_grad,
            Kind.WEIGHT_GRAD: self.weight_grad,
            Kind.BACKWARD: self.input_grad + self.weight_grad,
        }


@dataclass(frozen=True)
class Timeline:
    """The simulated execution of a schedule.

    Attributes:
        spans: start and end of each action.

    Examples:
        >>> timeline = simulate(build_schedule("gpipe", num_ranks=2, num_microbatches=4))
        >>> timeline.end, timeline.idle, timeline.peak_activations
        (15.0, (3.0, 3.0), (4, 4))
    """

    schedule: Schedule
    spans: Mapping[Action, tuple[float, float]]

    @functools.cached_property
    def end(self) -> float:
        """The time at which the last rank finishes."""
        return max((end for _, end in self.spans.values()), default=0.0)

    @functools.cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(sum(self.spans[a][1] - self.spans[a][0] for a in each) for each in self.schedule.actions)

    @property
    def idle(self) -> tuple[float, ...]:
        """The time that each rank idles between the start and the end of the step."""
        return tuple(self.end - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The largest ratio of a rank's idle time to its busy time."""
        return max((idle / busy for idle, busy in zip(self.idle, self.busy, strict=True) if busy), default=0.0)

    @functools.cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """The largest number of (stage, micro-batch) pairs whose activations each rank holds at once.

        Activations are held from the start of `F` to the end of `B`, or of `W` if the backward is split.
        """
        peaks = []
        for actions in self.schedule.actions:
            live = peak = 0
            # Only the order of a rank's actions matters, not their times.
            for action in actions:
                live += action.kind is Kind.FORWARD
                peak = max(peak, live)
                live -= action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)
            peaks.append(peak)
        return tuple(peaks)


def simulate(schedule: Schedule, seconds: ActionSeconds | None = None) -> Timeline:
    """Simulate a schedule: each rank executes its actions in order, each as soon as its dependencies are finished.

    Sends do not block and receives wait for their message, as in `Pipeline`. The simulation therefore finishes if and
    only if the execution does.

    Args:
        seconds: durations of actions; one unit each by default.

    Raises:
        ScheduleError: the schedule deadlocks; the message names the next action of each blocked rank. Or the durations
            overflow.

    Examples:
        >>> from hp_trainer.pipeline import build_schedule, simulate
        >>> timeline = simulate(build_schedule("1f1b", num_ranks=4, num_microbatches=8))
        >>> timeline.bubble  # (ranks - 1) / microbatches
        0.375
    """
    flow = flow_of(schedule)
    spans = zip(*flow.times(seconds or ActionSeconds()), strict=True)
    return Timeline(schedule, dict(zip(flow.order, spans, strict=True)))


@dataclass(frozen=True)
class Flow:
    """The actions of a schedule in an order in which they can run, and what each one waits for.

    Actions are stated by their index in `order`, because a schedule of many ranks has a hundred thousand of them.

    Attributes:
        order: every action after all that it waits for.
        of_rank: the actions of each rank, in the order of execution.
        needs: for each action, the pairs (index, is_remote) of those that must end before it starts: for `F` the `F` of
            the previous stage, for `B` and `I` their own `F` and the `B` or `I` of the next stage, for `W` its `I`; and
            the previous action of its rank. `is_remote` is 1 if they are on another rank, else 0.
    """

    order: list[Action]
    of_rank: list[list[int]]
    needs: list[list[tuple[int, int]]]

    def times(self, seconds: ActionSeconds) -> tuple[list[float], list[float]]:
        """Return the start and the end of each action."""
        durations = seconds.by_kind
        starts: list[float] = []
        ends: list[float] = []
        for action, needed in zip(self.order, self.needs, strict=True):
            start = 0.0
            for index, is_remote in needed:
                ready = ends[index] + is_remote * seconds.transfer
                if ready > start:
                    start = ready
            starts.append(start)
            ends.append(start + durations[action.kind])
        if not all(map(math.isfinite, ends)):
            raise ScheduleError(f"{seconds}: expected times whose sum over a step is a finite number")
        return starts, ends


# Cached: the flow does not depend on times, and the same schedule is simulated with many.
@functools.lru_cache(maxsize=32)
def flow_of(schedule: Schedule) -> Flow:
    """Return the flow of a schedule."""
    owners, width = schedule.rank_of_stage, schedule.num_microbatches
    # Whether the previous stage is on another rank.
    is_remote = [int(before != owner) for before, owner in zip((None, *owners), owners, strict=False)]
    order: list[Action] = []
    of_rank: list[list[int]] = [[] for _ in schedule.actions]
    needs: list[list[tuple[int, int]]] = []
    # Indices of each `F`, and of each `B` or `I`, by stage times `width` plus micro-batch; numbers are hashed quickly.
    forwards: dict[int, int] = {}
    gradients: dict[int, int] = {}
    progress = True
    # Each pass advances every rank as far as possible. A pass without progress is the end, or a deadlock.
    while progress:
        progress = False
        for actions, own in zip(schedule.actions, of_rank, strict=True):
            for action in actions[len(own) :]:
                stage, kind, key = action.stage, action.kind, action.stage * width + action.microbatch
                if kind is Kind.FORWARD:
                    needed = [(forwards.get(key - width, -1), is_remote[stage])] if stage else []
                elif kind is Kind.WEIGHT_GRAD:
                    needed = [(gradients.get(key, -1), 0)]
                else:
                    needed = [(forwards.get(key, -1), 0)]
                    if stage + 1 < len(owners):
                        needed.append((gradients.get(key + width, -1), is_remote[stage + 1]))
                # One of them has not run yet.
                if needed and (needed[0][0] < 0 or needed[-1][0] < 0):
                    break
                if own:
                    needed.append((own[-1], 0))
                if kind is not Kind.WEIGHT_GRAD:
                    (forwards if kind is Kind.FORWARD else gradients)[key] = len(order)
                own.append(len(order))
                order.append(action)
                needs.append(needed)
                progress = True
    stuck = [
        f"rank {rank} waits to start {actions[len(own)]}"
        for rank, (actions, own) in enumerate(zip(schedule.actions, of_rank, strict=True))
        if len(own) < len(actions)
    ]
    if stuck:
        raise ScheduleError(f"the schedule deadlocks: {'; '.join(stuck)}")
    return Flow(order, of_rank, needs)


_UNSPLIT = frozenset({Kind.FORWARD, Kind.BACKWARD})
_SPLIT = frozenset({Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
# Number of missing actions from which on the schedule is rejected without listing them.
_MAX_MISSING = 1000


def validate(schedule: Schedule) -> None:
    """Check that every micro-batch runs forward and backward once on every stage, and that the schedule terminates.

    Raises:
        ScheduleError: the schedule is invalid; the message lists all problems with stage, micro-batch and rank.

    Examples:
        >>> from hp_trainer.pipeline import Schedule, validate
        >>> validate(Schedule.parse("rank 0: 0F0 0B0"))
    """
    # The other checks index by stage and rank, so they run only if these are valid.
    problems = [*_owner_problems(schedule)] or [*_placement_problems(schedule), *_work_problems(schedule)]
    if problems:
        raise ScheduleError("; ".join(problems))
    flow_of(schedule)


def check_unsplit_backwards(schedule: Schedule) -> None:
    """Check that a schedule splits no backward."""
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD):
                raise ScheduleError(
                    f"the schedule splits backwards (rank {rank} does {action}), and weights gathered for each use "
                    "are resharded before their gradients are computed: expected a schedule of unsplit backwards, "
                    "such as 1f1b, or weights gathered once in a step"
                )


def _owner_problems(schedule: Schedule) -> Iterator[str]:
    """Yield problems of the numbers of stages and micro-batches and of the ranks of stages."""
    if not schedule.num_stages or schedule.num_microbatches < 1:
        yield f"expected stages and micro-batches, got {schedule.num_stages} and {schedule.num_microbatches}"
    count = sum(map(len, schedule.actions))
    # Checked first: a mistyped micro-batch number becomes the number of micro-batches, and millions of missing actions
    # could neither be looked for nor listed.
    if (needed := 2 * schedule.num_stages * schedule.num_microbatches) > count + _MAX_MISSING:
        yield (
            f"{schedule.num_stages} stages and {schedule.num_microbatches} micro-batches need "
            f"at least {needed} actions, got {count}"
        )
    for stage, owner in enumerate(schedule.rank_of_stage):
        if not 0 <= owner < schedule.num_ranks:
            yield f"stage {stage} is on rank {owner}, but there are actions of {schedule.num_ranks} ranks"


def _placement_problems(schedule: Schedule) -> Iterator[str]:
    """Yield actions that are duplicated, on the wrong rank, or of unknown stages or micro-batches."""
    for rank, actions in enumerate(schedule.actions):
        for action, count in Counter(actions).items():
            if count > 1:
                yield f"rank {rank} does {action} {count} times"
            owner = schedule.rank_of_stage[action.stage] if 0 <= action.stage < schedule.num_stages else None
            if owner is None:
                yield f"rank {rank} does {action}, but there are {schedule.num_stages} stages"
            elif owner != rank:
                yield f"rank {rank} does {action}, but stage {action.stage} is on rank {owner}"
            if not 0 <= action.microbatch < schedule.num_microbatches:
                yield f"rank {rank} does {action}, but there are {schedule.num_microbatches} micro-batches"


def _work_problems(schedule: Schedule) -> Iterator[str]:
    """Yield the stages and micro-batches whose actions are incomplete, or in a wrong order."""
    # Positions in the order of the rank.
    done: dict[tuple[int, int], dict[Kind, int]] = {}
    for actions in schedule.actions:
        for position, action in enumerate(actions):
            done.setdefault((action.stage, action.microbatch), {})[action.kind] = position
    for stage, microbatch in itertools.product(range(schedule.num_stages), range(schedule.num_microbatches)):
        found = done.get((stage, microbatch), {})
        where = f"stage {stage}, micro-batch {microbatch}"
        if found.keys() not in (_UNSPLIT, _SPLIT):
            got = " ".join(sorted(kind.value for kind in found)) or "nothing"
            yield f"{where}: expected F and B, or F, I and W, got {got}"
        order = (Kind.FORWARD, *((Kind.INPUT_GRAD, Kind.WEIGHT_GRAD) if found.keys() == _SPLIT else (Kind.BACKWARD,)))
        positions = [found[kind] for kind in order if kind in found]
        if positions != sorted(positions):
            yield f"{where}: expected the order {' '.join(kind.value for kind in order)}"


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
        figure.savefig(out, format=suffix, dpi=120)


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
