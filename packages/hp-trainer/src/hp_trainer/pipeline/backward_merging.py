"""Merging of the two parts of split backwards where that delays no other action.

An unsplit backward is cheaper than its two parts, since the second one starts autograd again for every weight.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from hp_trainer.pipeline.actions import PRODUCES_INPUT_GRAD, Action, Kind, Schedule, dependencies
from hp_trainer.pipeline.simulation import ActionSeconds, simulate

# The order of a schedule is the same for all models, so a merge must be harmless for many ratios of times: a product
# takes as long for its weight as for its input, attention has no weights, cheap operations take time for inputs only.
_TIMES = tuple(
    ActionSeconds(input_grad=input_grad, weight_grad=weight_grad, transfer=transfer)
    for input_grad, weight_grad, transfer in (
        (1, 1, 0), (1, 1, 0.2), (0.5, 1.5, 0.1), (1.4, 0.6, 0.1), (1.8, 0.2, 0.1), (2, 1, 0.1)
    )
)  # fmt: skip


def merge_backwards(schedule: Schedule) -> Schedule:
    """Replace `I` and its `W` by `B` wherever that makes no step longer, for any of several ratios of their times.

    No rank holds more activations than before. The backwards to merge are chosen greedily in the order of their starts.

    Examples:
        >>> from hp_trainer.pipeline import Schedule
        >>> from hp_trainer.pipeline.backward_merging import merge_backwards
        >>> print(merge_backwards(Schedule.parse("rank 0: 0F0 0I0 0W0")))
        rank 0: 0F0 0B0
    """
    graph = _Graph(schedule)
    steps = [_Step(graph, seconds) for seconds in _TIMES]
    merged: set[Action] = set()
    for action in graph.order:
        kind: Kind | None = action.kind
        if kind is Kind.INPUT_GRAD and all(step.can_merge(action) for step in steps):
            merged |= {action, replace(action, kind=Kind.WEIGHT_GRAD)}
            kind = Kind.BACKWARD
        elif action in merged:
            kind = None
        for step in steps:
            step.run(action, kind)
    actions = (
        tuple(
            replace(action, kind=Kind.BACKWARD) if action in merged else action
            for action in each
            if action.kind is not Kind.WEIGHT_GRAD or action not in merged
        )
        for each in schedule.actions
    )
    return replace(schedule, actions=tuple(actions))


class _Graph:
    """The actions of a schedule in the order of their starts, and what each one waits for.

    Attributes:
        order: every action after all that it waits for, also when merged backwards take longer.
        needs: for each action, those that must end before it starts: its dependencies, which may be on another rank
            (True), and the previous action of its rank.
        waiting: for each `I`, the actions that a merged backward could delay: of the previous stage, and the next one
            of the rank except its own `W`, which becomes a part of it.
    """

    def __init__(self, schedule: Schedule) -> None:
        owners, spans = schedule.rank_of_stage, simulate(schedule).spans
        self.order = sorted(spans, key=lambda action: spans[action][0])
        self.needs: dict[Action, list[tuple[Action, bool]]] = {}
        for action in self.order:
            forms = itertools.chain(*dependencies(action, schedule.num_stages))
            self.needs[action] = [(x, owners[x.stage] != owners[action.stage]) for x in forms if x in spans]
        self.waiting: dict[Action, list[tuple[Action, bool]]] = {}
        for actions in schedule.actions:
            for before, action in itertools.pairwise(actions):
                self.needs[action].append((before, False))
            for index, action in enumerate(actions):
                if action.kind is Kind.INPUT_GRAD:
                    own = replace(action, kind=Kind.WEIGHT_GRAD)
                    after = [(each, False) for each in actions[index + 1 : index + 3] if each != own][:1]
                    earlier = [Action(action.stage - 1, kind, action.microbatch) for kind in PRODUCES_INPUT_GRAD]
                    after += [(x, owners[x.stage] != owners[action.stage]) for x in earlier if x in spans]
                    self.waiting[action] = after


class _Step:
    """A step with the merges chosen so far, for one ratio of the times of actions."""

    def __init__(self, graph: _Graph, seconds: ActionSeconds) -> None:
        self._graph, self._transfer = graph, seconds.transfer
        kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
        self._times: dict[Kind | None, float] = {None: 0.0, **{kind: seconds.of(kind) for kind in kinds}}
        # The end of each action: first without merges, then as chosen.
        self._ends: dict[Action, float] = {}
        for action in graph.order:
            self.run(action, action.kind)
        # The latest end of each action that does not delay the end of the step, and from it the latest start.
        latest = dict.fromkeys(graph.order, max(self._ends.values(), default=0.0))
        for action in reversed(graph.order):
            latest[action] -= self._times[action.kind]
            for before, is_remote in graph.needs[action]:
                latest[before] = min(latest[before], latest[action] - is_remote * self._transfer)
        self._latest = latest

    def run(self, action: Action, kind: Kind | None) -> None:
        """Run an action as this kind: None if it is a part of another one."""
        self._ends[action] = self._start(action) + self._times[kind]

    def can_merge(self, input_grad: Action) -> bool:
        """Return whether an unsplit backward delays no action that waits for it."""
        # Sums of times that are no binary fractions are rounded.
        end = self._start(input_grad) + self._times[Kind.BACKWARD] - 1e-6
        waiting = self._graph.waiting[input_grad]
        return all(end + is_remote * self._transfer <= self._latest[each] for each, is_remote in waiting)

    def _start(self, action: Action) -> float:
        needs = self._graph.needs[action]
        return max((self._ends[each] + is_remote * self._transfer for each, is_remote in needs), default=0.0)
