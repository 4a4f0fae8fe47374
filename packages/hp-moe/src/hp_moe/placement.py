"""Which rank owns each expert, and which ranks hold copies of it, computed from measured loads.

Everything here is integer arithmetic on the host. Results depend on the arguments alone, so ranks that know the same
loads compute the same placement without communication.

An expert's position is its row in the weights `[num_experts, ...]` of all ranks; rank i owns the i-th chunk of
positions. Initially the position of an expert is its number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hp_moe.exceptions import ExpertParallelError

# The position of each expert.
ExpertPlacement = tuple[int, ...]
# The experts that each rank holds a copy of, ascending.
CopyPlacement = tuple[tuple[int, ...], ...]

# All placements of copies are tried if there are at most this many.
_MAX_TRIED = 1_000
# Maximum number of ranks that hold one expert. It bounds the least common multiple of these numbers, which is the
# length of the table by which tokens alternate between the ranks.
MAX_COPIES = 8


def place_experts(
    loads: Sequence[int], placement: Sequence[int], num_ranks: int, *, max_swaps: int = 8, min_gain: float = 0.05
) -> ExpertPlacement:
    """Return a placement of experts with a smaller peak load of a rank, found greedily by swaps of two experts.

    Each swap exchanges an expert of the busiest rank with one of another rank, such that the larger load of both ranks
    is as small as possible.

    Args:
        loads: tokens of each expert, summed over all ranks.
        placement: the current position of each expert.
        num_ranks: ranks that own the positions in chunks; the last ones may own fewer.
        max_swaps: maximum number of swaps; each moves the weights and optimizer states of two experts.
        min_gain: minimum reduction of the peak load by a swap, as a fraction of the mean load of a rank.

    Examples:
        >>> place_experts([50, 40, 1, 2], placement=range(4), num_ranks=2)  # separates experts 0 and 1
        (3, 1, 2, 0)
    """
    expert_at = inverse_permutation(placement)
    chunk = -(-len(expert_at) // num_ranks)
    load_at = [int(loads[expert]) for expert in expert_at]
    for _ in range(max_swaps):
        swap = _best_swap(load_at, chunk, num_ranks, min_gain * sum(load_at) / num_ranks)
        if swap is None:
            break
        for by_position in (load_at, expert_at):
            by_position[swap[0]], by_position[swap[1]] = by_position[swap[1]], by_position[swap[0]]
    return tuple(inverse_permutation(expert_at))


def check_placement(placement: Sequence[int], num_experts: int) -> ExpertPlacement:
    """Return the placement as a tuple, if it is a permutation of all positions."""
    if sorted(placement) != list(range(num_experts)):
        raise ExpertParallelError(
            f"expert placement: expected each position from 0 to {num_experts - 1} once, got {list(placement)}"
        )
    return tuple(int(position) for position in placement)


def inverse_permutation(placement: Sequence[int]) -> list[int]:
    """Return the expert at each position.

    Examples:
        >>> inverse_permutation((2, 0, 1))
        [1, 2, 0]
    """
    return sorted(range(len(placement)), key=lambda expert: placement[expert])


def _best_swap(load_at: list[int], chunk: int, num_ranks: int, min_gain: float) -> tuple[int, int] | None:
    """Return the positions to swap, or None if no swap gains enough. O(chunk * positions)."""
    totals = [sum(load_at[rank * chunk : (rank + 1) * chunk]) for rank in range(num_ranks)]
    busiest = totals.index(max(totals))
    on_busiest = range(busiest * chunk, min((busiest + 1) * chunk, len(load_at)))
    candidates = []
    for one, other in itertools.product(on_busiest, range(len(load_at))):
        # Load that leaves the busiest rank, if these two are swapped.
        moved = load_at[one] - load_at[other]
        larger = max(totals[busiest] - moved, totals[other // chunk] + moved)
        if other // chunk != busiest and moved > 0 and totals[busiest] - larger >= max(min_gain, 1):
            candidates.append((larger, one, other))
    # Ties are resolved by position, the same on all ranks.
    return min(candidates)[1:] if candidates else None


def place_copies(loads: Sequence[int], num_ranks: int, slots: int) -> CopyPlacement:
    """Return the experts that each rank holds a copy of, such that the peak load of a rank is small.

    Rank i owns the i-th chunk of the experts. The load of an expert is shared evenly by all ranks that hold it. Ties
    are resolved in favour of fewer copies, then of the first placement in lexicographic order. If there are few
    possible placements, all are tried; otherwise copies are added greedily, each where it reduces the peak load most.

    Args:
        loads: tokens of each expert, summed over all ranks.
        num_ranks: ranks that share the experts.
        slots: maximum number of copies on a rank.

    Examples:
        >>> place_copies([90, 10, 0, 0], num_ranks=2, slots=1)  # rank 1 helps with expert 0
        ((), (0,))
        >>> place_copies([10, 10, 10, 10], num_ranks=2, slots=1)
        ((), ())
    """
    # Loads are scaled by a multiple of every possible number of ranks that share an expert, so that shares are integers
    # and comparisons exact.
    unit = math.lcm(*range(1, min(num_ranks, MAX_COPIES) + 1))
    scaled = [int(load) * unit for load in loads]
    # A rank may hold any subset of at most `slots` of the experts that it does not own.
    not_owned = len(loads) - -(-len(loads) // num_ranks)
    per_rank = sum(math.comb(not_owned, count) for count in range(slots + 1))
    if per_rank**num_ranks <= _MAX_TRIED:
        return min(
            _all_placements(len(loads), num_ranks, slots),
            key=lambda each: (max(_rank_loads(scaled, each)), sum(map(len, each)), each),
        )
    return _place_greedily(scaled, num_ranks, slots)


def busiest_load(loads: Sequence[int], copies: CopyPlacement) -> float:
    """Return the peak load of a rank if each expert's load is shared evenly by the ranks that hold it.

    Examples:
        >>> busiest_load([90, 10, 10, 10], ((), (0,)))  # half of expert 0, and two experts
        65.0
    """
    unit = math.lcm(*range(1, len(copies) + 1))
    return max(_rank_loads([load * unit for load in loads], copies)) / unit


def ranks_of_experts(num_experts: int, copies: CopyPlacement) -> list[list[int]]:
    """Return for each expert the ranks that own it or hold a copy, ascending.

    Examples:
        >>> ranks_of_experts(4, ((), (0,)))
        [[0, 1], [0], [1], [1]]
    """
    chunk = -(-num_experts // len(copies))
    return [
        sorted({expert // chunk, *(rank for rank, copied in enumerate(copies) if expert in copied)})
        for expert in range(num_experts)
    ]


def _rank_loads(loads: Sequence[int], copies: CopyPlacement) -> list[int]:
    """Return the load of each rank, in units in which all shares are integers."""
    totals = [0] * len(copies)
    for load, ranks in zip(loads, ranks_of_experts(len(loads), copies), strict=True):
        for rank in ranks:
            # Exact: loads are multiples of every possible number of ranks.
            totals[rank] += load // len(ranks)
    return totals


def _all_placements(num_experts: int, num_ranks: int, slots: int) -> Iterator[CopyPlacement]:
    """Yield every placement with at most `slots` copies per rank and `MAX_COPIES` holders per expert."""
    chunk = -(-num_experts // num_ranks)
    choices = []
    for rank in range(num_ranks):
        others = [expert for expert in range(num_experts) if expert // chunk != rank]
        choices.append([copied for count in range(slots + 1) for copied in itertools.combinations(others, count)])
    for copies in itertools.product(*choices):
        if max(map(len, ranks_of_experts(num_experts, copies))) <= MAX_COPIES:
            yield copies


def _place_greedily(loads: Sequence[int], num_ranks: int, slots: int) -> CopyPlacement:
    """Add one copy after the other, each of an expert of the busiest rank, while that reduces the loads."""
    copies: list[list[int]] = [[] for _ in range(num_ranks)]
    held = ranks_of_experts(len(loads), ((),) * num_ranks)
    totals = _rank_loads(loads, ((),) * num_ranks)
    while True:
        busiest = totals.index(max(totals))
        candidates = [
            (sorted(_totals_with(loads[expert], held[expert], rank, totals), reverse=True), expert, rank)
            for expert in range(len(loads))
            if busiest in held[expert] and len(held[expert]) < MAX_COPIES
            for rank in range(num_ranks)
            if rank not in held[expert] and len(copies[rank]) < slots
        ]
        # Loads are compared as sorted lists: if several ranks share the peak load, a copy that relieves one of them
        # does not reduce the maximum, but is progress.
        if not candidates or min(candidates)[0] >= sorted(totals, reverse=True):
            return tuple(tuple(sorted(each)) for each in copies)
        _, expert, rank = min(candidates)
        totals = _totals_with(loads[expert], held[expert], rank, totals)
        held[expert] = sorted((*held[expert], rank))
        copies[rank].append(expert)


def _totals_with(load: int, ranks: list[int], rank: int, totals: list[int]) -> list[int]:
    """Return the loads of all ranks after `rank` gets a copy of an expert that `ranks` hold."""
    # All holders share the load evenly, so each earlier holder is relieved.
    changed, before, after = [*totals], load // len(ranks), load // (len(ranks) + 1)
    for each in ranks:
        changed[each] += after - before
    changed[rank] += after
    return changed
