"""Merging of the two parts of split backwards where that delays no other action.

An unsplit backward is cheaper than its two parts, since the second one starts autograd again for every weight.
"""

from __future__ import annotations

from dataclasses import replace

from hp_trainer.pipeline.actions import PRODUCES_INPUT_GRAD, Action, Kind, Schedule
from hp_trainer.pipeline.simulation import ActionSeconds, flow_of, simulate

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
    for index in graph.order:
        action = graph.actions[index]
        kind: Kind | None = action.kind
        if kind is Kind.INPUT_GRAD and all(step.can_merge(index) for step in steps):
            merged |= {action, action.of_kind(Kind.WEIGHT_GRAD)}
            kind = Kind.BACKWARD
        elif action in merged:
            kind = None
        for step in steps:
            step.run(index, kind)
    actions = (
        tuple(
            action.of_kind(Kind.BACKWARD) if action in merged else action
            for action in each
            if action.kind is not Kind.WEIGHT_GRAD or action not in merged
        )
        for each in schedule.actions
    )
    return replace(schedule, actions=tuple(actions))


class _Graph:
    """The flow of a schedule with its actions in the order of their starts.

    Attributes:
        order: indices of the flow's actions, every one after all that it waits for, also when merged backwards take
            longer.
        waiting: for each `I`, the actions that a merged backward could delay: of the previous stage, and the next one
            of the rank except its own `W`, which becomes a part of it.
    """

    def __init__(self, schedule: Schedule) -> None:
        owners, spans = schedule.rank_of_stage, simulate(schedule).spans
        flow = flow_of(schedule)
        self.actions, self.needs = flow.order, flow.needs
        self.order = sorted(range(len(flow.order)), key=lambda index: spans[flow.order[index]][0])
        index = {action: place for place, action in enumerate(flow.order)}
        self.waiting: dict[int, list[tuple[int, int]]] = {}
        for actions in schedule.actions:
            for place, action in enumerate(actions):
                if action.kind is Kind.INPUT_GRAD:
                    own = action.of_kind(Kind.WEIGHT_GRAD)
                    after = [(index[each], 0) for each in actions[place + 1 : place + 3] if each != own][:1]
                    earlier = (Action(action.stage - 1, kind, action.microbatch) for kind in PRODUCES_INPUT_GRAD)
                    after += [(index[x], int(owners[x.stage] != owners[action.stage])) for x in earlier if x in index]
                    self.waiting[index[action]] = after


class _Step:
    """A step with the merges chosen so far, for one ratio of the times of actions."""

    def __init__(self, graph: _Graph, seconds: ActionSeconds) -> None:
        self._graph, self._transfer = graph, seconds.transfer
        kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
        self._times: dict[Kind | None, float] = {None: 0.0, **{kind: seconds.of(kind) for kind in kinds}}
        # The end of each action: first without merges, then as chosen.
        self._ends = [0.0] * len(graph.order)
        for index in graph.order:
            self.run(index, graph.actions[index].kind)
        # The latest end of each action that does not delay the end of the step, and from it the latest start.
        self._latest = latest = [max(self._ends, default=0.0)] * len(graph.order)
        for index in reversed(graph.order):
            latest[index] -= self._times[graph.actions[index].kind]
            for before, is_remote in graph.needs[index]:
                latest[before] = min(latest[before], latest[index] - is_remote * self._transfer)

    def run(self, index: int, kind: Kind | None) -> None:
        """Run an action as this kind: None if it is a part of another one."""
        self._ends[index] = self._start(index) + self._times[kind]

    def can_merge(self, input_grad: int) -> bool:
        """Return whether an unsplit backward delays no action that waits for it."""
        # Sums of times that are no binary fractions are rounded.
        end = self._start(input_grad) + self._times[Kind.BACKWARD] - 1e-6
        waiting = self._graph.waiting[input_grad]
        return all(end + is_remote * self._transfer <= self._latest[each] for each, is_remote in waiting)

    def _start(self, index: int) -> float:
        start, ends, transfer = 0.0, self._ends, self._transfer
        for each, is_remote in self._graph.needs[index]:
            end = ends[each] + is_remote * transfer
            if end > start:
                start = end
        return start
