"""Both parts of a backward joined where splitting it helps nobody."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from hp_trainer.pipeline.actions import Action, Kind, Schedule
from hp_trainer.pipeline.dependencies import GIVES_INPUT_GRAD, alternatives
from hp_trainer.pipeline.simulation import ActionSeconds, Timeline, simulate


def join_backwards(schedule: Schedule) -> Schedule:
    """Return a schedule with `B` in place of `I` and its `W` wherever that makes no step longer.

    A whole backward costs less than its two parts, of which the second has autograd begin anew at every weight. Where
    F, I and W take one unit of time each, the step ends when it did, and no rank keeps more activations.

    Example:
        >>> from hp_trainer.pipeline import Schedule
        >>> from hp_trainer.pipeline.whole_backwards import join_backwards
        >>> print(join_backwards(Schedule.parse("rank 0: 0F0 0I0 0W0")))
        rank 0: 0F0 0B0
    """
    joined = _joined(simulate(schedule))
    dropped = {Action(each.stage, Kind.WEIGHT_GRAD, each.microbatch) for each in joined}
    actions = tuple(
        tuple(_whole(action) if action in joined else action for action in each if action not in dropped)
        for each in schedule.actions
    )
    return replace(schedule, actions=actions)


def _whole(action: Action) -> Action:
    return Action(action.stage, Kind.BACKWARD, action.microbatch)


def _joined(timeline: Timeline) -> set[Action]:
    """Return the `I` whose `W` can be done with them, by playing the step again with those chosen so far."""
    schedule, seconds = timeline.schedule, ActionSeconds()
    latest, following = _latest_begins(timeline), _following(schedule)
    whole = seconds.of(Kind.BACKWARD)
    joined: set[Action] = set()
    ends: dict[Action, float] = {}
    free = [0.0] * schedule.num_ranks
    # An action begins after all that it needs, so this order has each after these, also when some take longer.
    for action in sorted(timeline.spans, key=lambda each: timeline.spans[each][0]):
        if action.kind is Kind.WEIGHT_GRAD and Action(action.stage, Kind.INPUT_GRAD, action.microbatch) in joined:
            continue
        rank = schedule.rank_of_stage[action.stage]
        begin = max(free[rank], *(ends[each] for each in _needed(action, timeline)), 0.0)
        end = begin + seconds.of(action.kind)
        if action.kind is Kind.INPUT_GRAD and begin + whole <= _needed_at(action, following, latest):
            joined.add(action)
            end = begin + whole
        ends[action] = free[rank] = end
    return joined


def _latest_begins(timeline: Timeline) -> dict[Action, float]:
    """Return when each action may begin at the latest for the step to end when it does."""
    ends = dict.fromkeys(timeline.spans, timeline.end)
    latest: dict[Action, float] = {}
    before = {b: a for a, b in _following(timeline.schedule).items()}
    for action in sorted(timeline.spans, key=lambda each: timeline.spans[each][0], reverse=True):
        begin, end = timeline.spans[action]
        latest[action] = ends[action] - (end - begin)
        for each in (*_needed(action, timeline), *([before[action]] if action in before else [])):
            ends[each] = min(ends[each], latest[action])
    return latest


def _following(schedule: Schedule) -> dict[Action, Action]:
    """Return the action that comes next on the rank of each."""
    return {a: b for actions in schedule.actions for a, b in itertools.pairwise(actions)}


def _needed(action: Action, timeline: Timeline) -> list[Action]:
    forms = alternatives(action, timeline.schedule.num_stages)
    return [each for alternative in forms for each in alternative if each in timeline.spans]


def _needed_at(input_grad: Action, following: Mapping[Action, Action], latest: Mapping[Action, float]) -> float:
    """Return when the stage before, and the rank's next action, must have what comes of a backward."""
    stage, microbatch = input_grad.stage, input_grad.microbatch
    then = following.get(input_grad)
    if then == Action(stage, Kind.WEIGHT_GRAD, microbatch):
        then = following.get(then)
    waiting = [Action(stage - 1, kind, microbatch) for kind in GIVES_INPUT_GRAD]
    if then is not None:
        waiting.append(then)
    return min((latest[each] for each in waiting if each in latest), default=float("inf"))
