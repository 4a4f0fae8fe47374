"""Schedules of a split backward, made by playing the step on paper.

Forward, input gradient and weight gradient take one unit of time each. Whenever a rank is free it takes the first of
these that it can begin: an input gradient, for which other ranks wait; a forward, if it may keep one more activation;
the oldest weight gradient, for which nobody waits. The time is O(actions * stages per rank).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hp_trainer.exceptions import ScheduleError
from hp_trainer.pipeline.actions import Action, Kind, Schedule
from hp_trainer.pipeline.dependencies import alternatives
from hp_trainer.pipeline.placement import in_rounds


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
    ranks = [
        _Rank([stage for stage, owner in enumerate(rank_of_stage) if owner == rank], num_microbatches, num_ranks)
        for rank in range(num_ranks)
    ]
    ends: dict[Action, int] = {}
    time = 0
    while any(rank.has_work for rank in ranks):
        begun = [rank.take(time, ends, len(rank_of_stage), max_activations, deepest_first) for rank in ranks]
        # All ranks have chosen by what had ended before: an action that begins now helps nobody before the next unit.
        time += 1
        ends.update((action, time) for action in begun if action is not None)
        if begun == [None] * num_ranks:
            raise ScheduleError(
                f"{len(rank_of_stage)} stages on {num_ranks} ranks need more than {max_activations} activations each"
            )
    return Schedule(tuple(rank_of_stage), num_microbatches, tuple(tuple(rank.taken) for rank in ranks))


class _Rank:
    """The work that a rank has left, and what it has taken, in order."""

    def __init__(self, stages: Sequence[int], num_microbatches: int, round_size: int) -> None:
        self.taken: list[Action] = []
        rounds = in_rounds(stages, Kind.FORWARD, num_microbatches, round_size)
        self._forwards = [Action(*each) for each in rounds]
        rounds = in_rounds(stages[::-1], Kind.INPUT_GRAD, num_microbatches, round_size)
        self._input_grads = [Action(*each) for each in rounds]
        self._weight_grads: list[Action] = []
        self._activations = 0

    @property
    def has_work(self) -> bool:
        return bool(self._forwards or self._input_grads or self._weight_grads)

    def take(
        self, time: int, ends: Mapping[Action, int], num_stages: int, max_activations: int, deepest_first: bool
    ) -> Action | None:
        """Take an action that can begin at `time`, or return None."""
        action = _first_that_can_begin(self._input_grads, time, ends, num_stages)
        if action is not None:
            self._input_grads.remove(action)
            self._weight_grads.append(Action(action.stage, Kind.WEIGHT_GRAD, action.microbatch))
        elif self._activations < max_activations:
            waiting = sorted(self._forwards, key=lambda each: -each.stage) if deepest_first else self._forwards[:1]
            action = _first_that_can_begin(waiting, time, ends, num_stages)
            if action is not None:
                self._forwards.remove(action)
                self._activations += 1
        if action is None and self._weight_grads:
            action = self._weight_grads.pop(0)
            # Only now: the weight gradient reads the activations that forward kept.
            self._activations -= 1
        if action is not None:
            self.taken.append(action)
        return action


def _first_that_can_begin(
    actions: Sequence[Action], time: int, ends: Mapping[Action, int], num_stages: int
) -> Action | None:
    for action in actions:
        needed = alternatives(action, num_stages)
        if all(any(ends.get(form, time + 1) <= time for form in forms) for forms in needed):
            return action
    return None
