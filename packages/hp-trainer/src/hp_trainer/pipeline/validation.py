"""Checks of a schedule, before any rank runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from hp_trainer.exceptions import ScheduleError
from hp_trainer.pipeline.actions import Action, Kind, Schedule
from hp_trainer.pipeline.simulation import simulate

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
