"""Facts of a pipeline's schedule: what is in flight, how long ranks idle; of long steps, from shorter ones."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeGuard

from hp_trainer.pipeline import Action, ActionSeconds, Kind, build_schedule, simulate

# A schedule with more actions than this is told from the first rounds, after which it repeats itself.
MAX_ACTIONS = 4_000


@dataclass(frozen=True)
class PipelineFacts:
    """Facts of one schedule.

    Attributes:
        rank_of_stage: the place of each stage.
        in_flight: micro-batches whose activations each place holds at once, over all its stages.
        bubble: the largest idle time of a place, over the time that it works.
        splits_backward: gradients of weights are computed apart from those of inputs.
        after_no_forward: backwards of each place that do not come right after a forward; what a forward has left
            gathered is gone.
        after_another: backwards of each place that do not come right after a forward of their own stage.
    """

    rank_of_stage: tuple[int, ...]
    in_flight: tuple[float, ...]
    bubble: float
    splits_backward: bool
    after_no_forward: tuple[float, ...]
    after_another: tuple[float, ...]


def pipeline_facts(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None, backward: float = 2.0
) -> PipelineFacts:
    """Return the facts of a schedule whose stages take equally long.

    Args:
        backward: time of a backward, the forward's being 1.

    Raises:
        ScheduleError: it does not exist for these numbers, or would hang.
    """

    arguments = name, num_ranks, stages_per_rank, backward
    shortest = 2 * num_ranks
    is_long = num_microbatches > 2 * shortest and 3 * num_microbatches * num_ranks > MAX_ACTIONS
    rest = num_microbatches % num_ranks
    last = _simulated(*arguments, 2 * shortest + rest if is_long else num_microbatches)
    owners, idle, busy = last.rank_of_stage, last.idle, last.busy
    counts = [last.peaks, last.after_no_forward, last.after_another]
    if is_long:
        first = _simulated(*arguments, shortest + rest)
        beyond = (num_microbatches - 2 * shortest - rest) / shortest
        before = first.peaks, first.after_no_forward, first.after_another
        counts = [
            tuple(b + (b - a) * beyond for a, b in zip(*each, strict=True)) for each in zip(before, counts, strict=True)
        ]
        idle += (idle - first.idle) * beyond
        busy += (busy - first.busy) * beyond
    return PipelineFacts(
        rank_of_stage=owners,
        in_flight=tuple(peak / owners.count(place) for place, peak in enumerate(counts[0])),
        bubble=max(0.0, idle) / busy if busy else 0.0,
        splits_backward=last.splits_backward,
        after_no_forward=counts[1],
        after_another=counts[2],
    )


@dataclass(frozen=True)
class _Simulated:
    """Results of one simulation, in units of a forward's time."""

    rank_of_stage: tuple[int, ...]
    peaks: tuple[float, ...]
    idle: float
    busy: float
    splits_backward: bool
    after_no_forward: tuple[float, ...]
    after_another: tuple[float, ...]


@functools.lru_cache(maxsize=256)
def _simulated(
    name: str, num_ranks: int, stages_per_rank: int | None, backward: float, num_microbatches: int
) -> _Simulated:
    schedule = build_schedule(
        name, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
    )
    pairs = [list(zip((None, *actions), actions, strict=False)) for actions in schedule.actions]
    before = [[(a, b) for a, b in each if b.kind is Kind.BACKWARD] for each in pairs]
    timeline = simulate(schedule, ActionSeconds(input_grad=backward / 2, weight_grad=backward / 2))
    return _Simulated(
        rank_of_stage=schedule.rank_of_stage,
        peaks=tuple(map(float, timeline.peak_activations)),
        idle=max(timeline.idle),
        busy=max(timeline.busy),
        splits_backward=any(action.kind is Kind.INPUT_GRAD for each in schedule.actions for action in each),
        after_no_forward=tuple(float(sum(not _is_forward(a) for a, _ in each)) for each in before),
        after_another=tuple(float(sum(not _is_forward(a) or a.stage != b.stage for a, b in each)) for each in before),
    )


def _is_forward(action: Action | None) -> TypeGuard[Action]:
    return action is not None and action.kind is Kind.FORWARD
