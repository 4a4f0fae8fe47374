"""The dispatcher that is the quickest by the cost model."""

from __future__ import annotations

from typing import Any

from hp_dtensor.comm.process_group import ProcessGroup
from hp_moe.dispatch.all_gather import AllGatherDispatcher
from hp_moe.dispatch.all_to_all import AllToAllDispatcher
from hp_moe.dispatch.base import ChunkedDispatcher, Dispatched, TokenDispatcher
from hp_moe.dispatch.copy_per_expert import CopyPerExpertDispatcher
from hp_moe.dispatch.cost_model import DispatchCost, Link, best_num_chunks, dispatch_costs, explain
from hp_moe.dispatch.two_level import TwoLevelDispatcher
from hp_moe.routing import Routing
from hp_moe.routing_checks import RefusedRouting, is_on_host

Tensor = Any
_KINDS: dict[str, type[AllToAllDispatcher | AllGatherDispatcher]] = {
    "copy_per_expert": CopyPerExpertDispatcher,
    "all_gather": AllGatherDispatcher,
}


class AutoDispatcher(TokenDispatcher):
    """Chooses a dispatcher at the first call, from the sizes that all ranks have in common.

    Args:
        group: the ranks that share the experts; rank i owns the i-th chunk, and the last ones may own none.
        num_experts: number of experts of all ranks together.
        link: rates of the links; None: those of `Link`, on the CPU those of `Link.between_processes`.
            `functools.partial(AutoDispatcher, link=...)` gives a style its own.
        num_chunks: parts that tokens travel in by `all_to_all`; None: chosen too.

    Attributes:
        expert_flop: multiplications and additions of one expert for one row, which a style sets; they tell how much
            work there is while rows travel.
        reason: which one was chosen, and what each sends per token; empty before the first call.

    Example:
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
        self, group: ProcessGroup, num_experts: int, *, link: Link | None = None, num_chunks: int | None = None
    ) -> None:
        assert group.platform is not None
        self.link = link
        self._wanted_chunks = num_chunks
        self.expert_flop = 0
        self.group = group
        self.platform = group.platform
        self.num_experts = num_experts
        self.reason = ""
        self._chosen: TokenDispatcher | None = None

    @property
    def num_chunks(self) -> int:
        """Parts that tokens travel in; 1 before the first call, and by dispatchers that send all at once."""
        return self._chosen.num_chunks if isinstance(self._chosen, ChunkedDispatcher) else 1

    def chosen(self, x: Tensor, routing: Routing) -> TokenDispatcher:
        """Choose at the first call, on all ranks together; see `TokenDispatcher`."""
        if self._chosen is None:
            mean_tokens = max(1, self._mean_tokens(0, int(x.shape[0])))
            self._chosen = self._choose(x, int(routing.experts.shape[1]), mean_tokens)
        return self._chosen

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Send tokens by the chosen dispatcher; see `TokenDispatcher`."""
        return self.chosen(x, routing).dispatch(x, routing)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Return results by the chosen dispatcher; see `TokenDispatcher`."""
        assert self._chosen is not None
        return self._chosen.combine(y, dispatched)

    def report_fault(self, code: int, device: Any = None) -> None:
        """Let the chosen dispatcher tell the other ranks; see `TokenDispatcher`."""
        if self._chosen is None:
            self._mean_tokens(code, 0)
        else:
            self._chosen.report_fault(code, device)

    def _mean_tokens(self, code: int, num_tokens: int) -> int:
        """Hear of all ranks' tokens, or of ranks that cannot choose; `code` is this rank's fault, or 0."""
        every = [tuple(map(int, each.split())) for each in self.group.all_gather_bytes(f"{code} {num_tokens}".encode())]
        codes = {each[0] for each in every} - {0}
        if codes and code == 0:
            raise RefusedRouting(sorted(codes))
        return sum(each[1] for each in every) // len(every)

    def _choose(self, x: Tensor, top_k: int, tokens: int) -> TokenDispatcher:
        link, experts, ranks = self._link(x), self.num_experts, self.group.size
        row_bytes = int(x.shape[1]) * self.platform.itemsize(x.dtype)
        costs = dispatch_costs(tokens, row_bytes, experts, min(top_k, experts), ranks, link)
        self.reason = explain(costs, tokens)
        name = costs[0].name
        if name == "two_level":
            assert link.inner_size is not None
            return TwoLevelDispatcher(self.group, experts, inner_size=link.inner_size)
        if name == "all_to_all":
            chunks = self._chunks(costs[0], tokens * top_k * self.expert_flop / link.flop_per_second, link)
            return AllToAllDispatcher(self.group, experts, num_chunks=chunks)
        return _KINDS[name](self.group, experts)

    def _chunks(self, cost: DispatchCost, expert_seconds: float, link: Link) -> int:
        sent_seconds = (cost.seconds - 4 * link.seconds_per_exchange) / 2
        chunks, seconds = best_num_chunks(sent_seconds, expert_seconds, link)
        if self._wanted_chunks is not None:
            chunks = self._wanted_chunks
        elif chunks > 1:
            alone = 2 * sent_seconds + expert_seconds + 4 * link.seconds_per_exchange
            self.reason += f"; in {chunks} chunks, {seconds * 1e3:.2g} ms with the experts instead of {alone * 1e3:.2g}"
        return chunks

    def _link(self, x: Tensor) -> Link:
        if self.link is not None:
            return self.link
        return Link.between_processes() if is_on_host(self.platform, x) else Link()
