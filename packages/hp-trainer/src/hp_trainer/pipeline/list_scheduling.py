"""Schedules of a split backward, made by playing the step on paper.

Forward, input gradient and weight gradient take one unit of time each. Whenever a rank is free it takes the first of
these that it can begin: an input gradient, for which other ranks wait; a forward, if it may keep one more activation;
the oldest weight gradient, for which nobody waits.

A result of another rank has to travel, and where it is needed the moment it is made, every message costs its time. So
the step is played with several preferences, some of which take first what has been there for a unit. Of those that end
no later, the one is best that ends first where messages take time. The time is O(actions * stages per rank).

Both parts of a backward joined where splitting it helps nobody.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hp_trainer.exceptions import ScheduleError
from hp_trainer.pipeline.actions import GIVES_INPUT_GRAD, Action, Kind, Schedule, alternatives, in_rounds
from hp_trainer.pipeline.simulation import ActionSeconds, Timeline, simulate

Preference = tuple[tuple[Kind, int], ...]
"""Kinds of action, best first, each with the units of time for which results of other ranks must have been there."""

_F, _I, _W = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD
_PREFERENCES: tuple[Preference, ...] = (
    ((_I, 0), (_F, 0), (_W, 0)),
    ((_I, 1), (_F, 1), (_I, 0), (_F, 0), (_W, 0)),
    ((_I, 1), (_F, 0), (_I, 0), (_W, 0)),
    ((_I, 1), (_F, 0), (_W, 0), (_I, 0)),
    ((_I, 1), (_F, 1), (_W, 0), (_I, 0), (_F, 0)),
)
_TRANSFER = 0.1
"""Time of a message where preferences are compared, in units of an action."""


def list_schedule(
    rank_of_stage: Sequence[int], num_ranks: int, num_microbatches: int, *, max_activations: int, deepest_first: bool
) -> Schedule:
    """Make a schedule by list scheduling.

    Args:
        rank_of_stage: the rank of each stage.
        max_activations: (stage, micro-batch) pairs whose activations a rank may keep.
        deepest_first: of the forwards that can begin, take that of the latest stage; else keep to rounds of as many
            micro-batches as there are ranks, stage by stage.

    Raises:
        ScheduleError: with so few activations no rank can begin anything any more.
    """

    def played(preference: Preference) -> Schedule | None:
        return _play(rank_of_stage, num_ranks, num_microbatches, max_activations, deepest_first, preference)

    plain = played(_PREFERENCES[0])
    if plain is None:
        raise ScheduleError(
            f"{len(rank_of_stage)} stages on {num_ranks} ranks need more than {max_activations} activations each"
        )
    others = [schedule for preference in _PREFERENCES[1:] if (schedule := played(preference)) is not None]
    latest = simulate(plain).end
    able = [plain, *(schedule for schedule in others if simulate(schedule).end <= latest)]
    return min(able, key=lambda schedule: simulate(schedule, ActionSeconds(transfer=_TRANSFER)).end)


def _play(
    rank_of_stage: Sequence[int],
    num_ranks: int,
    num_microbatches: int,
    max_activations: int,
    deepest_first: bool,
    preference: Preference,
) -> Schedule | None:
    """Return the schedule that a preference leads to, or None where no rank can begin anything any more."""
    ranks = [
        _Rank(rank, rank_of_stage, num_microbatches, num_ranks, max_activations, deepest_first)
        for rank in range(num_ranks)
    ]
    ends: dict[Action, int] = {}
    time = waited = 0
    while any(rank.has_work for rank in ranks):
        begun = [rank.take(time, ends, preference) for rank in ranks]
        # All ranks have chosen by what had ended before: an action that begins now helps nobody before the next unit.
        time += 1
        ends.update((action, time) for action in begun if action is not None)
        waited = waited + 1 if begun == [None] * num_ranks else 0
        # After one unit of waiting every result has been there for one.
        if waited > 1:
            return None
    return Schedule(tuple(rank_of_stage), num_microbatches, tuple(tuple(rank.taken) for rank in ranks))


class _Rank:
    """The work that a rank has left, and what it has taken, in order."""

    def __init__(
        self,
        rank: int,
        rank_of_stage: Sequence[int],
        num_microbatches: int,
        round_size: int,
        max_activations: int,
        deepest_first: bool,
    ) -> None:
        self.taken: list[Action] = []
        self._rank_of_stage = rank_of_stage
        self._max_activations, self._deepest_first = max_activations, deepest_first
        stages = [stage for stage, owner in enumerate(rank_of_stage) if owner == rank]
        self._forwards = _Queues(in_rounds(stages, Kind.FORWARD, num_microbatches, round_size))
        self._input_grads = _Queues(in_rounds(stages[::-1], Kind.INPUT_GRAD, num_microbatches, round_size))
        self._weight_grads: deque[Action] = deque()
        self._activations = 0

    @property
    def has_work(self) -> bool:
        return bool(self._forwards or self._input_grads or self._weight_grads)

    def take(self, time: int, ends: Mapping[Action, int], preference: Preference) -> Action | None:
        """Take an action that can begin at `time`, or return None."""
        take = {_F: self._take_forward, _I: self._take_input_grad, _W: self._take_weight_grad}
        for kind, units in preference:
            action = take[kind](time, ends, units)
            if action is not None:
                self.taken.append(action)
                return action
        return None

    def _take_forward(self, time: int, ends: Mapping[Action, int], units: int) -> Action | None:
        if self._activations >= self._max_activations:
            return None
        waiting = self._forwards.next_actions()
        # Those of later stages first, or only the one that is next in the rounds.
        waiting = sorted(waiting, key=lambda each: -each.stage) if self._deepest_first else waiting[:1]
        action = self._first_that_can_begin(waiting, time, ends, 0)
        # Another forward in its place would fill the room for activations that the deepest one needs.
        if action is None or not self._can_begin(action, time, ends, units):
            return None
        self._forwards.take(action)
        self._activations += 1
        return action

    def _take_input_grad(self, time: int, ends: Mapping[Action, int], units: int) -> Action | None:
        action = self._first_that_can_begin(self._input_grads.next_actions(), time, ends, units)
        if action is not None:
            self._input_grads.take(action)
            self._weight_grads.append(Action(action.stage, Kind.WEIGHT_GRAD, action.microbatch))
        return action

    def _take_weight_grad(self, time: int, ends: Mapping[Action, int], units: int) -> Action | None:
        if not self._weight_grads:
            return None
        # Only now: the weight gradient reads the activations that forward kept.
        self._activations -= 1
        return self._weight_grads.popleft()

    def _first_that_can_begin(
        self, actions: Sequence[Action], time: int, ends: Mapping[Action, int], units: int
    ) -> Action | None:
        return next((action for action in actions if self._can_begin(action, time, ends, units)), None)

    def _can_begin(self, action: Action, time: int, ends: Mapping[Action, int], units: int) -> bool:
        """Return True if all that `action` needs is made, and of other ranks has been for that many units."""
        owners = self._rank_of_stage
        for forms in alternatives(action, len(owners)):
            travels = owners[forms[0].stage] != owners[action.stage]
            latest = time - units if travels else time
            if not any(ends.get(form, latest + 1) <= latest for form in forms):
                return False
        return True


class _Queues:
    """Actions of one kind in one order; those of a stage become possible in it, so only its first is looked at.

    Args:
        rounds: stage, kind and micro-batch of each.
    """

    def __init__(self, rounds: Iterable[tuple[int, Kind, int]]) -> None:
        self._of_stage: dict[int, deque[tuple[int, Action]]] = {}
        for place, each in enumerate(rounds):
            self._of_stage.setdefault(each[0], deque()).append((place, Action(*each)))

    def __bool__(self) -> bool:
        return any(self._of_stage.values())

    def next_actions(self) -> list[Action]:
        """Return the first action that each stage has left, in the order of all."""
        return [action for _, action in sorted(queue[0] for queue in self._of_stage.values() if queue)]

    def take(self, action: Action) -> None:
        """Remove an action that is the first of its stage."""
        self._of_stage[action.stage].popleft()


def join_backwards(schedule: Schedule) -> Schedule:
    """Return a schedule with `B` in place of `I` and its `W` wherever that makes no step longer.

    A whole backward costs less than its two parts, of which the second has autograd begin anew at every weight. Where
    F, I and W take one unit of time each, the step ends when it did, and no rank keeps more activations.

    Example:
        >>> from hp_trainer.pipeline import Schedule
        >>> from hp_trainer.pipeline.list_scheduling import join_backwards
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
