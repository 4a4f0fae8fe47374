"""Schedules with split backwards, made by list scheduling, and the merging of backwards that need not be split.

Forward, input gradient and weight gradient take one unit of time each. A free rank takes the first of these that it can
start: an input gradient, which other ranks depend on; a forward, if it may hold one more activation; the oldest weight
gradient, which no other rank depends on.

If a result of another rank is used as soon as it is computed, the transfer delays the step. Therefore several orders of
preference are simulated, some of which first take actions whose inputs have been available for one unit. Among those
that do not end later than the plain order, the one that ends first with a small transfer time is chosen. The time is
O(actions * stages per rank).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hp_trainer.exceptions import ScheduleError
from hp_trainer.pipeline.actions import PRODUCES_INPUT_GRAD, Action, Kind, Schedule, dependencies, interleave_rounds
from hp_trainer.pipeline.simulation import ActionSeconds, Timeline, simulate

Preference = tuple[tuple[Kind, int], ...]
"""Kinds of action, most preferred first, each with the time for which inputs from other ranks must be available."""

_F, _I, _W = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD
# The first one is the plain order.
_PREFERENCES: tuple[Preference, ...] = (
    ((_I, 0), (_F, 0), (_W, 0)),
    ((_I, 1), (_F, 1), (_I, 0), (_F, 0), (_W, 0)),
    ((_I, 1), (_F, 0), (_I, 0), (_W, 0)),
    ((_I, 1), (_F, 0), (_W, 0), (_I, 0)),
    ((_I, 1), (_F, 1), (_W, 0), (_I, 0), (_F, 0)),
)
_TRANSFER = 0.1
"""Transfer time with which preferences are compared, in units of an action."""


def list_schedule(
    rank_of_stage: Sequence[int], num_ranks: int, num_microbatches: int, *, max_activations: int, deepest_first: bool
) -> Schedule:
    """Build a schedule by list scheduling.

    Args:
        rank_of_stage: the rank of each stage.
        max_activations: number of (stage, micro-batch) pairs whose activations a rank may hold.
        deepest_first: prefer the forward of the latest stage. Otherwise forwards follow rounds of as many micro-batches
            as there are ranks.

    Raises:
        ScheduleError: `max_activations` is too small for any rank to make progress.
    """

    def scheduled(preference: Preference) -> Schedule | None:
        return _schedule(rank_of_stage, num_ranks, num_microbatches, max_activations, deepest_first, preference)

    plain = scheduled(_PREFERENCES[0])
    if plain is None:
        raise ScheduleError(
            f"{len(rank_of_stage)} stages on {num_ranks} ranks need more than {max_activations} activations each"
        )
    others = [schedule for preference in _PREFERENCES[1:] if (schedule := scheduled(preference)) is not None]
    latest = simulate(plain).end
    # `min` returns the first of equal candidates, so the plain order is replaced only by a better one.
    candidates = [plain, *(schedule for schedule in others if simulate(schedule).end <= latest)]
    return min(candidates, key=lambda schedule: simulate(schedule, ActionSeconds(transfer=_TRANSFER)).end)


def _schedule(
    rank_of_stage: Sequence[int],
    num_ranks: int,
    num_microbatches: int,
    max_activations: int,
    deepest_first: bool,
    preference: Preference,
) -> Schedule | None:
    """Return the schedule made with one order of preference, or None if no rank can make progress."""
    ranks = [
        _Rank(rank, rank_of_stage, num_microbatches, num_ranks, max_activations, deepest_first)
        for rank in range(num_ranks)
    ]
    ends: dict[Action, int] = {}
    time = idle_units = 0
    while any(rank.has_work for rank in ranks):
        started = [rank.take(time, ends, preference) for rank in ranks]
        # `ends` is updated only after all ranks have chosen: results of this unit are available in the next one.
        time += 1
        ends.update((action, time) for action in started if action is not None)
        idle_units = idle_units + 1 if started == [None] * num_ranks else 0
        # After one idle unit every result is old enough for every preference, so another one means a deadlock.
        if idle_units > 1:
            return None
    return Schedule(tuple(rank_of_stage), num_microbatches, tuple(tuple(rank.taken) for rank in ranks))


class _Rank:
    """The remaining actions of a rank, and those that it has taken, in order."""

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
        # Rounds of as many micro-batches as ranks, as in interleaved 1F1B; backwards pass the stages in reverse.
        self._forwards = _Queues(interleave_rounds(stages, Kind.FORWARD, num_microbatches, round_size))
        self._input_grads = _Queues(interleave_rounds(stages[::-1], Kind.INPUT_GRAD, num_microbatches, round_size))
        self._weight_grads: deque[Action] = deque()
        self._activations = 0

    @property
    def has_work(self) -> bool:
        return bool(self._forwards or self._input_grads or self._weight_grads)

    def take(self, time: int, ends: Mapping[Action, int], preference: Preference) -> Action | None:
        """Take and return an action that can start at `time`, or return None."""
        take = {_F: self._take_forward, _I: self._take_input_grad, _W: self._take_weight_grad}
        for kind, units in preference:
            action = take[kind](time, ends, units)
            if action is not None:
                self.taken.append(action)
                return action
        return None

    def _take_forward(self, time: int, ends: Mapping[Action, int], units: int) -> Action | None:
        """Take the next forward if another activation may be held."""
        if self._activations >= self._max_activations:
            return None
        pending = self._forwards.next_actions()
        # Later stages first, or only the next action of the rounds.
        pending = sorted(pending, key=lambda each: -each.stage) if self._deepest_first else pending[:1]
        action = self._first_that_can_start(pending, time, ends, 0)
        # No other forward may take its place: it would use up the activations that the deepest one needs.
        if action is None or not self._can_start(action, time, ends, units):
            return None
        self._forwards.take(action)
        self._activations += 1
        return action

    def _take_input_grad(self, time: int, ends: Mapping[Action, int], units: int) -> Action | None:
        """Take the first input gradient that can start; its weight gradient becomes possible with it."""
        action = self._first_that_can_start(self._input_grads.next_actions(), time, ends, units)
        if action is not None:
            self._input_grads.take(action)
            self._weight_grads.append(Action(action.stage, Kind.WEIGHT_GRAD, action.microbatch))
        return action

    def _take_weight_grad(self, time: int, ends: Mapping[Action, int], units: int) -> Action | None:
        """Take the oldest weight gradient, which depends on no other rank."""
        if not self._weight_grads:
            return None
        # Activations are freed only here: the weight gradient reads what forward saved.
        self._activations -= 1
        return self._weight_grads.popleft()

    def _first_that_can_start(
        self, actions: Sequence[Action], time: int, ends: Mapping[Action, int], units: int
    ) -> Action | None:
        return next((action for action in actions if self._can_start(action, time, ends, units)), None)

    def _can_start(self, action: Action, time: int, ends: Mapping[Action, int], units: int) -> bool:
        """Return whether the dependencies of `action` are finished, those on other ranks for at least `units`."""
        owners = self._rank_of_stage
        for forms in dependencies(action, len(owners)):
            is_remote = owners[forms[0].stage] != owners[action.stage]
            # A dependency that has not been taken has no end: the default is too late in any case.
            latest = time - units if is_remote else time
            if not any(ends.get(form, latest + 1) <= latest for form in forms):
                return False
        return True


class _Queues:
    """Pending actions of one kind, in a fixed order, with a queue for each stage.

    The actions of a stage become possible in their order, so only the first one of each queue is a candidate.

    Args:
        rounds: (stage, kind, micro-batch) of each action.
    """

    def __init__(self, rounds: Iterable[tuple[int, Kind, int]]) -> None:
        self._of_stage: dict[int, deque[tuple[int, Action]]] = {}
        for position, each in enumerate(rounds):
            self._of_stage.setdefault(each[0], deque()).append((position, Action(*each)))

    def __bool__(self) -> bool:
        return any(self._of_stage.values())

    def next_actions(self) -> list[Action]:
        """Return the first pending action of each stage, in the common order."""
        return [action for _, action in sorted(queue[0] for queue in self._of_stage.values() if queue)]

    def take(self, action: Action) -> None:
        """Remove the first pending action of its stage."""
        self._of_stage[action.stage].popleft()


def merge_backwards(schedule: Schedule) -> Schedule:
    """Replace `I` and its `W` by `B` wherever that does not make the step longer.

    An unsplit backward is cheaper than its two parts, since the second one starts autograd again for every weight. With
    F, I and W of one unit each, the step does not get longer and no rank holds more activations.

    Example:
        >>> from hp_trainer.pipeline import Schedule
        >>> from hp_trainer.pipeline.list_scheduling import merge_backwards
        >>> print(merge_backwards(Schedule.parse("rank 0: 0F0 0I0 0W0")))
        rank 0: 0F0 0B0
    """
    merged = _mergeable(simulate(schedule))
    removed = {Action(each.stage, Kind.WEIGHT_GRAD, each.microbatch) for each in merged}
    actions = tuple(
        tuple(
            Action(action.stage, Kind.BACKWARD, action.microbatch) if action in merged else action
            for action in each
            if action not in removed
        )
        for each in schedule.actions
    )
    return replace(schedule, actions=actions)


def _mergeable(timeline: Timeline) -> set[Action]:
    """Return the `I` to merge with their `W`, chosen greedily in the order of their starts.

    The step is simulated with the merges chosen so far, so that each decision uses the actual start.
    """
    schedule, seconds = timeline.schedule, ActionSeconds()
    latest, following = _latest_starts(timeline), _following(schedule)
    unsplit = seconds.of(Kind.BACKWARD)
    merged: set[Action] = set()
    ends: dict[Action, float] = {}
    free = [0.0] * schedule.num_ranks
    # Sorted by start, every action comes after its dependencies, also when merged backwards take longer.
    for action in sorted(timeline.spans, key=lambda each: timeline.spans[each][0]):
        if action.kind is Kind.WEIGHT_GRAD and Action(action.stage, Kind.INPUT_GRAD, action.microbatch) in merged:
            continue
        rank = schedule.rank_of_stage[action.stage]
        start = max(free[rank], *(ends[each] for each in _dependencies_in(action, timeline)), 0.0)
        # The weight gradient of a merged backward is skipped above: its time is part of the merged one.
        end = start + seconds.of(action.kind)
        if action.kind is Kind.INPUT_GRAD and start + unsplit <= _deadline(action, following, latest):
            merged.add(action)
            end = start + unsplit
        ends[action] = free[rank] = end
    return merged


def _latest_starts(timeline: Timeline) -> dict[Action, float]:
    """Return the latest start of each action that does not delay the end of the step."""
    ends = dict.fromkeys(timeline.spans, timeline.end)
    latest: dict[Action, float] = {}
    before = {b: a for a, b in _following(timeline.schedule).items()}
    for action in sorted(timeline.spans, key=lambda each: timeline.spans[each][0], reverse=True):
        start, end = timeline.spans[action]
        latest[action] = ends[action] - (end - start)
        # Backwards in time, a dependency or the previous action of the rank must end before this one starts.
        for each in (*_dependencies_in(action, timeline), *([before[action]] if action in before else [])):
            ends[each] = min(ends[each], latest[action])
    return latest


def _following(schedule: Schedule) -> dict[Action, Action]:
    """Return for each action the next one on the same rank."""
    return {a: b for actions in schedule.actions for a, b in itertools.pairwise(actions)}


def _dependencies_in(action: Action, timeline: Timeline) -> list[Action]:
    """Return the dependencies of an action in the form (`B` or `I`) that the schedule contains."""
    forms = dependencies(action, timeline.schedule.num_stages)
    return [each for alternative in forms for each in alternative if each in timeline.spans]


def _deadline(input_grad: Action, following: Mapping[Action, Action], latest: Mapping[Action, float]) -> float:
    """Return the latest end of a backward that delays neither the previous stage nor the rank's next action."""
    stage, microbatch = input_grad.stage, input_grad.microbatch
    then = following.get(input_grad)
    # Its own weight gradient becomes part of the merged backward, so the action after that is the one to be delayed.
    if then == Action(stage, Kind.WEIGHT_GRAD, microbatch):
        then = following.get(then)
    dependents = [Action(stage - 1, kind, microbatch) for kind in PRODUCES_INPUT_GRAD]
    if then is not None:
        dependents.append(then)
    return min((latest[each] for each in dependents if each in latest), default=float("inf"))
