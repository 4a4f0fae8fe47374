"""Properties of a pipeline schedule that plans need: micro-batches in flight, and idle time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from hp_trainer.exceptions import ScheduleError
from hp_trainer.pipeline import Action, ActionSeconds, Kind, build_schedule
from hp_trainer.pipeline.schedules import repeats_itself
from hp_trainer.pipeline.simulation import flow_of

# A built-in schedule with uneven rounds and more actions is extrapolated from its first rounds too.
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
    """Properties of the order of actions in one schedule.

    Attributes:
        rank_of_stage: the rank of each stage.
        before_gradients: for each rank, what is in flight at most before it has its first gradients of weights.
        with_gradients: for each rank, what is in flight at most afterwards; empty if its only backward computes them.
        splits_backward: gradients of weights are computed apart from those of inputs.
        backwards_after_no_forward: number of each rank's backwards whose preceding action is not a forward. Weights
            gathered in forward are freed by then.
        backwards_after_other_stage: number of each rank's backwards whose preceding action is not a forward of the
            same stage.
    """

    rank_of_stage: tuple[int, ...]
    before_gradients: tuple[InFlight, ...]
    with_gradients: tuple[InFlight, ...]
    splits_backward: bool
    backwards_after_no_forward: tuple[float, ...]
    backwards_after_other_stage: tuple[float, ...]


@functools.lru_cache(maxsize=512)
def pipeline_facts(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None, *, recomputes: bool = False
) -> PipelineFacts:
    """Return the properties of a schedule.

    Args:
        recomputes: backward repeats the forward, and computes gradients of inputs and weights together.

    Raises:
        ScheduleError: it does not exist for these numbers, or would hang.
    """

    def counts(number: int) -> list[tuple[float, ...]]:
        schedule = build_schedule(name, num_ranks=num_ranks, num_microbatches=number, stages_per_rank=stages_per_rank)
        last = schedule.num_stages - 1
        return [_counts(each, last, recomputes) for each in schedule.actions]

    lengths, beyond = _simulated_lengths(name, num_ranks, num_microbatches)
    of_each = [counts(number) for number in lengths]
    schedule = build_schedule(name, num_ranks=num_ranks, num_microbatches=lengths[-1], stages_per_rank=stages_per_rank)
    found = [
        [b + (b - a) * beyond for a, b in zip(*rank, strict=True)] for rank in zip(of_each[0], of_each[-1], strict=True)
    ]
    owners = schedule.rank_of_stage
    return PipelineFacts(
        rank_of_stage=owners,
        before_gradients=tuple(_in_flight(each[:4], owners.count(rank)) for rank, each in enumerate(found)),
        with_gradients=tuple(_in_flight(each[4:8], owners.count(rank)) for rank, each in enumerate(found)),
        splits_backward=any(action.kind is Kind.INPUT_GRAD for each in schedule.actions for action in each),
        backwards_after_no_forward=tuple(each[8] for each in found),
        backwards_after_other_stage=tuple(each[9] for each in found),
    )


def splits_backward(name: str) -> bool:
    """Return whether a schedule computes gradients of weights apart from those of inputs.

    Examples:
        >>> splits_backward("1f1b"), splits_backward("zero_bubble_v")
        (False, True)
    """
    # One that does not exist for these numbers is left to the checks of the layout.
    try:
        return pipeline_facts(name, 4, 8, None).splits_backward
    except ScheduleError:
        return False


@functools.lru_cache(maxsize=512)
def bubble(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None, seconds: ActionSeconds
) -> float:
    """Return the largest idle time of a rank over the time that it computes, for stages that take equally long."""

    def times(number: int) -> tuple[float, float]:
        schedule = build_schedule(name, num_ranks=num_ranks, num_microbatches=number, stages_per_rank=stages_per_rank)
        flow = flow_of(schedule)
        starts, ends = flow.times(seconds)
        busy = [sum(ends[index] - starts[index] for index in each) for each in flow.of_rank]
        return max(ends) - min(busy), max(busy)

    lengths, beyond = _simulated_lengths(name, num_ranks, num_microbatches)
    of_each = [times(number) for number in lengths]
    idle, busy = (b + (b - a) * beyond for a, b in zip(of_each[0], of_each[-1], strict=True))
    return max(0.0, idle) / busy if busy else 0.0


def _simulated_lengths(name: str, num_ranks: int, num_microbatches: int) -> tuple[tuple[int, ...], float]:
    """Return the micro-batches of the schedules to simulate, and how often the step from the first to the last repeats.

    After some rounds of micro-batches a schedule repeats itself: peaks and times grow linearly from one round to the
    next. So two short schedules give all longer ones.
    """
    rounds, rest = divmod(num_microbatches, num_ranks)
    # Only uneven rounds make the two differ a little, in the stages that follow each other.
    is_short = rounds <= 4 or (rest > 0 and 3 * num_microbatches * num_ranks <= MAX_ACTIONS)
    if is_short or not repeats_itself(name):
        return (num_microbatches,), 0.0
    # The first round, which is the largest, has as many micro-batches as in the long schedule.
    more = -(-rest // rounds)
    lengths = tuple(each * num_ranks + max(0, (more - 1) * each + min(more, 1)) for each in (2, 4))
    return lengths, (num_microbatches - lengths[1]) / (lengths[1] - lengths[0])


def _in_flight(counts: Sequence[float], stages: int) -> InFlight:
    live, pending, last_live, last_pending = counts
    return InFlight(live / stages, pending / stages, last_live, last_pending)


def _counts(actions: Sequence[Action], last: int, recomputes: bool) -> tuple[float, ...]:
    """Return how many (stage, micro-batch) pairs a rank holds at its peak, and for how many only `W` is pending.

    Pairs with pending `W` hold gradients as well as activations, about half as many bytes more. The first stage
    computes everything in `W`, since no stage needs gradients of its inputs. With recomputation everything is computed
    in `I`.

    Returns:
        All pairs, pending ones, all pairs of the last stage, pending ones of the last stage: at the peak before the
        first gradients of weights exist, then the same four afterwards. Then the number of backwards that follow no
        forward, and of those that follow no forward of the same stage.
    """
    live = pending = last_live = last_pending = no_forward = other_stage = 0
    peaks: list[tuple[float, ...]] = [(0, 0, 0, 0), (0, 0, 0, 0)]
    largest, has_gradients, forward_of = [0.0, 0.0], False, -1
    for action in actions:
        kind, stage = action.kind, action.stage
        is_last, splits = stage == last, not recomputes and stage > 0
        if kind is Kind.FORWARD:
            live += 1
            last_live += is_last
        elif kind is Kind.INPUT_GRAD and splits:
            pending += 1
            last_pending += is_last
        if live + pending / 2 > largest[has_gradients]:
            largest[has_gradients] = live + pending / 2
            peaks[has_gradients] = live, pending, last_live, last_pending
        if kind is Kind.BACKWARD:
            no_forward += forward_of < 0
            other_stage += forward_of != stage
        elif kind is Kind.WEIGHT_GRAD and splits:
            pending -= 1
            last_pending -= is_last
        # The action that frees the pair's activations.
        ends = Kind.INPUT_GRAD if recomputes and stage > 0 else Kind.WEIGHT_GRAD
        if kind is Kind.BACKWARD or kind is ends:
            live -= 1
            last_live -= is_last
            has_gradients = True
        # The stage of the preceding action if it is a forward.
        forward_of = stage if kind is Kind.FORWARD else -1
    return (*peaks[0], *peaks[1], no_forward, other_stage)
