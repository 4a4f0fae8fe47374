"""Schedules by name, each a pure function of ranks, stages per rank and micro-batches.

The built-in ones are published patterns, not found by a search with assumed times: an order that is searched for one
ratio of times is slow for others. So all ranks build the same order without measuring.

The two parts of split backwards are merged where that delays no other action. An unsplit backward is cheaper than its
parts, since the second one starts autograd again for every weight."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from hp_dtensor.platform.registry import Registry, fill_registry
from hp_trainer.exceptions import ScheduleError
from hp_trainer.pipeline.actions import (
    PRODUCES_INPUT_GRAD,
    Action,
    Kind,
    Schedule,
    interleave_rounds,
    loop_placement,
    v_placement,
)
from hp_trainer.pipeline.simulation import ActionSeconds, Flow, flow_of
from hp_trainer.plugins import plugin_manager

BuildSchedule = Callable[[int, int, int], Schedule]
"""A function from (ranks, stages per rank, micro-batches) to a schedule."""

# Limits of the number of actions, each of which is an object: larger schedules take minutes or exhaust the memory.
MAX_FORWARDS = 2**20
MAX_IN_ROUNDS = 2**22


@functools.cache
def _registry() -> Registry:
    registry = Registry("pipeline schedule", "hp-trainer", ScheduleError)
    for name, build in _BUILT_IN.items():
        registry.add(name, build)
    return fill_registry(registry, plugin_manager(), "hp_pipeline_schedules")


def schedule_names() -> list[str]:
    """Return the names of all schedules, sorted.

    Examples:
        >>> from hp_trainer.pipeline import schedule_names
        >>> "zero_bubble_v" in schedule_names()
        True
    """
    return _registry().names()


def repeats_itself(name: str) -> bool:
    """Return whether a schedule repeats itself after some rounds of micro-batches, as all built-in ones do.

    A registered function may return anything for another number of micro-batches.
    """
    return name in _BUILT_IN


def register_schedule(name: str, build: BuildSchedule) -> None:
    """Add a schedule under a name.

    Args:
        build: called with (ranks, stages per rank, micro-batches); returns a `Schedule`, or raises `ScheduleError` if
            there is none for these numbers.

    Raises:
        ScheduleError: the name is taken.

    Examples:
        >>> from hp_trainer.pipeline import Schedule, build_schedule, register_schedule
        >>> register_schedule("my_own", lambda ranks, stages_per_rank, microbatches: Schedule.parse("rank 0: 0F0 0B0"))
        >>> print(build_schedule("my_own", num_ranks=1, num_microbatches=1))
        rank 0: 0F0 0B0
    """
    _registry().add(name, build)


def build_schedule(name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """Build the schedule called `name`.

    Args:
        num_ranks: number of ranks of the pipeline axis.
        num_microbatches: number of micro-batches of a step. Any number works; multiples of `num_ranks` idle least.
        stages_per_rank: default: 2 for schedules that need several stages per rank, else 1.

    Raises:
        ScheduleError: no schedule has this name, a number is below one, a step would have more than 2^20 forwards,
            `num_ranks` squared times `stages_per_rank` is more than 2^22, the schedule does not support this number of
            stages per rank, or a registered function returned something else than a schedule for these numbers.

    Examples:
        >>> from hp_trainer.pipeline import build_schedule
        >>> build_schedule("zero_bubble_v", num_ranks=2, num_microbatches=4).rank_of_stage
        (0, 1, 1, 0)
    """
    # Raises for an unknown name before anything else is checked.
    _registry().get(name)
    stages_per_rank = stages_per_rank_of(name, stages_per_rank)
    numbers = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    wrong = [
        f"{key} must be an integer of at least 1, got {value!r}"
        for key, value in numbers.items()
        if not hasattr(value, "__index__") or value < 1
    ]
    if wrong:
        raise ScheduleError(f"pipeline schedule {name!r}: {'; '.join(wrong)}")
    if num_microbatches > microbatch_limit(name, num_ranks, stages_per_rank):
        forwards = num_ranks * stages_per_rank * num_microbatches
        raise ScheduleError(
            f"pipeline schedule {name!r}: num_ranks * stages_per_rank * num_microbatches = {num_ranks} * "
            f"{stages_per_rank} * {num_microbatches} = {forwards} forwards are too many, expected at most "
            f"{MAX_FORWARDS}"
        )
    # Schedules are built for at least one round of `num_ranks` micro-batches on all stages.
    if num_ranks**2 * stages_per_rank > MAX_IN_ROUNDS:
        raise ScheduleError(
            f"pipeline schedule {name!r}: num_ranks^2 * stages_per_rank = {num_ranks}^2 * {stages_per_rank} = "
            f"{num_ranks**2 * stages_per_rank} is too large, expected at most {MAX_IN_ROUNDS}"
        )
    return _built(name, num_ranks, stages_per_rank, num_microbatches)


def microbatch_limit(name: str, num_ranks: int, stages_per_rank: int | None = None) -> int:
    """Return the largest number of micro-batches that `build_schedule` accepts."""
    return MAX_FORWARDS // (num_ranks * stages_per_rank_of(name, stages_per_rank))


def stages_per_rank_of(name: str, given: int | None) -> int:
    """Return the given number of stages per rank, or the default of a schedule."""
    if given is not None:
        return given
    return 2 if name in _SEVERAL_STAGES else 1


# Cached: schedules are pure functions of these arguments, and a search of layouts builds the same ones repeatedly.
@functools.lru_cache(maxsize=32)
def _built(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
    schedule = _registry().get(name).build(num_ranks, stages_per_rank, num_microbatches)
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"pipeline schedule {name!r}: expected its function to return a Schedule (Schedule.parse parses text), "
            f"got {schedule!r}"
        )
    if (found := (schedule.num_ranks, schedule.num_microbatches)) != (num_ranks, num_microbatches):
        raise ScheduleError(
            f"pipeline schedule {name!r}: expected its function to return actions of {num_ranks} ranks and "
            f"{num_microbatches} micro-batches, got those of {found[0]} and {found[1]}"
        )
    return schedule


def _require_stages(name: str, stages_per_rank: int, expected: int) -> None:
    if stages_per_rank != expected:
        raise ScheduleError(f"pipeline schedule {name!r} has {expected} stages per rank, got {stages_per_rank}")


def gpipe(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965). Idle time: (ranks - 1)(F + B) of one stage."""
    placement = loop_placement(num_ranks, stages_per_rank)
    actions = []
    for rank in range(num_ranks):
        stages = [stage for stage, owner in enumerate(placement) if owner == rank]
        forwards = [Action(stage, Kind.FORWARD, each) for stage in stages for each in range(num_microbatches)]
        backwards = [Action(stage, Kind.BACKWARD, each) for stage in stages[::-1] for each in range(num_microbatches)]
        actions.append((*forwards, *backwards))
    return Schedule(placement, num_microbatches, tuple(actions))


def one_forward_one_backward(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
    """Alternating forward and backward after a warm-up (PipeDream-Flush). Rank r holds ranks - r activations."""
    _require_stages("1f1b", stages_per_rank, 1)
    return _in_rounds(num_ranks, 1, num_microbatches, splits_backward=False)


def interleaved_1f1b(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
    """1F1B with several stages per rank, in rounds of micro-batches (arXiv 2104.04473, section 2.2).

    Idle time: (ranks - 1)(F + B) of one stage. It is `stages_per_rank` times less than that of 1F1B, for as many times
    more messages.
    """
    return _in_rounds(num_ranks, stages_per_rank, num_microbatches, splits_backward=False)


def zero_bubble_h1(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
    """1F1B with weight gradients deferred by `rank` micro-batches, to fill the end (arXiv 2401.10241, section 3.1).

    Idle time: (ranks - 1)(F + I - W). Every rank holds as many activations as the first rank of 1F1B.
    """
    _require_stages("zero_bubble_h1", stages_per_rank, 1)
    return merge_backwards(_in_rounds(num_ranks, 1, num_microbatches, splits_backward=True))


def interleaved_zero_bubble(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
    """`zero_bubble_h1` with several stages per rank, in rounds of micro-batches, as torch's InterleavedZeroBubble."""
    return merge_backwards(_in_rounds(num_ranks, stages_per_rank, num_microbatches, splits_backward=True))


def _in_rounds(num_ranks: int, stages_per_rank: int, num_microbatches: int, *, splits_backward: bool) -> Schedule:
    """Return a schedule in which rounds of micro-batches pass all stages of a rank: 1F1B after a warm-up.

    Rounds have at least as many micro-batches as there are ranks, so that the first micro-batch of a round arrives at
    a rank's next stage when the rank is free. The first rounds have one more micro-batch where they cannot be equal.
    """
    placement = loop_placement(num_ranks, stages_per_rank)
    num_rounds = max(1, num_microbatches // num_ranks)
    sizes = [(num_microbatches + index) // num_rounds for index in reversed(range(num_rounds))]
    actions = []
    for rank in range(num_ranks):
        stages = [stage for stage, owner in enumerate(placement) if owner == rank]
        forwards = interleave_rounds(stages, Kind.FORWARD, sizes)
        kind = Kind.INPUT_GRAD if splits_backward else Kind.BACKWARD
        backwards = interleave_rounds(stages[::-1], kind, sizes)
        # The first backward arrives after a micro-batch has passed all later ranks and its gradient has come back: one
        # more forward for each of these ranks. Two with several stages per rank, where both directions take time; but a
        # zero-bubble schedule fills that time with weight gradients, and holds fewer activations instead.
        hops = num_ranks - 1 - rank
        warm_up = (stages_per_rank - 1) * sizes[0] + hops * (1 if splits_backward or stages_per_rank == 1 else 2)
        # Rank r runs W r backwards after I: the later ranks finish earlier and fill their idle end with it.
        deferred = [each.of_kind(Kind.WEIGHT_GRAD) for each in backwards] if splits_backward else []
        taken = forwards[:warm_up]
        for index, backward in enumerate(backwards):
            taken += [*forwards[warm_up + index : warm_up + index + 1], backward]
            if index >= rank:
                taken += deferred[index - rank : index - rank + 1]
        taken += deferred[max(0, len(backwards) - rank) :]
        actions.append(tuple(taken))
    return Schedule(placement, num_microbatches, tuple(actions))


def zero_bubble_v(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
    """Two stages per rank in a V, with split backwards (arXiv 2401.10241, section 6).

    If F = I = W, a rank does not idle between its first and last action. It holds as many activations as the first rank
    of 1F1B.
    """
    _require_stages("zero_bubble_v", stages_per_rank, 2)
    return _in_a_v(num_ranks, num_microbatches, 2 * num_ranks - 1, _RankOfV.zero_bubble)


def dualpipe_v(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
    """Two stages per rank in a V; forwards of one direction alternate with backwards of the other (arXiv 2412.19437).

    These are the eight phases of the published DualPipeV, in which a forward and a backward may overlap.
    """
    _require_stages("dualpipe_v", stages_per_rank, 2)
    return _in_a_v(num_ranks, num_microbatches, 2 * num_ranks, _RankOfV.dualpipe)


def _in_a_v(
    num_ranks: int, num_microbatches: int, at_least: int, actions_of: Callable[[_RankOfV], list[Action]]
) -> Schedule:
    """Return a schedule of two stages per rank in a V.

    The phases need `at_least` micro-batches. The actions of surplus ones are removed. This cannot cause a deadlock,
    since an action depends only on others of its own micro-batch.
    """
    ranks = [actions_of(_RankOfV(rank, num_ranks, max(num_microbatches, at_least))) for rank in range(num_ranks)]
    actions = tuple(tuple(action for action in each if action.microbatch < num_microbatches) for each in ranks)
    return merge_backwards(Schedule(v_placement(num_ranks, 2), num_microbatches, actions))


class _RankOfV:
    """The actions of one rank with a stage on the way down a V (direction 0) and one on the way up (direction 1).

    Backwards are always split here; `merge_backwards` merges those that need not be.
    """

    def __init__(self, rank: int, num_ranks: int, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self._stages = (rank, 2 * num_ranks - 1 - rank)
        # The counts of the phases depend on the rank's position: `after` ranks are between it and the turn of the V.
        self._before, self._after = rank + 1, num_ranks - 1 - rank
        # Next micro-batch of each direction.
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._deferred: list[Action] = []
        self._taken: list[Action] = []

    def zero_bubble(self) -> list[Action]:
        """Return the rank's actions in `zero_bubble_v`."""
        before, after, total = self._before, self._after, self._num_microbatches
        # Warm-up: until the first micro-batch is back from the turn, then until its backward has arrived.
        for _ in range(2 * after + 1):
            self._forward(0)
        for _ in range(before - 1):
            self._forward(1)
            self._forward(0)
        for _ in range(after + 1):
            self._forward(1)
            self._backward(1)
        # Both directions in turn, until no forward is left.
        while self._forwards[1] < total:
            if self._forwards[0] < total:
                self._forward(0)
            self._backward(0)
            self._forward(1)
            self._backward(1)
        # Only input gradients while other ranks wait for them; weight gradients fill the end.
        for direction in [0, 1] * (before - 1):
            self._backward(direction, defers=True)
        for _ in range(after + 1):
            self._backward(0, defers=True)
            self._weight_grad()
        return self._finished()

    def dualpipe(self) -> list[Action]:
        """Return the rank's actions in `dualpipe_v`."""
        before, after = self._before, self._after
        # The seven loops and the weight gradients of `_finished` are the eight phases of DeepSeek's DualPipeV.
        for _ in range(2 * after):
            self._forward(0)
        for _ in range(before):
            self._forward(0)
            self._forward(1)
        for _ in range(after):
            self._backward(1, defers=True)
            self._weight_grad()
            self._forward(1)
        for _ in range(self._num_microbatches - 2 * (before + after) + before):
            for direction in (0, 1):
                self._forward(direction)
                self._backward(1 - direction)
        for _ in range(after):
            self._backward(1)
            self._forward(1)
            self._backward(0)
        # Both directions in turn; the second half defers its weight gradients.
        for index in range(2 * before):
            self._backward(1 - index % 2, defers=index >= before)
        for _ in range(after):
            self._weight_grad()
            self._backward(0, defers=True)
        return self._finished()

    def _forward(self, direction: int) -> None:
        self._taken.append(Action(self._stages[direction], Kind.FORWARD, self._forwards[direction]))
        self._forwards[direction] += 1

    def _backward(self, direction: int, defers: bool = False) -> None:
        stage, microbatch = self._stages[direction], self._backwards[direction]
        self._backwards[direction] += 1
        self._taken.append(Action(stage, Kind.INPUT_GRAD, microbatch))
        weight_grad = Action(stage, Kind.WEIGHT_GRAD, microbatch)
        (self._deferred if defers else self._taken).append(weight_grad)

    def _weight_grad(self) -> None:
        self._taken.append(self._deferred.pop(0))

    def _finished(self) -> list[Action]:
        return [*self._taken, *self._deferred]


_SEVERAL_STAGES = {"interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v"}
_BUILT_IN: dict[str, BuildSchedule] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved_1f1b": interleaved_1f1b,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "zero_bubble_h1": zero_bubble_h1,
    "zero_bubble_v": zero_bubble_v,
    "dualpipe_v": dualpipe_v,
}


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
        >>> from hp_trainer.pipeline.schedules import merge_backwards
        >>> print(merge_backwards(Schedule.parse("rank 0: 0F0 0I0 0W0")))
        rank 0: 0F0 0B0
    """
    flow = flow_of(schedule)
    waiting = _waiting(flow, schedule.num_stages)
    steps = [_Step(flow, seconds) for seconds in _TIMES]
    starts, _ = flow.times(ActionSeconds())
    # Kinds of merged actions: `B` for `I`, and None for the `W` that becomes a part of it.
    merged: dict[int, Kind | None] = {}
    # By start, so that each action comes after all that it waits for, also when merged backwards take longer.
    for index in sorted(range(len(starts)), key=starts.__getitem__):
        kind = flow.order[index].kind
        if kind is Kind.INPUT_GRAD and all(step.can_merge(index, waiting[index]) for step in steps):
            merged[index] = Kind.BACKWARD
        elif kind is Kind.WEIGHT_GRAD and flow.needs[index][0][0] in merged:
            merged[index] = None
        for step in steps:
            step.run(index, merged.get(index, kind))
    found = [
        [(flow.order[index], merged.get(index, flow.order[index].kind)) for index in each] for each in flow.of_rank
    ]
    actions = (tuple(action.of_kind(kind) for action, kind in each if kind is not None) for each in found)
    return replace(schedule, actions=tuple(actions))


def _waiting(flow: Flow, num_stages: int) -> dict[int, list[tuple[int, int]]]:
    """Return the actions that each merged backward could delay, by its `I`, as in `Flow.needs`.

    They are the backward of the previous stage, and the next action of the rank except its own `W`.
    """
    waiting: dict[int, list[tuple[int, int]]] = {}
    for own in flow.of_rank:
        for position, index in enumerate(own):
            if flow.order[index].kind is Kind.INPUT_GRAD:
                following = own[position + 1 : position + 3]
                after = [
                    x for x in following if flow.order[x].kind is not Kind.WEIGHT_GRAD or flow.needs[x][0][0] != index
                ]
                waiting[index] = [(each, 0) for each in after[:1]]
    for index, action in enumerate(flow.order):
        if action.kind in PRODUCES_INPUT_GRAD and action.stage + 1 < num_stages:
            source, is_remote = flow.needs[index][1]
            waiting.setdefault(source, []).append((index, is_remote))
    return waiting


class _Step:
    """A step with the merges chosen so far, for one ratio of the times of actions."""

    def __init__(self, flow: Flow, seconds: ActionSeconds) -> None:
        self._needs, self._transfer = flow.needs, seconds.transfer
        self._times: dict[Kind | None, float] = {None: 0.0} | seconds.by_kind
        # The end of each action: first without merges, then as chosen.
        _, self._ends = flow.times(seconds)
        # The latest end of each action that does not delay the end of the step, and from it the latest start.
        self._latest = latest = [max(self._ends, default=0.0)] * len(flow.order)
        for index in reversed(range(len(flow.order))):
            start = latest[index] = latest[index] - self._times[flow.order[index].kind]
            for before, is_remote in flow.needs[index]:
                end = start - is_remote * self._transfer
                if end < latest[before]:
                    latest[before] = end

    def run(self, index: int, kind: Kind | None) -> float:
        """Set and return the end of an action that runs as `kind`; None: it is a part of another one."""
        start, ends = 0.0, self._ends
        for each, is_remote in self._needs[index]:
            end = ends[each] + is_remote * self._transfer
            if end > start:
                start = end
        ends[index] = start + self._times[kind]
        return ends[index]

    def can_merge(self, input_grad: int, waiting: list[tuple[int, int]]) -> bool:
        """Run an unsplit backward, and return whether it delays none of the actions that wait for it."""
        # Less a tolerance, since sums of times are rounded.
        end = self.run(input_grad, Kind.BACKWARD) - 1e-6
        return all(end + is_remote * self._transfer <= self._latest[each] for each, is_remote in waiting)
