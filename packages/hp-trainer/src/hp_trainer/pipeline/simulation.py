"""Simulation and validation of schedules, without ranks: times, idle time, number of saved activations, deadlocks."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from hp_trainer.exceptions import ScheduleError
from hp_trainer.pipeline.actions import Action, Kind, Schedule, dependencies


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
        # Written as `not 0 <= time`, which also rejects NaN.
        wrong = [f"{name}={time}" for name, time in times.items() if not 0 <= time < math.inf]
        if wrong or not self.forward + self.input_grad + self.weight_grad:
            got = ", ".join(wrong) or "forward, input_grad and weight_grad of 0"
            raise ScheduleError(f"times of actions: expected finite numbers of at least 0, one above 0, got {got}")

    def of(self, kind: Kind) -> float:
        """Return the duration of an action of `kind`."""
        return {
            Kind.FORWARD: self.forward,
            Kind.INPUT_GRAD: self.input_grad,
            Kind.WEIGHT_GRAD: self.weight_grad,
            Kind.BACKWARD: self.input_grad + self.weight_grad,
        }[kind]


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
    seconds, flow = seconds or ActionSeconds(), flow_of(schedule)
    times = {kind: seconds.of(kind) for kind in _SPLIT | _UNSPLIT}
    spans, ends = {}, [0.0] * len(flow.order)
    for index, action in enumerate(flow.order):
        start = 0.0
        for needed, is_remote in flow.needs[index]:
            ready = ends[needed] + is_remote * seconds.transfer
            if ready > start:
                start = ready
        ends[index] = start + times[action.kind]
        spans[action] = start, ends[index]
    if not all(map(math.isfinite, ends)):
        raise ScheduleError(f"{seconds}: expected times whose sum over a step is a finite number")
    return Timeline(schedule, spans)


@dataclass(frozen=True)
class Flow:
    """The actions of a schedule in an order in which they can run, and what each one waits for.

    Actions are stated by their index in that order, because a schedule of many ranks has a hundred thousand of them.

    Attributes:
        order: every action after all that it waits for.
        needs: for each action, those that must end before it starts: its dependencies, which may be on another rank
            (1), and the previous action of its rank (0).
    """

    order: list[Action]
    needs: list[list[tuple[int, int]]]


# Cached: the flow does not depend on times, and the same schedule is simulated with many.
@functools.lru_cache(maxsize=32)
def flow_of(schedule: Schedule) -> Flow:
    """Return the flow of a schedule.

    Raises:
        ScheduleError: it deadlocks; the message names the next action of each blocked rank.
    """
    order: list[Action] = []
    needs: list[list[tuple[int, int]]] = []
    index: dict[Action, int] = {}
    last: list[int | None] = [None] * schedule.num_ranks
    positions = [0] * schedule.num_ranks
    progress = True
    # Each pass advances every rank as far as possible. A pass without progress is the end, or a deadlock.
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.actions):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                needed = _needed(action, schedule, index)
                if needed is None:
                    break
                if (previous := last[rank]) is not None:
                    needed.append((previous, 0))
                last[rank] = index[action] = len(order)
                order.append(action)
                needs.append(needed)
                positions[rank] += 1
                progress = True
    stuck = [
        f"rank {rank} waits to start {actions[position]}"
        for rank, (actions, position) in enumerate(zip(schedule.actions, positions, strict=True))
        if position < len(actions)
    ]
    if stuck:
        raise ScheduleError(f"the schedule deadlocks: {'; '.join(stuck)}")
    return Flow(order, needs)


def _needed(action: Action, schedule: Schedule, index: Mapping[Action, int]) -> list[tuple[int, int]] | None:
    """Return the dependencies of `action`, and whether each is on another rank; None if one has not run yet."""
    owners, found = schedule.rank_of_stage, []
    for forms in dependencies(action, schedule.num_stages):
        # Of the two forms of a backward, the schedule contains one.
        source = next((each for each in forms if each in index), None)
        if source is None:
            return None
        found.append((index[source], int(owners[source.stage] != owners[action.stage])))
    return found


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
    simulate(schedule)


def check_unsplit_backwards(schedule: Schedule) -> None:
    """Check that a schedule splits no backward.

    Raises:
        ScheduleError: a backward is split; the message names the first such action.
    """
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
    done: dict[tuple[int, int], set[Kind]] = {}
    positions = [{action: position for position, action in enumerate(actions)} for actions in schedule.actions]
    for action in (action for actions in schedule.actions for action in actions):
        done.setdefault((action.stage, action.microbatch), set()).add(action.kind)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            kinds = frozenset(done.get((stage, microbatch), ()))
            if kinds not in (_UNSPLIT, _SPLIT):
                yield (
                    f"stage {stage}, micro-batch {microbatch}: expected F and B, or F, I and W, got "
                    f"{' '.join(sorted(kind.value for kind in kinds)) or 'nothing'}"
                )
            yield from _order_problems(positions[schedule.rank_of_stage[stage]], stage, microbatch, kinds)


def _order_problems(
    positions: Mapping[Action, int], stage: int, microbatch: int, kinds: frozenset[Kind]
) -> Iterator[str]:
    order = [Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD] if kinds == _SPLIT else [Kind.FORWARD, Kind.BACKWARD]
    actions = [Action(stage, kind, microbatch) for kind in order if kind in kinds]
    # Missing actions are reported by the caller.
    found = [positions[action] for action in actions if action in positions]
    if found != sorted(found):
        yield f"stage {stage}, micro-batch {microbatch}: expected the order {' '.join(kind.value for kind in order)}"
