"""The dispatcher that is the quickest by the cost model."""

from __future__ import annotations

from typing import Any

from hp_dtensor.comm.process_group import ProcessGroup
from hp_moe.dispatch.all_gather import AllGatherDispatcher
from hp_moe.dispatch.all_to_all import AllToAllDispatcher
from hp_moe.dispatch.base import Dispatched, TokenDispatcher
from hp_moe.dispatch.copy_per_expert import CopyPerExpertDispatcher
from hp_moe.dispatch.cost_model import Link, dispatch_costs, explain
from hp_moe.dispatch.two_level import TwoLevelDispatcher
from hp_moe.routing import Routing
from hp_moe.routing_checks import RefusedRouting

Tensor = Any
_KINDS: dict[str, type[AllToAllDispatcher | AllGatherDispatcher]] = {
    "all_to_all": AllToAllDispatcher,
    "copy_per_expert": CopyPerExpertDispatcher,
    "all_gather": AllGatherDispatcher,
}


class AutoDispatcher(TokenDispatcher):
    """Chooses a dispatcher at the first call, from the sizes that all ranks have in common.

    Args:
        group: the ranks that share the experts; rank i owns the i-th chunk, and the last ones may own none.
        num_experts: number of experts of all ranks together.
        link: rates of the links; `functools.partial(AutoDispatcher, link=...)` gives a style its own.

    Attributes:
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

    def __init__(self, group: ProcessGroup, num_experts: int, *, link: Link | None = None) -> None:
        assert group.platform is not None
        self.link = link or Link()
        self.group = group
        self.platform = group.platform
        self.num_experts = num_experts
        self.reason = ""
        self._chosen: TokenDispatcher | None = None

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Send tokens by the chosen dispatcher; see `TokenDispatcher`."""
        if self._chosen is None:
            row_bytes = int(x.shape[1]) * self.platform.itemsize(x.dtype)
            self._begin(0)
            self._chosen = self._choose(row_bytes, int(routing.experts.shape[1]))
        return self._chosen.dispatch(x, routing)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Return results by the chosen dispatcher; see `TokenDispatcher`."""
        assert self._chosen is not None
        return self._chosen.combine(y, dispatched)

    def report_fault(self, code: int, device: Any = None) -> None:
        """Let the chosen dispatcher tell the other ranks; see `TokenDispatcher`."""
        if self._chosen is None:
            self._begin(code)
        else:
            self._chosen.report_fault(code, device)

    def _begin(self, code: int) -> None:
        """Hear before the first choice of ranks that cannot make it; `code` is this rank's fault, or 0."""
        codes = [int(each) for each in self.group.all_gather_bytes(str(code).encode())]
        if code == 0 and any(codes):
            raise RefusedRouting(sorted({*codes} - {0}))

    def _choose(self, row_bytes: int, top_k: int) -> TokenDispatcher:
        # A number of tokens that does not differ between ranks, and is large enough for rates to decide.
        tokens, experts = 4096, self.num_experts
        costs = dispatch_costs(tokens, row_bytes, experts, min(top_k, experts), self.group.size, self.link)
        self.reason = explain(costs, tokens)
        if costs[0].name == "two_level":
            assert self.link.inner_size is not None
            return TwoLevelDispatcher(self.group, experts, inner_size=self.link.inner_size)
        return _KINDS[costs[0].name](self.group, experts)
