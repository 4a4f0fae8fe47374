"""The stages of each rank, and the order in which a rank goes through them."""

from __future__ import annotations

from collections.abc import Sequence

from hp_trainer.pipeline.actions import Kind


def loop_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage where stages go round: stage s is on rank s % num_ranks."""
    return tuple(stage % num_ranks for stage in range(num_ranks * stages_per_rank))


def v_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage where every second round goes back, so that the first and the last stage meet."""
    there = [*range(num_ranks)]
    return tuple(rank for turn in range(stages_per_rank) for rank in (there if turn % 2 == 0 else there[::-1]))


def in_rounds(stages: Sequence[int], kind: Kind, num_microbatches: int, round_size: int) -> list[tuple[int, Kind, int]]:
    """Return (stage, kind, micro-batch): rounds of micro-batches, each round through all stages in their order."""
    return [
        (stage, kind, microbatch)
        for first in range(0, num_microbatches, round_size)
        for stage in stages
        for microbatch in range(first, min(first + round_size, num_microbatches))
    ]
