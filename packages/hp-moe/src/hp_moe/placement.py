"""Homes of experts: the places in which ranks own them, and better ones for measured loads, by arithmetic alone.

Copies of experts with many tokens: loads in, placement out, by arithmetic alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

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


# Each rank's extra experts, ascending.
Placement = tuple[tuple[int, ...], ...]

# Where there are no more placements than this, all of them are tried.
_MOST_TRIED = 1_000
# An expert has no more copies than this, so that tokens take turns in few numbers.
MOST_COPIES = 8


def place_copies(loads: Sequence[int], num_ranks: int, slots: int) -> Placement:
    """Return the experts that each rank takes a copy of, so that the busiest rank has as little as may be.

    Rank i owns the i-th chunk of the experts and keeps them; an expert's load is shared evenly by all ranks that have
    it. Of equally good placements the one with the fewest copies is taken, and of those the first. The result depends
    on the arguments alone, so ranks that know the same loads agree without a word. Few enough placements are all tried;
    else copies are added one by one, each where it helps the busiest rank most.

    Args:
        loads: tokens of each expert, of all ranks.
        num_ranks: ranks that share the experts.
        slots: the most copies that a rank takes.

    Example:
        >>> place_copies([90, 10, 0, 0], num_ranks=2, slots=1)  # rank 1 helps with expert 0
        ((), (0,))
        >>> place_copies([10, 10, 10, 10], num_ranks=2, slots=1)
        ((), ())
    """
    # A multiple of every number of copies: shares are whole numbers, and comparisons exact.
    unit = math.lcm(*range(1, min(num_ranks, MOST_COPIES) + 1))
    scaled = [int(load) * unit for load in loads]
    own = len(loads) - -(-len(loads) // num_ranks)
    per_rank = sum(math.comb(own, count) for count in range(slots + 1))
    if per_rank**num_ranks <= _MOST_TRIED:
        return min(_placements(len(loads), num_ranks, slots), key=lambda each: _rating(scaled, each))
    return _one_by_one(scaled, num_ranks, slots)


def busiest_load(loads: Sequence[int], placement: Placement) -> float:
    """Return the load of the busiest rank, where an expert's load is shared evenly by the ranks that have it.

    Example:
        >>> busiest_load([90, 10, 10, 10], ((), (0,)))  # half of expert 0, and two experts
        65.0
    """
    unit = math.lcm(*range(1, len(placement) + 1))
    return max(_rank_loads([load * unit for load in loads], placement)) / unit


def owners(num_experts: int, placement: Placement) -> list[list[int]]:
    """Return the ranks that have each expert, ascending.

    Example:
        >>> owners(4, ((), (0,)))
        [[0, 1], [0], [1], [1]]
    """
    chunk = -(-num_experts // len(placement))
    return [
        sorted({expert // chunk, *(rank for rank, extra in enumerate(placement) if expert in extra)})
        for expert in range(num_experts)
    ]


def _rank_loads(loads: Sequence[int], placement: Placement) -> list[int]:
    totals = [0] * len(placement)
    for load, ranks in zip(loads, owners(len(loads), placement), strict=True):
        for rank in ranks:
            totals[rank] += load // len(ranks)
    return totals


def _rating(loads: Sequence[int], placement: Placement) -> tuple[int, int, Placement]:
    return max(_rank_loads(loads, placement)), sum(map(len, placement)), placement


def _placements(num_experts: int, num_ranks: int, slots: int) -> Iterator[Placement]:
    chunk = -(-num_experts // num_ranks)
    choices = []
    for rank in range(num_ranks):
        others = [expert for expert in range(num_experts) if expert // chunk != rank]
        choices.append([extra for count in range(slots + 1) for extra in itertools.combinations(others, count)])
    for placement in itertools.product(*choices):
        if max(map(len, owners(num_experts, placement))) <= MOST_COPIES:
            yield placement


def _one_by_one(loads: Sequence[int], num_ranks: int, slots: int) -> Placement:
    extra: list[list[int]] = [[] for _ in range(num_ranks)]
    held = owners(len(loads), ((),) * num_ranks)
    totals = _rank_loads(loads, ((),) * num_ranks)
    while True:
        busiest = totals.index(max(totals))
        tried = [
            (sorted(_totals_with(loads[expert], held[expert], rank, totals), reverse=True), expert, rank)
            for expert in range(len(loads))
            if busiest in held[expert] and len(held[expert]) < MOST_COPIES
            for rank in range(num_ranks)
            if rank not in held[expert] and len(extra[rank]) < slots
        ]
        # The busiest ranks may be several: the second of them counts where the first cannot be helped further.
        if not tried or min(tried)[0] >= sorted(totals, reverse=True):
            return tuple(tuple(sorted(each)) for each in extra)
        _, expert, rank = min(tried)
        totals = _totals_with(loads[expert], held[expert], rank, totals)
        held[expert] = sorted((*held[expert], rank))
        extra[rank].append(expert)


def _totals_with(load: int, ranks: list[int], rank: int, totals: list[int]) -> list[int]:
    """Return the loads of the ranks once `rank` has an expert too that `ranks` have."""
    changed, before, after = [*totals], load // len(ranks), load // (len(ranks) + 1)
    for each in ranks:
        changed[each] += after - before
    changed[rank] += after
    return changed
