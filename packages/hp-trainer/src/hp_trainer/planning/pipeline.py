"""Facts of a pipeline's schedule: what is in flight, how long ranks idle; of long steps, from shorter ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from hp_trainer.pipeline import Action, ActionSeconds, Kind, build_schedule, simulate

# A schedule with more actions than this is told from the first rounds, after which it repeats itself.
MAX_ACTIONS = 4_000


@dataclass(frozen=True)
class InFlight:
    """Micro-batches whose activations a place holds when it holds most.

    Attributes:
        live: of all its stages together; one of two stages counts a half.
        pending: of these, those whose inputs have their gradients, but the weights not yet.
        last_live, last_pending: the same of the last stage alone, by the place that has it.
    """

    live: float = 1.0
    pending: float = 0.0
    last_live: float = 1.0
    last_pending: float = 0.0


@dataclass(frozen=True)
class PipelineFacts:
    """Facts of one schedule.

    Attributes:
        rank_of_stage: the place of each stage.
        before_gradients: of each place, what is in flight until it has its first gradients of weights.
        with_gradients: of each place, what is in flight after that; nothing where its only backward gives them.
        bubble: the largest idle time of a place, over the time that it works.
        splits_backward: gradients of weights are computed apart from those of inputs.
        after_no_forward: backwards of each place that do not come right after a forward; what a forward has left
            gathered is gone.
        after_another: backwards of each place that do not come right after a forward of their own stage.
    """

    rank_of_stage: tuple[int, ...]
    before_gradients: tuple[InFlight, ...]
    with_gradients: tuple[InFlight, ...]
    bubble: float
    splits_backward: bool
    after_no_forward: tuple[float, ...]
    after_another: tuple[float, ...]


def pipeline_facts(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None, *, recomputes: bool = False
) -> PipelineFacts:
    """Return the facts of a schedule whose stages take equally long.

    Args:
        recomputes: backward computes the forward again, and has both its parts at once.

    Raises:
        ScheduleError: it does not exist for these numbers, or would hang.
    """

    arguments = name, num_ranks, stages_per_rank, recomputes
    shortest = 2 * num_ranks
    is_long = num_microbatches > 2 * shortest and 3 * num_microbatches * num_ranks > MAX_ACTIONS
    rest = num_microbatches % num_ranks
    last = _simulated(*arguments, 2 * shortest + rest if is_long else num_microbatches)
    owners, idle, busy = last.rank_of_stage, last.idle, last.busy
    counts = [*last.held, last.after_no_forward, last.after_another]
    if is_long:
        first = _simulated(*arguments, shortest + rest)
        beyond = (num_microbatches - 2 * shortest - rest) / shortest
        before = [*first.held, first.after_no_forward, first.after_another]
        counts = [
            tuple(b + (b - a) * beyond for a, b in zip(*each, strict=True)) for each in zip(before, counts, strict=True)
        ]
        idle += (idle - first.idle) * beyond
        busy += (busy - first.busy) * beyond
    *held, after_no_forward, after_another = counts
    return PipelineFacts(
        rank_of_stage=owners,
        before_gradients=tuple(_in_flight(each[:4], owners.count(place)) for place, each in enumerate(held)),
        with_gradients=tuple(_in_flight(each[4:], owners.count(place)) for place, each in enumerate(held)),
        bubble=max(0.0, idle) / busy if busy else 0.0,
        splits_backward=last.splits_backward,
        after_no_forward=after_no_forward,
        after_another=after_another,
    )


def _in_flight(counts: Sequence[float], stages: int) -> InFlight:
    live, pending, last_live, last_pending = counts
    return InFlight(live / stages, pending / stages, last_live, last_pending)


@dataclass(frozen=True)
class _Simulated:
    """Results of one simulation, in units of a forward's time; of each place what `_fullest` returns."""

    rank_of_stage: tuple[int, ...]
    held: tuple[tuple[float, ...], ...]
    idle: float
    busy: float
    splits_backward: bool
    after_no_forward: tuple[float, ...]
    after_another: tuple[float, ...]


@functools.lru_cache(maxsize=256)
def _simulated(
    name: str, num_ranks: int, stages_per_rank: int | None, recomputes: bool, num_microbatches: int
) -> _Simulated:
    schedule = build_schedule(
        name, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
    )
    pairs = [list(zip((None, *actions), actions, strict=False)) for actions in schedule.actions]
    before = [[(a, b) for a, b in each if b.kind is Kind.BACKWARD] for each in pairs]
    part = 1.5 if recomputes else 1.0
    timeline = simulate(schedule, ActionSeconds(input_grad=part, weight_grad=part))
    return _Simulated(
        rank_of_stage=schedule.rank_of_stage,
        held=tuple(_fullest(actions, schedule.num_stages - 1, recomputes) for actions in schedule.actions),
        idle=max(timeline.idle),
        busy=max(timeline.busy),
        splits_backward=any(action.kind is Kind.INPUT_GRAD for each in schedule.actions for action in each),
        after_no_forward=tuple(float(sum(not _is_forward(a) for a, _ in each)) for each in before),
        after_another=tuple(float(sum(not _is_forward(a) or a.stage != b.stage for a, b in each)) for each in before),
    )


def _is_forward(action: Action | None) -> TypeGuard[Action]:
    return action is not None and action.kind is Kind.FORWARD


def _fullest(actions: Sequence[Action], last: int, recomputes: bool) -> tuple[float, ...]:
    """Return how many (stage, micro-batch) a rank holds when it has most, and how many of them wait for `W` alone.

    These hold gradients beside their activations, about half as many bytes again. The first stage computes everything
    in `W`, since nobody waits for gradients of its inputs; where blocks are computed again all is done in `I`.

    Returns:
        all, those that wait, all of the last stage, those of it that wait: before the first gradients of weights are
        there, then the same four after that.
    """
    live: list[Action] = []
    waiting: list[Action] = []
    fullest: list[tuple[float, ...]] = [(0, 0, 0, 0), (0, 0, 0, 0)]
    has_gradients = False
    for action in actions:
        each = replace(action, kind=Kind.FORWARD)
        splits = not recomputes and action.stage > 0
        if action.kind is Kind.FORWARD:
            live.append(each)
        elif action.kind is Kind.INPUT_GRAD and splits:
            waiting.append(each)
        before = fullest[has_gradients]
        if len(live) + len(waiting) / 2 > before[0] + before[1] / 2:
            of_last = [[one.stage for one in held].count(last) for held in (live, waiting)]
            fullest[has_gradients] = len(live), len(waiting), *of_last
        if action.kind is Kind.WEIGHT_GRAD and splits:
            waiting.remove(each)
        ends = Kind.INPUT_GRAD if recomputes and action.stage > 0 else Kind.WEIGHT_GRAD
        if action.kind in (Kind.BACKWARD, ends):
            live.remove(each)
            has_gradients = True
    return fullest[0] + fullest[1]
