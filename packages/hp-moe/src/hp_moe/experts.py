"""The experts of one layer, as grouped matrix products."""

from __future__ import annotations

from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.parallel import nn
from hp_moe.dispatch import Dispatched, LocalDispatcher, TokenDispatcher
from hp_moe.exceptions import ExpertParallelError
from hp_moe.expert_hooks import local_weight
from hp_moe.fused_experts import fused_experts
from hp_moe.grouped_gemm import GroupSizes, grouped_matmul
from hp_moe.router import Routing

Tensor = Any


class GroupedExperts(nn.Module):
    """`num_experts` SwiGLU networks; a parallel style lays their weights and the way to them over a mesh.

    Weights are `w1`, `w3` `[num_experts, hidden_dim, dim]` and `w2` `[num_experts, dim, hidden_dim]`.

    Args:
        score_before_experts: weight an expert's input with the token's score instead of its output.

    Attributes:
        dispatcher: takes rows to their experts; a style that spreads the experts replaces it.
        partial_mesh: 1-D mesh over which each expert's hidden dimension is cut: every rank then takes the
            same rows and returns a part of the sum, which `MoE` (or the caller) reduces; None: not cut.

    Example:
        >>> with nn.building(platform):
        ...     experts = GroupedExperts(dim=4, hidden_dim=8, num_experts=2)
        >>> rows = platform.ops.ones((3, 4), platform.dtype("float32"))
        >>> tuple(experts(rows, platform.from_numpy(np.array([2, 1]))).shape)  # 2 rows for expert 0, 1 for expert 1
        (3, 4)
    """

    dispatcher: TokenDispatcher
    partial_mesh: DeviceMesh | None

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, score_before_experts: bool = False) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.score_before_experts = score_before_experts
        self.w1 = self.parameter((num_experts, hidden_dim, dim))
        self.w2 = self.parameter((num_experts, dim, hidden_dim))
        self.w3 = self.parameter((num_experts, hidden_dim, dim))
        self.dispatcher = LocalDispatcher(self.platform)
        self.partial_mesh = None

    def forward(
        self, x: Tensor, routing: Routing | Tensor | None = None, *, num_tokens_per_expert: Tensor | None = None
    ) -> Tensor:
        """Run rows through their experts.

        Args:
            x: plain `[tokens, dim]`, or `[rows, dim]` in expert-major order where counts are given.
            routing: the experts of each token, or the counts.
            num_tokens_per_expert: the counts by name: integers `[num_experts]` that add up to `rows`.

        Returns:
            `[tokens, dim]`, the (weighted) sum over each token's experts; one result per row, in the same
            order, when counts were given. With `partial_mesh`, this rank's part of it.

        Raises:
            ExpertParallelError: the counts do not describe the rows, or are given twice or not at all.
        """
        routing = self._routing(x, routing, num_tokens_per_expert)
        sent = self.dispatcher.dispatch(x, routing)
        weights = tuple(local_weight(weight) for weight in (self.w1, self.w2, self.w3))
        # A platform's fused experts know nothing of what a subclass computes instead.
        are_swiglu = type(self)._swiglu is GroupedExperts._swiglu and type(self)._weigh is GroupedExperts._weigh
        results = fused_experts(sent, weights, self.score_before_experts) if are_swiglu else None
        if results is None:
            results = self._one_step_at_a_time(sent, weights)
        return self.dispatcher.combine(results, sent)

    def _routing(self, x: Tensor, routing: Routing | Tensor | None, counts: Tensor | None) -> Routing:
        if isinstance(routing, Routing) and counts is None:
            return routing
        if (routing is None) == (counts is None):
            raise ExpertParallelError("GroupedExperts takes a Routing, or the number of rows of each expert; give one")
        counts = routing if counts is None else counts
        # Of the weights: within a style's own dispatch they are this rank's experts alone.
        return Routing.expert_major(self.platform, counts, int(x.shape[0]), int(self.w1.shape[0]))

    def _one_step_at_a_time(self, sent: Dispatched, weights: tuple[Tensor, ...]) -> Tensor:
        """Each step an operation of its own: for all platforms, and the oracle of fused experts."""
        permutation, rows, scores = sent.permutation, sent.rows, sent.scores
        if permutation is not None:
            rows = permutation.permute(rows)
            scores = None if scores is None else permutation.permute_scores(scores)
        if self.score_before_experts:
            rows = self._weigh(rows, scores)
        results = self._swiglu(rows, weights, sent.sizes)
        if not self.score_before_experts:
            results = self._weigh(results, scores)
        return results if permutation is None else permutation.unpermute(results)

    def _swiglu(self, x: Tensor, weights: tuple[Tensor, ...], sizes: GroupSizes) -> Tensor:
        w1, w2, w3 = weights
        gate = self.ops.silu(grouped_matmul(x, w1, sizes))
        return grouped_matmul(self.ops.mul(gate, grouped_matmul(x, w3, sizes)), w2, sizes)

    def _weigh(self, rows: Tensor, scores: Tensor | None) -> Tensor:
        if scores is None:
            return rows
        return self.ops.cast(self.ops.mul(self.ops.cast(rows, scores.dtype), scores), rows.dtype)
