"""Choice of a dispatcher: the registry of names, a cost model, and `AutoDispatcher`, which selects the fastest.

With P ranks, K experts per token, evenly chosen from E, and rows of B bytes, a token sends per direction, on average:

- one copy per expert: `K * B * (P - 1) / P`;
- one row per rank: `D * B * (P - 1) / P`, where `D = P * (1 - C(E - E/P, K) / C(E, K))` ranks have experts for it;
- all-gather and reduce-scatter: `(P - 1) * B`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.links import Links
from hp_dtensor.comm.mesh import as_group
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.platform.registry import Registry, fill_registry
from hp_moe.dispatch.all_gather import AllGatherDispatcher
from hp_moe.dispatch.all_to_all import AllToAllDispatcher, CopyPerExpertDispatcher
from hp_moe.dispatch.base import ChunkedDispatcher, Dispatched, TokenDispatcher
from hp_moe.dispatch.two_level import TwoLevelDispatcher
from hp_moe.exceptions import ExpertParallelError
from hp_moe.plugins import plugin_manager
from hp_moe.routing import RefusedRouting, Routing, is_on_host

Tensor = Any
_KINDS: dict[str, type[AllToAllDispatcher | AllGatherDispatcher]] = {
    "copy_per_expert": CopyPerExpertDispatcher,
    "all_gather": AllGatherDispatcher,
}


class AutoDispatcher(TokenDispatcher):
    """Selects the fastest dispatcher by the cost model at the first call, in the same way on all ranks.

    Args:
        group: the ranks that share the experts; rank i owns the i-th chunk, and the last ones may own none.
        num_experts: number of experts of all ranks.
        rates: None for the defaults of `DispatchRates`, or of `DispatchRates.between_processes` on the CPU. Use
            `functools.partial(AutoDispatcher, rates=...)` to pass them to a style.
        num_chunks: number of chunks for `all_to_all`; None to choose it too.

    Attributes:
        expert_flop: floating-point operations of one expert for one row, set by the style, from which the computation
            that overlaps with communication is estimated.
        reason: the selected dispatcher and the bytes that each one sends per token; empty before the first call.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=4)
        ...     ExpertParallel("auto").apply(layer, init_device_mesh("cpu", (2,)))
        ...     y = layer(platform.ops.ones((3, 4), platform.dtype("float32")))
        ...     return layer.experts.dispatcher.reason
        >>> run_ranks(program, 2)[0]
        'all_to_all: 64 bytes per token and forward; copy_per_expert 80, all_gather 80'
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_experts: int,
        *,
        rates: DispatchRates | None = None,
        num_chunks: int | None = None,
    ) -> None:
        group = as_group(group)
        assert group.platform is not None
        self.rates = rates
        self._wanted_chunks = num_chunks
        self.expert_flop = 0
        self.group = group
        self.platform = group.platform
        self.num_experts = num_experts
        self.reason = ""
        self._chosen: TokenDispatcher | None = None

    @property
    def num_chunks(self) -> int:
        """Number of chunks; 1 before the first call, and for dispatchers that do not send in chunks."""
        return self._chosen.num_chunks if isinstance(self._chosen, ChunkedDispatcher) else 1

    def resolve(self, x: Tensor, routing: Routing) -> TokenDispatcher:
        """Select a dispatcher at the first call, a collective of all ranks; see `TokenDispatcher`."""
        if self._chosen is None:
            # The mean over all ranks, so that all of them choose the same dispatcher. Not every slot has an expert.
            choices = int(self.platform.to_numpy(routing.counts).sum())
            tokens, choices = self._totals(0, int(x.shape[0]), choices)
            top_k = max(1, round(choices / max(1, tokens)))
            self._chosen = self._choose(x, top_k, max(1, tokens // self.group.size))
        return self._chosen

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        return self.resolve(x, routing).dispatch(x, routing)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        assert self._chosen is not None
        return self._chosen.combine(y, dispatched)

    def report_fault(self, code: int, device: Any = None) -> None:
        """Report a fault with the selected dispatcher, or in the collective that selects one."""
        if self._chosen is None:
            self._totals(code, 0, 0)
        else:
            self._chosen.report_fault(code, device)

    def _totals(self, code: int, num_tokens: int, num_choices: int) -> tuple[int, int]:
        """Return the tokens and the choices of all ranks; raise if any rank reports a fault (`code`, 0 for none)."""
        # On the host, before any tensor is sent: the codes and numbers of all ranks as text.
        mine = f"{code} {num_tokens} {num_choices}".encode()
        every = [tuple(map(int, each.split())) for each in self.group.all_gather_bytes(mine)]
        codes = {each[0] for each in every} - {0}
        # The rank with the fault raises its own error.
        if codes and code == 0:
            raise RefusedRouting(sorted(codes))
        return sum(each[1] for each in every), sum(each[2] for each in every)

    def _choose(self, x: Tensor, top_k: int, tokens: int) -> TokenDispatcher:
        """Build the dispatcher with the smallest estimated time for `tokens` tokens per rank."""
        experts, ranks, rates = self.num_experts, self.group.size, self.rates
        if rates is None:
            # By the device: processes on the CPU, or accelerators.
            rates = DispatchRates.between_processes() if is_on_host(self.platform, x) else DispatchRates()
        row_bytes = int(x.shape[1]) * self.platform.itemsize(x.dtype)
        costs = dispatch_costs(tokens, row_bytes, experts, min(top_k, experts), ranks, rates)
        self.reason = explain(costs, tokens)
        name = costs[0].name
        if name == "two_level":
            assert rates.inner_size is not None
            return TwoLevelDispatcher(self.group, experts, inner_size=rates.inner_size)
        if name == "all_to_all":
            chunks = self._chunks(costs[0], tokens * top_k * self.expert_flop / rates.flops, rates)
            return AllToAllDispatcher(self.group, experts, num_chunks=chunks)
        return _KINDS[name](self.group, experts)

    def _chunks(self, cost: DispatchCost, expert_seconds: float, rates: DispatchRates) -> int:
        """Return the number of chunks to use, and add the reason to `reason`."""
        # The cost is four latencies and the time of sending in both directions.
        sent_seconds = (cost.seconds - 4 * rates.latency) / 2
        chunks, seconds = best_num_chunks(sent_seconds, expert_seconds, rates)
        if self._wanted_chunks is not None:
            chunks = self._wanted_chunks
        elif chunks > 1:
            alone = 2 * sent_seconds + expert_seconds + 4 * rates.latency
            self.reason += f"; in {chunks} chunks, {seconds * 1e3:.2g} ms with the experts instead of {alone * 1e3:.2g}"
        return chunks


# Axes of the links between ranks that share experts: to other nodes (all ranks if nodes are unknown), and in a node.
EP, EP_INNER = "ep", "ep_inner"
# One network link of a node's rank, and the links in a node.
DISPATCH_LINKS = Links(latency=2e-5, bandwidth={EP: 10e9, EP_INNER: 100e9})


@dataclass(frozen=True)
class DispatchRates:
    """Rates by which dispatchers are compared: of the links between ranks, and of the ranks' devices.

    Attributes:
        links: latency and bandwidth along the axes `"ep"` (ranks that share experts) and `"ep_inner"` (those of one
            node), set by hand or measured (`hp_dtensor.comm.links.measure_links` of a mesh with these axes). An axis
            that is not named, and a latency that is not given, have the defaults of `Links`.
        inner_size: number of ranks of a node; None if all links are those of `"ep"`.
        gather_bandwidth: bytes per second of an all-gather or reduce-scatter to other nodes, which hardware may speed
            up; None for the bandwidth of `"ep"`.
        copy_bandwidth: bytes per second of copies in local memory, which sort rows by rank and back; an all-gather
            needs none.
        flops: floating-point operations per second of the experts.

    Examples:
        >>> nodes = DispatchRates(Links(bandwidth={"ep": 25e9, "ep_inner": 300e9}), inner_size=8)
        >>> dispatch_costs(4096, 14336, num_experts=256, top_k=8, num_ranks=64, rates=nodes)[0].name  # DeepSeek-V3
        'two_level'
    """

    links: Links = DISPATCH_LINKS
    inner_size: int | None = None
    gather_bandwidth: float | None = None
    copy_bandwidth: float = 1e12
    flops: float = 3e14

    @classmethod
    def between_processes(cls) -> DispatchRates:
        """Return the default rates on the CPU, measured between gloo processes on two cores."""
        # gloo implements a reduce-scatter by sends and sums, which is slower.
        links = Links(latency=5e-4, bandwidth={EP: 2e9, EP_INNER: 100e9})
        return cls(links, gather_bandwidth=8e8, copy_bandwidth=4e9, flops=5e10)

    @property
    def latency(self) -> float:
        """Seconds that an exchange between all ranks takes at least."""
        return self.links.latency_along(EP)


@dataclass(frozen=True)
class DispatchCost:
    """Estimated cost of one layer's forward with one dispatcher.

    Examples:
        >>> DispatchCost("all_to_all", sent_bytes=1e6, seconds=1e-4).name
        'all_to_all'

    Attributes:
        name: name of the dispatcher; `two_level` only if `DispatchRates.inner_size` is given.
        sent_bytes: mean bytes of rows that one rank sends, for its own tokens and in results for others.
        seconds: time of these bytes, of local copies and of the collectives' latency.
    """

    name: str
    sent_bytes: float
    seconds: float


def ranks_per_token(num_experts: int, top_k: int, num_ranks: int) -> float:
    """Return the mean number of ranks with experts for a token, for uniformly chosen distinct experts.

    Examples:
        >>> round(ranks_per_token(num_experts=256, top_k=8, num_ranks=8), 2)  # DeepSeek-V3
        5.29
    """
    return _reached(num_experts, top_k, num_ranks, -(-num_experts // num_ranks))


# Cached: a search of layouts asks for the same numbers of ranks thousands of times.
@functools.lru_cache(maxsize=1024)
def _reached(num_experts: int, top_k: int, owners: int, chunk: int) -> float:
    """Return the mean number of owners with experts for a token, if each owns `chunk` consecutive experts."""
    # 1 - C(E - own, K) / C(E, K) is the probability that at least one of K distinct experts is among the own ones.
    owned = [max(0, min(chunk, num_experts - owner * chunk)) for owner in range(owners)]
    return sum(1 - math.comb(num_experts - own, top_k) / math.comb(num_experts, top_k) for own in owned)


@dataclass(frozen=True)
class SentRows:
    """The rows that a dispatcher sends of a token in one direction, on average over ranks.

    Examples:
        >>> sent_rows(num_experts=8, top_k=2, num_ranks=8)["copy_per_expert"].outer
        1.75

    Attributes:
        outer: rows sent to ranks of other nodes; to all others if nodes are unknown.
        inner: rows sent within the node.
        copied: rows copied in local memory.
        exchanges: number of collectives in dispatch and combine.
        choices: bytes of experts and scores that go with a row to the experts.
    """

    outer: float
    inner: float
    copied: float
    exchanges: int
    choices: int


def sent_rows(num_experts: int, top_k: int, num_ranks: int, inner_size: int | None = None) -> dict[str, SentRows]:
    """Return what each dispatcher sends of a token, by its name; see `dispatch_costs`.

    Args:
        inner_size: number of ranks of a node; None: unknown, and there is no `two_level`.
    """
    node = inner_size or 1
    outside, inside = (num_ranks - node) / num_ranks, (node - 1) / num_ranks
    reached = ranks_per_token(num_experts, top_k, num_ranks)
    found = {
        # Rows per direction as in the equations at the top of this module.
        "all_to_all": SentRows(reached * outside, reached * inside, reached, 4, 8 * top_k),
        "copy_per_expert": SentRows(top_k * outside, top_k * inside, 2 * top_k, 4, 8),
        "all_gather": SentRows(num_ranks - node, node - 1, 0, 5, 12 * top_k),
    }
    # Two levels need nodes of equal size.
    if node > 1 and num_ranks % node == 0:
        nodes = num_ranks // node
        to_nodes = _reached(num_experts, top_k, nodes, -(-num_experts // num_ranks) * node) * (nodes - 1) / nodes
        found["two_level"] = SentRows(to_nodes, reached * (node - 1) / node, 2 * reached, 8, 8 * top_k)
    return found


def dispatch_costs(
    num_tokens: int, row_bytes: int, num_experts: int, top_k: int, num_ranks: int, rates: DispatchRates | None = None
) -> list[DispatchCost]:
    """Return the costs of the dispatchers that do not round, the fastest one first.

    Args:
        num_tokens: number of tokens of one rank.
        row_bytes: bytes of one row.
        rates: None for the defaults, 10 GB/s between any two ranks.

    Examples:
        >>> costs = dispatch_costs(num_tokens=4096, row_bytes=4096, num_experts=128, top_k=8, num_ranks=8)
        >>> costs[0].name
        'all_to_all'
    """
    rates = rates or DispatchRates()
    between, within_node = (rates.links.bandwidth_along(axis) for axis in (EP, EP_INNER))
    costs = []
    for name, rows in sent_rows(num_experts, top_k, num_ranks, rates.inner_size).items():
        # There and back; experts and scores go there only.
        row = 2 * row_bytes + rows.choices
        outer = (rates.gather_bandwidth if name == "all_gather" else None) or between
        sending = rows.outer * row / outer + rows.inner * row / within_node
        seconds = num_tokens * (sending + 2 * rows.copied * row_bytes / rates.copy_bandwidth)
        sent_bytes = num_tokens * (rows.outer + rows.inner) * row
        costs.append(DispatchCost(name, sent_bytes, seconds + rows.exchanges * rates.latency))
    return sorted(costs, key=lambda cost: cost.seconds)


def best_num_chunks(
    sent_seconds: float, expert_seconds: float, rates: DispatchRates, most: int = 8
) -> tuple[int, float]:
    """Return the fastest number of chunks, a power of two, and the seconds of dispatch, experts and combine.

    With C chunks, either communication is hidden behind computation except for sending the first chunk and returning
    the last one, or computation is hidden except for one chunk. Each chunk costs three collectives, and the sizes one.

    Args:
        sent_seconds: time of sending the rows of all chunks, in one direction.
        expert_seconds: time of the overlapping computation, including shared experts.

    Examples:
        >>> best_num_chunks(sent_seconds=2e-3, expert_seconds=4e-3, rates=DispatchRates())[0]
        8
        >>> best_num_chunks(sent_seconds=2e-6, expert_seconds=4e-3, rates=DispatchRates())[0]
        1
    """

    def seconds(chunks: int) -> float:
        # The first form if computation is longer, the second if communication is.
        hidden = max(expert_seconds + 2 * sent_seconds / chunks, 2 * sent_seconds + expert_seconds / chunks)
        return hidden + (1 + 3 * chunks) * rates.latency

    candidates = [2**power for power in range(most.bit_length())]
    return min(((chunks, seconds(chunks)) for chunks in candidates), key=lambda pair: pair[1])


def explain(costs: list[DispatchCost], num_tokens: int) -> str:
    """Return a description of the bytes that each dispatcher sends per token, the selected one first."""
    best, *others = costs
    rest = ", ".join(f"{cost.name} {cost.sent_bytes / num_tokens:.0f}" for cost in others)
    return f"{best.name}: {best.sent_bytes / num_tokens:.0f} bytes per token and forward; {rest}"


@functools.cache
def dispatchers() -> Registry:
    """Return the registry of token dispatchers, filled on first use.

    `build(group, num_experts)` of an entry creates the `TokenDispatcher` of a process group.
    """
    registry = Registry("token dispatcher", "hp_moe", ExpertParallelError)
    registry.add("all_to_all", AllToAllDispatcher)
    registry.add("copy_per_expert", CopyPerExpertDispatcher)
    registry.add("all_gather", AllGatherDispatcher)
    for name in ("int8", "fp8"):
        registry.add(f"all_to_all_{name}", functools.partial(AllToAllDispatcher, wire_format=name))
    registry.add("auto", AutoDispatcher)
    return fill_registry(registry, plugin_manager(), "hp_token_dispatcher")
