"""The cost of bringing an operation's inputs to a strategy, in bytes that a rank sends."""

from __future__ import annotations

from collections.abc import Sequence

from hp_dtensor.rules.factors import Strategy
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard

INFINITE = float("inf")


def cheapest(found: Sequence[Strategy], current: Sequence[Placement], nbytes: Sequence[float], ranks: int) -> Strategy:
    """The strategy of fewest bytes; then the one that changes fewest inputs; then the first."""
    # All operands whole on this axis: every rank does the same work, and nothing is sent forward or backward. To cut
    # here would be free too, but would change the placements that a user sees.
    if all(placement.is_replicate() for placement in current):
        return found[0]
    return min(found, key=lambda strategy: _cost(strategy, current, nbytes, ranks))


def _cost(
    strategy: Strategy, current: Sequence[Placement], nbytes: Sequence[float], ranks: int
) -> tuple[float, float, int]:
    moves = list(zip(current, strategy.inputs, nbytes, strict=True))
    wire = sum(move_bytes(source, target, size, ranks) for source, target, size in moves)
    changes = sum(source != target for source, target, _ in moves)
    return wire, changes, strategy.is_replicated


def move_bytes(source: Placement, target: Placement, nbytes: float, ranks: int) -> float:
    """Bytes sent per rank to bring a tensor with `nbytes` on a rank from one placement to another."""
    if source == target:
        return 0.0
    match source, target:
        case (Partial(), Replicate()):
            # Of rings: an all-reduce is a reduce-scatter and an all-gather, each of which sends (ranks - 1) / ranks of
            # the tensor per rank (Patarasuk and Yuan, 2009).
            return 2 * nbytes * (ranks - 1) / ranks
        case (Partial(), Shard() | RaggedShard() | StridedShard()):
            return nbytes * (ranks - 1) / ranks
        case (Shard() | RaggedShard() | StridedShard(), Shard() | RaggedShard() | StridedShard()):
            return nbytes * (ranks - 1) / ranks
        case (Shard() | RaggedShard() | StridedShard(), Partial()):
            return 2 * nbytes * (ranks - 1)  # nothing is sent now, and all of it when the result is made whole
        case (Shard() | RaggedShard() | StridedShard(), _):
            return nbytes * (ranks - 1)
        case (Replicate(), Partial()) if target == Partial("sum"):
            return 0.0
        case (Replicate(), _):
            return 0.0
    return INFINITE
