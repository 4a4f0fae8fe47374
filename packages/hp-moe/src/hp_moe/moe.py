"""The mixture-of-experts layer."""

from __future__ import annotations

import math
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import is_checkpointed, kept
from hp_dtensor.tensor.dtensor import DTensor
from hp_moe.activations import Activation
from hp_moe.exceptions import ExpertParallelError, MoEConfigError
from hp_moe.experts import GroupedExperts, ScorePosition
from hp_moe.feed_forward import FeedForward
from hp_moe.local_region import enter_region
from hp_moe.router import GroupScore, TokenChoiceTopKRouter
from hp_moe.routing import Routing
from hp_moe.score_functions import ScoreFunction

Tensor = Any


class MoE(nn.Module):
    """Routed experts, and shared experts that see every token.

    Args:
        dim: width of a token.
        hidden_dim: hidden width of one routed expert.
        num_experts: routed experts.
        top_k: experts per token.
        num_shared_experts: one feed-forward network of this many times `hidden_dim`; 0: none.
        score_before_experts: weight the experts' inputs instead of their outputs.
        load_balance_coeff: step of the bias that evens the experts' load without a loss (arXiv 2408.15664);
            None: no bias. `update_expert_bias` takes the steps.
        score_func, num_expert_groups, num_limited_groups, route_norm, route_scale, gate_bias, group_score: as in
            `TokenChoiceTopKRouter`.
        activation, bias, score_position: as in `GroupedExperts`; the activation is that of shared experts too.
        shared_hidden_dim: hidden width of the shared experts' network, instead of `num_shared_experts`.
        shared_gate: weigh the shared experts' result with the sigmoid of a product of the token (Qwen2-MoE).

    Attributes:
        expert_bias: float32 `[num_experts]` buffer, or None.
        split_mesh: 1-D mesh of ranks that are given the same tokens and each route a share of them; None:
            each rank routes all that it is given.
        token_mesh: 1-D mesh of all ranks that route different tokens, over which loads are summed; None: this
            rank routes them all.

    Raises:
        MoEConfigError: sizes or options that do not fit; all at once for the router.

    Example:
        >>> with nn.building(platform):
        ...     layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2, num_shared_experts=1)
        >>> tuple(layer(platform.ops.ones((2, 3, 4), platform.dtype("float32"))).shape)
        (2, 3, 4)
    """

    split_mesh: DeviceMesh | None
    token_mesh: DeviceMesh | None

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        num_shared_experts: int = 0,
        score_before_experts: bool = False,
        load_balance_coeff: float | None = None,
        score_func: ScoreFunction = "softmax",
        num_expert_groups: int | None = None,
        num_limited_groups: int | None = None,
        route_norm: bool = False,
        route_scale: float = 1.0,
        *,
        gate_bias: bool = False,
        group_score: GroupScore = "top2_sum",
        activation: str | Activation = "swiglu",
        bias: bool = False,
        score_position: ScorePosition | None = None,
        shared_hidden_dim: int | None = None,
        shared_gate: bool = False,
    ) -> None:
        super().__init__()
        if load_balance_coeff is not None and load_balance_coeff <= 0:
            raise MoEConfigError(f"load_balance_coeff must be above 0 or None, got {load_balance_coeff}")
        self.dim = dim
        self.num_experts = num_experts
        self.load_balance_coeff = load_balance_coeff
        self.router = TokenChoiceTopKRouter(
            dim,
            num_experts,
            top_k,
            score_func,
            num_expert_groups,
            num_limited_groups,
            route_norm,
            route_scale,
            gate_bias=gate_bias,
            group_score=group_score,
        )
        self.experts = GroupedExperts(
            dim,
            hidden_dim,
            num_experts,
            score_before_experts,
            activation=activation,
            bias=bias,
            score_position=score_position,
        )
        shared_dim = _shared_dim(hidden_dim, num_shared_experts, shared_hidden_dim, shared_gate)
        self.shared_experts = FeedForward(dim, shared_dim, activation) if shared_dim else None
        self.shared_gate = nn.Linear(dim, 1) if shared_gate else None
        bias = self.platform.zeros((num_experts,), self.platform.dtype("float32"))
        self.register_buffer("expert_bias", bias if load_balance_coeff is not None else None)
        self.split_mesh = None
        self.token_mesh = None
        self._counts: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to every token: `[..., dim]` -> the same, plain or distributed and placed as the input."""
        region = enter_region(x, self.experts.partial_mesh, self.split_mesh)
        self._check_gate(region.num_ranks)
        rows = self.ops.reshape(region.rows, (math.prod(region.rows.shape[:-1]), self.dim))
        scores, experts, counts = self.router(rows, self.expert_bias)
        kept(lambda: self._count(counts))
        results = self.experts(rows, Routing(experts, counts, scores))
        routed = region.leave(self.ops.reshape(results, tuple(region.rows.shape)))
        return routed if self.shared_experts is None else self.ops.add(routed, self._shared(x))

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared_experts is not None
        shared = self.shared_experts(x)
        return shared if self.shared_gate is None else self.ops.mul(self.ops.sigmoid(self.shared_gate(x)), shared)

    def take_counts(self) -> Tensor:
        """Return and forget this rank's tokens per expert in training since the last call, int64 `[num_experts]`."""
        if self._counts:
            return self._counts.pop()
        return self.platform.zeros((self.num_experts,), self.platform.dtype("int64"))

    def _count(self, counts: Tensor) -> None:
        # Forward passes that only evaluate do not train the bias.
        if self.training and (self.platform.is_grad_enabled() or is_checkpointed()):
            self._counts[:] = [self.ops.add(self._counts[0], counts) if self._counts else counts]

    def _check_gate(self, num_ranks: int) -> None:
        """Refuse a gate whose gradient would miss the tokens of other ranks that share this input."""
        weight = self.router.gate.weight
        spread = weight.device_mesh.size() if isinstance(weight, DTensor) else 1
        if spread != num_ranks:
            raise ExpertParallelError(
                f"the input of this MoE is worked on by {num_ranks} ranks, but router.gate.weight is on a mesh of "
                f"{spread}; distribute the router over the same ranks (Replicate)"
            )


def _shared_dim(hidden_dim: int, num_shared_experts: int, shared_hidden_dim: int | None, shared_gate: bool) -> int:
    if num_shared_experts and shared_hidden_dim is not None:
        raise MoEConfigError("num_shared_experts and shared_hidden_dim both give the shared network's width; give one")
    shared_dim = hidden_dim * num_shared_experts if shared_hidden_dim is None else shared_hidden_dim
    if shared_gate and not shared_dim:
        raise MoEConfigError("shared_gate weighs shared experts; give num_shared_experts or shared_hidden_dim too")
    return shared_dim
