"""Expert parallelism over slow links between nodes and fast links within a node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hp_dtensor.comm.mesh import as_group
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import current_world
from hp_moe.dispatch.all_to_all import AllToAllDispatcher
from hp_moe.dispatch.base import Dispatched, TokenDispatcher
from hp_moe.exceptions import ExpertParallelError
from hp_moe.routing import RefusedRouting, Routing

Tensor = Any


class TwoLevelDispatcher(TokenDispatcher):
    """Sends a token once to each node with experts for it, and from there to the ranks of the node.

    Results are summed within the node before they are sent back, so one row for each token and node is sent over the
    slow links in each direction. The host waits for the device twice, for the sizes of both levels.

    Args:
        group: the ranks that share the experts; rank i owns the i-th chunk, and the last ones may own none.
        num_experts: number of experts of all ranks.
        inner_size: number of ranks of a node; consecutive ranks of the group form a node.

    Raises:
        ExpertParallelError: `inner_size` does not divide the ranks.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        ...     nodes = functools.partial(TwoLevelDispatcher, inner_size=2)
        ...     ExpertParallel(nodes).apply(layer, init_device_mesh("cpu", (4,)))
        ...     return tuple(layer(platform.ops.ones((3, 4), platform.dtype("float32"))).shape)
        >>> import functools
        >>> run_ranks(program, 4)[0]
        (3, 4)
    """

    def __init__(self, group: ProcessGroup, num_experts: int, *, inner_size: int) -> None:
        group = as_group(group)
        assert group.platform is not None
        if inner_size < 1 or group.size % inner_size:
            raise ExpertParallelError(
                f"inner_size must divide the {group.size} ranks that share the experts, got {inner_size}"
            )
        self.platform = group.platform
        world = current_world(group.platform)
        node, place = divmod(group.rank, inner_size)
        chunk = -(-num_experts // group.size)
        node_chunk = chunk * inner_size
        of_node = max(0, min(node_chunk, num_experts - node * node_chunk))
        # Ranks with the same place in their nodes exchange between nodes, each for the tokens of its own rank.
        self.outer = AllToAllDispatcher(world.group(group.ranks[place::inner_size]), num_experts, chunk=node_chunk)
        inner = world.group(group.ranks[node * inner_size : (node + 1) * inner_size])
        self.inner = AllToAllDispatcher(inner, of_node, chunk=chunk)

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Send each token to the nodes, then to the ranks, of its experts; see `TokenDispatcher`."""
        try:
            arrived = self.outer.dispatch(x, routing)
        except RefusedRouting as refused:
            # Other ranks of this node are in other groups between nodes, and are informed here.
            self.inner.report_fault(refused.code, self.platform.device_of(x))
            raise
        assert arrived.permutation is not None
        # The keys are expert numbers within the node; experts of other nodes have the number of experts, which marks
        # dropped choices. Scores were already checked by the exchange between nodes.
        within = Routing(
            arrived.permutation.keys,
            arrived.sizes.tensor,
            arrived.scores,
            has_dropped=True,
            allow_nonfinite=True,
        )
        sent = self.inner.dispatch(arrived.rows, within)
        return replace(sent, outer=arrived, sent_bytes=sent.sent_bytes + arrived.sent_bytes)

    def report_fault(self, code: int, device: Any = None) -> None:
        """Send an error code instead of the sizes of both levels; see `TokenDispatcher`."""
        # In the order of `dispatch`: other ranks are in the exchange between nodes first.
        self.outer.report_fault(code, device)
        self.inner.report_fault(code, device)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Sum results within the node, then send them back; see `TokenDispatcher`."""
        assert dispatched.outer is not None
        return self.outer.combine(self.inner.combine(y, dispatched), dispatched.outer)
