"""Simulated execution of a schedule: when each action runs, who idles, how many activations live.

Checks of a schedule, before any rank runs it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from hp_trainer.exceptions import ScheduleError
from hp_trainer.pipeline.actions import Action, Kind, Schedule, alternatives


@dataclass(frozen=True, kw_only=True)
class ActionSeconds:
    """Time of each kind of action on one stage and micro-batch, in seconds (or any other unit).

    Attributes:
        forward: of `F`.
        input_grad: of `I`.
        weight_grad: of `W`; `B` takes the sum of both.
        transfer: between the end of an action and the beginning of what needs its result on another rank.

    Raises:
        ScheduleError: a time is negative or no finite number, or all actions take none.

    Example:
        >>> from hp_trainer.pipeline import Kind
        >>> ActionSeconds(input_grad=2.0).of(Kind.BACKWARD)
        3.0
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    transfer: float = 0.0

    def __post_init__(self) -> None:
        times = asdict(self)
        # Not `time < 0`: that holds for no NaN.
        wrong = [f"{name}={time}" for name, time in times.items() if not 0 <= time < math.inf]
        if wrong or not self.forward + self.input_grad + self.weight_grad:
            got = ", ".join(wrong) or "forward, input_grad and weight_grad of 0"
            raise ScheduleError(f"times of actions: expected finite numbers of at least 0, one above 0, got {got}")

    def of(self, kind: Kind) -> float:
        """Return the time of an action of `kind`."""
        return {
            Kind.FORWARD: self.forward,
            Kind.INPUT_GRAD: self.input_grad,
            Kind.WEIGHT_GRAD: self.weight_grad,
            Kind.BACKWARD: self.input_grad + self.weight_grad,
        }[kind]


@dataclass(frozen=True)
class Timeline:
    """When each action of a schedule runs.

    Attributes:
        spans: begin and end of each action.

    Example:
        >>> timeline = simulate(build_schedule("gpipe", num_ranks=2, num_microbatches=4))
        >>> timeline.end, timeline.idle, timeline.peak_activations
        (15.0, (3.0, 3.0), (4, 4))
    """

    schedule: Schedule
    spans: Mapping[Action, tuple[float, float]]

    @cached_property
    def end(self) -> float:
        """The time at which the last rank is through; the optimizer's step waits for it."""
        return max((end for _, end in self.spans.values()), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank works."""
        return tuple(sum(self.spans[a][1] - self.spans[a][0] for a in each) for each in self.schedule.actions)

    @property
    def idle(self) -> tuple[float, ...]:
        """The time that each rank waits between the step's begin and the end of its last action on any rank."""
        return tuple(self.end - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The largest idle time of a rank, over the time that it works."""
        return max((idle / busy for idle, busy in zip(self.idle, self.busy, strict=True) if busy), default=0.0)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """The largest number of (stage, micro-batch) pairs whose activations each rank keeps at once.

        Activations live from the beginning of `F` to the end of `B`, or of `W` where the backward is split.
        """
        return tuple(_peak(actions) for actions in self.schedule.actions)


def _peak(actions: tuple[Action, ...]) -> int:
    live = peak = 0
    for action in actions:
        live += action.kind is Kind.FORWARD
        peak = max(peak, live)
        live -= action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)
    return peak


def simulate(schedule: Schedule, seconds: ActionSeconds | None = None) -> Timeline:
    """Run a schedule on paper: each rank takes its actions in order, each as soon as what it needs is there.

    Sends do not block and a receive waits for its message, as the interpreter does it; so the simulation ends if and
    only if the execution does.

    Args:
        seconds: how long actions take; one unit each by default.

    Raises:
        ScheduleError: ranks wait for each other for ever; the message names each rank's next action. Or the times make
            a step that no number tells.

    Example:
        >>> from hp_trainer.pipeline import build_schedule, simulate
        >>> timeline = simulate(build_schedule("1f1b", num_ranks=4, num_microbatches=8))
        >>> timeline.bubble  # (ranks - 1) / microbatches
        0.375
    """
    seconds = seconds or ActionSeconds()
    spans: dict[Action, tuple[float, float]] = {}
    free = [0.0] * schedule.num_ranks
    positions = [0] * schedule.num_ranks
    progress = True
    # Each pass takes every rank as far as it comes; one that moves none is the end, or a schedule that hangs. The order
    # of ranks changes no time, which depends on what an action needs alone.
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.actions):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                ready = _ready(action, schedule, spans, seconds.transfer)
                if ready is None:
                    break
                begin = max(ready, free[rank])
                free[rank] = begin + seconds.of(action.kind)
                spans[action] = begin, free[rank]
                positions[rank] += 1
                progress = True
    stuck = [
        f"rank {rank} waits to begin {actions[position]}"
        for rank, (actions, position) in enumerate(zip(schedule.actions, positions, strict=True))
        if position < len(actions)
    ]
    if stuck:
        raise ScheduleError(f"the schedule would hang: {'; '.join(stuck)}")
    if not all(map(math.isfinite, free)):
        raise ScheduleError(f"{seconds}: expected times whose sum over a step is a finite number")
    return Timeline(schedule, spans)


def _ready(
    action: Action, schedule: Schedule, spans: Mapping[Action, tuple[float, float]], transfer: float
) -> float | None:
    """Return when all that `action` needs is on its rank, or None if some of it has not been simulated yet."""
    rank, time = schedule.rank_of_stage[action.stage], 0.0
    for forms in alternatives(action, schedule.num_stages):
        source = next((each for each in forms if each in spans), None)
        if source is None:
            return None
        travels = schedule.rank_of_stage[source.stage] != rank
        time = max(time, spans[source][1] + (transfer if travels else 0.0))
    return time


_WHOLE = frozenset({Kind.FORWARD, Kind.BACKWARD})
_SPLIT = frozenset({Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
_MOST_MISSING = 1000


def validate(schedule: Schedule) -> None:
    """Check that every micro-batch goes through every stage once, forward and backward, and that no rank hangs.

    Raises:
        ScheduleError: with every problem found, each naming stage, micro-batch and rank.

    Example:
        >>> from hp_trainer.pipeline import Schedule, validate
        >>> validate(Schedule.parse("rank 0: 0F0 0B0"))
    """
    problems = [*_owner_problems(schedule)] or [*_placement_problems(schedule), *_work_problems(schedule)]
    if problems:
        raise ScheduleError("; ".join(problems))
    simulate(schedule)


def check_whole_backwards(schedule: Schedule) -> None:
    """Check that a schedule splits no backward, as weights need that are gathered for each use alone.

    Raises:
        ScheduleError: with the first action that is one part of a backward.
    """
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD):
                raise ScheduleError(
                    f"the schedule splits backwards (rank {rank} does {action}), and the weights' part comes when "
                    "weights that are gathered for each use are gone: expected a schedule of whole backwards, such as "
                    "1f1b, or weights gathered once in a step"
                )


def _owner_problems(schedule: Schedule) -> Iterator[str]:
    if not schedule.num_stages or schedule.num_microbatches < 1:
        yield f"expected stages and micro-batches, got {schedule.num_stages} and {schedule.num_microbatches}"
    count = sum(map(len, schedule.actions))
    # More than can be told one by one, or counted: a mistyped number of a micro-batch is that of the step.
    if (needed := 2 * schedule.num_stages * schedule.num_microbatches) > count + _MOST_MISSING:
        yield (
            f"{schedule.num_stages} stages and {schedule.num_microbatches} micro-batches need "
            f"at least {needed} actions, got {count}"
        )
    for stage, owner in enumerate(schedule.rank_of_stage):
        if not 0 <= owner < schedule.num_ranks:
            yield f"stage {stage} is on rank {owner}, but there are actions of {schedule.num_ranks} ranks"


def _placement_problems(schedule: Schedule) -> Iterator[str]:
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
    done: dict[tuple[int, int], set[Kind]] = {}
    places = [{action: place for place, action in enumerate(actions)} for actions in schedule.actions]
    for action in (action for actions in schedule.actions for action in actions):
        done.setdefault((action.stage, action.microbatch), set()).add(action.kind)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            kinds = frozenset(done.get((stage, microbatch), ()))
            if kinds not in (_WHOLE, _SPLIT):
                yield (
                    f"stage {stage}, micro-batch {microbatch}: expected F and B, or F, I and W, got "
                    f"{' '.join(sorted(kind.value for kind in kinds)) or 'nothing'}"
                )
            yield from _order_problems(places[schedule.rank_of_stage[stage]], stage, microbatch, kinds)


def _order_problems(places: Mapping[Action, int], stage: int, microbatch: int, kinds: frozenset[Kind]) -> Iterator[str]:
    order = [Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD] if kinds == _SPLIT else [Kind.FORWARD, Kind.BACKWARD]
    actions = [Action(stage, kind, microbatch) for kind in order if kind in kinds]
    found = [places[action] for action in actions if action in places]
    if found != sorted(found):
        yield f"stage {stage}, micro-batch {microbatch}: expected the order {' '.join(kind.value for kind in order)}"
