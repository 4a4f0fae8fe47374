"""Properties of a pipeline schedule that plans need: micro-batches in flight, and idle time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from hp_trainer.pipeline import Action, ActionSeconds, Kind, build_schedule, simulate

# A schedule with more actions is extrapolated from its first rounds, after which it repeats itself.
MAX_ACTIONS = 4_000


@dataclass(frozen=True)
class InFlight:
    """Micro-batches whose activations a rank holds at its peak.

    Attributes:
        live: (stage, micro-batch) pairs whose activations are held, divided by the stages of the rank.
        pending: the part of `live` between `I` and `W`: gradients of inputs are computed, those of weights are not.
        last_live, last_pending: the same numbers for the last stage alone, on the rank that has it.
    """

    live: float = 1.0
    pending: float = 0.0
    last_live: float = 1.0
    last_pending: float = 0.0


@dataclass(frozen=True)
class PipelineFacts:
    """Properties of one schedule.

    Attributes:
        rank_of_stage: the rank of each stage.
        before_gradients: for each rank, what is in flight at most before it has its first gradients of weights.
        with_gradients: for each rank, what is in flight at most afterwards; empty if its only backward computes them.
        bubble: largest idle time of a rank, over the time that it computes.
        splits_backward: gradients of weights are computed apart from those of inputs.
        backwards_after_no_forward: number of each rank's backwards whose preceding action is not a forward. Weights
            gathered in forward are freed by then.
        backwards_after_other_stage: number of each rank's backwards whose preceding action is not a forward of the
            same stage.
    """

    rank_of_stage: tuple[int, ...]
    before_gradients: tuple[InFlight, ...]
    with_gradients: tuple[InFlight, ...]
    bubble: float
    splits_backward: bool
    backwards_after_no_forward: tuple[float, ...]
    backwards_after_other_stage: tuple[float, ...]


def pipeline_facts(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None, *, recomputes: bool = False
) -> PipelineFacts:
    """Return the properties of a schedule whose stages take equally long.

    Args:
        recomputes: backward repeats the forward, and computes gradients of inputs and weights together.

    Raises:
        ScheduleError: it does not exist for these numbers, or would hang.
    """
    arguments = name, num_ranks, stages_per_rank, recomputes
    # A period of the steady state: every stage does as many actions in each. The peak and the idle time grow linearly
    # from one period to the next, so two schedules of different length give all longer ones.
    shortest = 2 * num_ranks
    is_long = num_microbatches > 2 * shortest and 3 * num_microbatches * num_ranks > MAX_ACTIONS
    rest = num_microbatches % num_ranks
    last = _simulated(*arguments, 2 * shortest + rest if is_long else num_microbatches)
    owners, idle, busy = last.rank_of_stage, last.idle, last.busy
    counts = [*last.held, last.backwards_after_no_forward, last.backwards_after_other_stage]
    if is_long:
        first = _simulated(*arguments, shortest + rest)
        # Linear extrapolation by the number of periods that were not simulated.
        beyond = (num_microbatches - 2 * shortest - rest) / shortest
        before = [*first.held, first.backwards_after_no_forward, first.backwards_after_other_stage]
        counts = [
            tuple(b + (b - a) * beyond for a, b in zip(*each, strict=True)) for each in zip(before, counts, strict=True)
        ]
        idle += (idle - first.idle) * beyond
        busy += (busy - first.busy) * beyond
    # `held` has one entry per rank; the two counts are the last entries of the list.
    *held, backwards_after_no_forward, backwards_after_other_stage = counts
    return PipelineFacts(
        rank_of_stage=owners,
        before_gradients=tuple(_in_flight(each[:4], owners.count(rank)) for rank, each in enumerate(held)),
        with_gradients=tuple(_in_flight(each[4:], owners.count(rank)) for rank, each in enumerate(held)),
        bubble=max(0.0, idle) / busy if busy else 0.0,
        splits_backward=last.splits_backward,
        backwards_after_no_forward=backwards_after_no_forward,
        backwards_after_other_stage=backwards_after_other_stage,
    )


def _in_flight(counts: Sequence[float], stages: int) -> InFlight:
    live, pending, last_live, last_pending = counts
    return InFlight(live / stages, pending / stages, last_live, last_pending)


@dataclass(frozen=True)
class _Simulated:
    """Results of one simulation.

    Attributes:
        held: result of `_peaks` for each rank.
        idle, busy: largest idle and busy time of a rank, in units of a forward's time.
    """

    rank_of_stage: tuple[int, ...]
    held: tuple[tuple[float, ...], ...]
    idle: float
    busy: float
    splits_backward: bool
    backwards_after_no_forward: tuple[float, ...]
    backwards_after_other_stage: tuple[float, ...]


@functools.lru_cache(maxsize=256)
def _simulated(
    name: str, num_ranks: int, stages_per_rank: int | None, recomputes: bool, num_microbatches: int
) -> _Simulated:
    schedule = build_schedule(
        name, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
    )
    pairs = [list(zip((None, *actions), actions, strict=False)) for actions in schedule.actions]
    before = [[(a, b) for a, b in each if b.kind is Kind.BACKWARD] for each in pairs]
    # With recomputation backward takes three times a forward, else twice; half for inputs and half for weights.
    half = 1.5 if recomputes else 1.0
    timeline = simulate(schedule, ActionSeconds(input_grad=half, weight_grad=half))
    return _Simulated(
        rank_of_stage=schedule.rank_of_stage,
        held=tuple(_peaks(actions, schedule.num_stages - 1, recomputes) for actions in schedule.actions),
        idle=max(timeline.idle),
        busy=max(timeline.busy),
        splits_backward=any(action.kind is Kind.INPUT_GRAD for each in schedule.actions for action in each),
        backwards_after_no_forward=tuple(float(sum(not _is_forward(a) for a, _ in each)) for each in before),
        backwards_after_other_stage=tuple(
            float(sum(not _is_forward(a) or a.stage != b.stage for a, b in each)) for each in before
        ),
    )


def _is_forward(action: Action | None) -> TypeGuard[Action]:
    return action is not None and action.kind is Kind.FORWARD


def _peaks(actions: Sequence[Action], last: int, recomputes: bool) -> tuple[float, ...]:
    """Return how many (stage, micro-batch) pairs a rank holds at its peak, and for how many only `W` is pending.

    Pairs with pending `W` hold gradients as well as activations, about half as many bytes more. The first stage
    computes everything in `W`, since no stage needs gradients of its inputs. With recomputation everything is computed
    in `I`.

    Returns:
        All pairs, pending ones, all pairs of the last stage, pending ones of the last stage: at the peak before the
        first gradients of weights exist, then the same four afterwards.
    """
    live: list[Action] = []
    pending: list[Action] = []
    peaks: list[tuple[float, ...]] = [(0, 0, 0, 0), (0, 0, 0, 0)]
    has_gradients = False
    for action in actions:
        # Actions of one (stage, micro-batch) pair compare equal by their forward.
        each = replace(action, kind=Kind.FORWARD)
        splits = not recomputes and action.stage > 0
        if action.kind is Kind.FORWARD:
            live.append(each)
        elif action.kind is Kind.INPUT_GRAD and splits:
            pending.append(each)
        before = peaks[has_gradients]
        if len(live) + len(pending) / 2 > before[0] + before[1] / 2:
            of_last = [[one.stage for one in held].count(last) for held in (live, pending)]
            peaks[has_gradients] = len(live), len(pending), *of_last
        if action.kind is Kind.WEIGHT_GRAD and splits:
            pending.remove(each)
        # The action that frees the pair's activations.
        ends = Kind.INPUT_GRAD if recomputes and action.stage > 0 else Kind.WEIGHT_GRAD
        if action.kind in (Kind.BACKWARD, ends):
            live.remove(each)
            has_gradients = True
    return peaks[0] + peaks[1]
