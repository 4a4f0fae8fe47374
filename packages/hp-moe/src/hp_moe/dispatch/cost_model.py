"""Bytes and time of the dispatchers, by formula, and the choice of the quickest.

With P ranks, K experts per token, evenly chosen from E, and rows of B bytes, a token sends per direction, on average:

- one copy per expert: `K * B * (P - 1) / P`;
- one row per rank: `D * B * (P - 1) / P`, where `D = P * (1 - C(E - E/P, K) / C(E, K))` ranks have experts for it;
- all-gather and reduce-scatter: `(P - 1) * B`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Rates of the links between the ranks.

    Attributes:
        bytes_per_second: what one rank sends by an all-to-all to other nodes.
        gathered_bytes_per_second: the same by an all-gather or reduce-scatter, which hardware may speed up; None:
            equal.
        seconds_per_exchange: what a collective costs, however little it sends.
        inner_size: ranks of a node; None: all links are alike.
        inner_bytes_per_second: what one rank sends within a node.
        copied_bytes_per_second: what one rank copies in its own memory: rows into the order of their ranks and back,
            which an all-gather does without.
        flop_per_second: what one rank computes of experts.

    Example:
        >>> nodes = Link(bytes_per_second=25e9, inner_size=8, inner_bytes_per_second=300e9)
        >>> dispatch_costs(4096, 14336, num_experts=256, top_k=8, num_ranks=64, link=nodes)[0].name  # DeepSeek-V3
        'two_level'
    """

    bytes_per_second: float = 10e9
    gathered_bytes_per_second: float | None = None
    seconds_per_exchange: float = 2e-5
    inner_size: int | None = None
    inner_bytes_per_second: float = 100e9
    copied_bytes_per_second: float = 1e12
    flop_per_second: float = 3e14

    @classmethod
    def between_processes(cls) -> Link:
        """Return rates between processes of one machine, as measured by gloo on two cores; the default on the CPU."""
        # A reduce-scatter is put together from sends and sums there.
        return cls(2e9, 8e8, seconds_per_exchange=5e-4, copied_bytes_per_second=4e9, flop_per_second=5e10)


@dataclass(frozen=True)
class DispatchCost:
    """The forward of one layer by one dispatcher.

    Example:
        >>> DispatchCost("all_to_all", sent_bytes=1e6, seconds=1e-4).name
        'all_to_all'

    Attributes:
        name: of the dispatcher; `two_level` where nodes are told.
        sent_bytes: rows that one rank sends for its tokens and returns for others', on average.
        seconds: of those and of the exchanges.
    """

    name: str
    sent_bytes: float
    seconds: float


def ranks_per_token(num_experts: int, top_k: int, num_ranks: int) -> float:
    """Return the mean number of ranks that have experts for a token, for evenly chosen distinct experts.

    Example:
        >>> round(ranks_per_token(num_experts=256, top_k=8, num_ranks=8), 2)  # DeepSeek-V3
        5.29
    """
    return _reached(num_experts, top_k, num_ranks, -(-num_experts // num_ranks))


def _reached(num_experts: int, top_k: int, owners: int, chunk: int) -> float:
    """Return the mean number of owners of `chunk` consecutive experts each that have experts for a token."""
    owned = [max(0, min(chunk, num_experts - owner * chunk)) for owner in range(owners)]
    return sum(1 - math.comb(num_experts - own, top_k) / math.comb(num_experts, top_k) for own in owned)


def dispatch_costs(
    num_tokens: int, row_bytes: int, num_experts: int, top_k: int, num_ranks: int, link: Link | None = None
) -> list[DispatchCost]:
    """Return the costs of the dispatchers that do not round, the quickest first.

    Args:
        num_tokens: of one rank.
        row_bytes: bytes of one row.
        link: rates; None: 10 GB/s between any two ranks.

    Example:
        >>> costs = dispatch_costs(num_tokens=4096, row_bytes=4096, num_experts=128, top_k=8, num_ranks=8)
        >>> costs[0].name
        'all_to_all'
    """
    link = link or Link()
    # Rows of a token to other nodes, within the node and copied; exchanges; bytes of experts and scores in a row.
    node = 1 if link.inner_size is None else link.inner_size
    outside, inside = (num_ranks - node) / num_ranks, (node - 1) / num_ranks
    reached = ranks_per_token(num_experts, top_k, num_ranks)
    plans = {
        "all_to_all": (reached * outside, reached * inside, reached, 4, 8 * top_k),
        "copy_per_expert": (top_k * outside, top_k * inside, 2 * top_k, 4, 8),
        "all_gather": (num_ranks - node, node - 1, 0, 5, 12 * top_k),
    }
    if node > 1 and num_ranks % node == 0:
        nodes = num_ranks // node
        to_nodes = _reached(num_experts, top_k, nodes, -(-num_experts // num_ranks) * node) * (nodes - 1) / nodes
        plans["two_level"] = (to_nodes, reached * (node - 1) / node, 2 * reached, 8, 8 * top_k)
    costs = []
    for name, (to_others, within, copied, exchanges, choices) in plans.items():
        row = 2 * row_bytes + choices
        rate = link.gathered_bytes_per_second if name == "all_gather" else None
        seconds = to_others * row / (rate or link.bytes_per_second) + within * row / link.inner_bytes_per_second
        seconds += 2 * copied * row_bytes / link.copied_bytes_per_second
        sent_bytes = num_tokens * (to_others + within) * row
        costs.append(DispatchCost(name, sent_bytes, num_tokens * seconds + exchanges * link.seconds_per_exchange))
    return sorted(costs, key=lambda cost: cost.seconds)


def best_num_chunks(sent_seconds: float, expert_seconds: float, link: Link, most: int = 8) -> tuple[int, float]:
    """Return the number of chunks, a power of two, in which tokens are quickest there and back, and the seconds.

    Of C chunks either all travel while experts work, and the first one's way there and the last one's way back are
    added; or experts work on all but one while rows travel, and that one's work is added. Every chunk costs three
    exchanges, and sizes one.

    Args:
        sent_seconds: of the rows of all chunks, one way.
        expert_seconds: of the work meanwhile, shared experts included.

    Example:
        >>> best_num_chunks(sent_seconds=2e-3, expert_seconds=4e-3, link=Link())[0]
        8
        >>> best_num_chunks(sent_seconds=2e-6, expert_seconds=4e-3, link=Link())[0]
        1
    """

    def seconds(chunks: int) -> float:
        hidden = max(expert_seconds + 2 * sent_seconds / chunks, 2 * sent_seconds + expert_seconds / chunks)
        return hidden + (1 + 3 * chunks) * link.seconds_per_exchange

    candidates = [2**power for power in range(most.bit_length())]
    return min(((chunks, seconds(chunks)) for chunks in candidates), key=lambda pair: pair[1])


def explain(costs: list[DispatchCost], num_tokens: int) -> str:
    """Return the choice in words: what each dispatcher sends per token, the chosen one first."""
    best, *others = costs
    told = ", ".join(f"{cost.name} {cost.sent_bytes / num_tokens:.0f}" for cost in others)
    return f"{best.name}: {best.sent_bytes / num_tokens:.0f} bytes per token and forward; {told}"
