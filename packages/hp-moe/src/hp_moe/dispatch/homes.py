"""Homes of experts: the places in which ranks own them, and better ones for measured loads, by arithmetic alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hp_moe.exceptions import ExpertParallelError

# The place of each expert; rank i owns the i-th chunk of the places.
Homes = tuple[int, ...]


def place_homes(
    loads: Sequence[int], homes: Sequence[int], num_ranks: int, *, most_swaps: int = 8, least_gain: float = 0.05
) -> Homes:
    """Return homes of experts that leave the busiest rank with less, found by swaps of two experts.

    Each swap takes from the busiest rank what leaves it and the other rank with the least. The result depends on the
    arguments alone, so ranks that know the same loads agree without a word.

    Args:
        loads: tokens of each expert, of all ranks.
        homes: the place of each expert now.
        num_ranks: ranks that share the places, in chunks; the last ones may have fewer.
        most_swaps: bound on the swaps; each moves the weights and optimizer states of two experts.
        least_gain: a swap must take so much from the busiest rank, as a part of the mean load of a rank.

    Example:
        >>> place_homes([50, 40, 1, 2], homes=range(4), num_ranks=2)  # experts 0 and 1 part
        (3, 1, 2, 0)
    """
    expert_at = inverse(homes)
    chunk = -(-len(expert_at) // num_ranks)
    by_place = [int(loads[expert]) for expert in expert_at]
    for _ in range(most_swaps):
        swap = _best_swap(by_place, chunk, num_ranks, least_gain * sum(by_place) / num_ranks)
        if swap is None:
            break
        for places in (by_place, expert_at):
            places[swap[0]], places[swap[1]] = places[swap[1]], places[swap[0]]
    return tuple(inverse(expert_at))


def check_homes(homes: Sequence[int], num_experts: int) -> Homes:
    """Return the homes as a tuple.

    Raises:
        ExpertParallelError: they are not each place once.
    """
    if sorted(homes) != list(range(num_experts)):
        raise ExpertParallelError(f"homes: expected each of the places 0 to {num_experts - 1} once, got {list(homes)}")
    return tuple(int(place) for place in homes)


def inverse(homes: Sequence[int]) -> list[int]:
    """Return the expert at each place.

    Example:
        >>> inverse((2, 0, 1))
        [1, 2, 0]
    """
    return sorted(range(len(homes)), key=lambda expert: homes[expert])


def _best_swap(by_place: list[int], chunk: int, num_ranks: int, least: float) -> tuple[int, int] | None:
    totals = [sum(by_place[rank * chunk : (rank + 1) * chunk]) for rank in range(num_ranks)]
    busiest = totals.index(max(totals))
    mine = range(busiest * chunk, min((busiest + 1) * chunk, len(by_place)))
    tried = []
    for one, other in itertools.product(mine, range(len(by_place))):
        moved = by_place[one] - by_place[other]
        worst = max(totals[busiest] - moved, totals[other // chunk] + moved)
        if other // chunk != busiest and moved > 0 and totals[busiest] - worst >= max(least, 1):
            tried.append((worst, one, other))
    return min(tried)[1:] if tried else None
