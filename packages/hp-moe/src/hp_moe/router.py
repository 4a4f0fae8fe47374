"""Token-choice routing: every token picks its experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import kept
from hp_dtensor.spec.placements import Partial
from hp_dtensor.tensor.dtensor import DTensor
from hp_moe.exceptions import MoEConfigError
from hp_moe.routing import count_keys
from hp_moe.score_functions import SCORINGS, ScoreFunction, normalized

Tensor = Any
GroupScore = Literal["top2_sum", "max"]


class TokenChoiceTopKRouter(nn.Module):
    """Scores every expert for every token and picks the best `top_k`.

    Args:
        dim: width of a token.
        score_func: of the logits, in float32: `softmax` over all experts; `sigmoid` of each; `sqrt_softplus`, the
            square root of each one's softplus; `softmax_of_top_k`, which chooses by logits and weighs with the softmax
            of the chosen ones (gpt-oss).
        num_expert_groups: experts are in this many groups of equal size, consecutive; None: no groups.
        num_limited_groups: a token picks from this many groups, those with the best `group_score`.
        route_norm: divide a token's scores by their sum.
        route_scale: factor on the scores, after normalization.
        gate_bias: the gate has a bias, which counts in scores and is trained.
        group_score: of a group's (biased) scores, the sum of the two best (DeepSeek-V3, arXiv 2412.19437) or the best
            (DeepSeek-V2, arXiv 2405.04434).

    Raises:
        MoEConfigError: listing everything that does not fit.

    Example:
        >>> with nn.building(platform):
        ...     router = TokenChoiceTopKRouter(dim=4, num_experts=8, top_k=2)
        >>> scores, experts, counts = router(platform.ops.ones((3, 4), platform.dtype("float32")))
        >>> tuple(scores.shape), int(platform.to_numpy(counts).sum())
        ((3, 2), 6)
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        score_func: ScoreFunction = "softmax",
        num_expert_groups: int | None = None,
        num_limited_groups: int | None = None,
        route_norm: bool = False,
        route_scale: float = 1.0,
        *,
        gate_bias: bool = False,
        group_score: GroupScore = "top2_sum",
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.score_func = score_func
        self.num_expert_groups = num_expert_groups
        self.num_limited_groups = num_limited_groups
        self.route_norm = route_norm
        self.route_scale = route_scale
        self.group_score = group_score
        problems = list(_problems(self))
        if problems:
            raise MoEConfigError("router: " + "; ".join(problems))
        self.scoring = SCORINGS[score_func]
        self.gate = nn.Linear(dim, num_experts, gate_bias)

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Route this rank's own tokens.

        Args:
            x: plain `[tokens, dim]`. With a distributed gate, every rank's tokens count in its gradient.
            expert_bias: float32 `[num_experts]`, added to the scores for choosing only.

        Returns:
            top_scores: float32 `[tokens, top_k]`, best first, differentiable.
            selected_experts: int64 `[tokens, top_k]`.
            num_tokens_per_expert: int64 `[num_experts]`.
        """
        ops, scoring = self.ops, self.scoring
        scores = scoring.scores(ops, self._logits(x))
        selected, counts = kept(lambda: self._choose(self.platform.detach(scores), expert_bias))
        top_scores = scoring.weights(ops, ops.gather(scores, 1, selected))
        if self.route_norm:
            top_scores = normalized(ops, top_scores)
        if self.route_scale != 1.0:
            top_scores = ops.mul(top_scores, self.route_scale)
        return top_scores, selected, counts

    def _choose(self, choice: Tensor, expert_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (experts of each token, tokens per expert) for scores `[tokens, num_experts]`."""
        ops, platform = self.ops, self.platform
        if expert_bias is not None:
            choice = ops.add(choice, expert_bias)
        if self.num_expert_groups is not None:
            choice = self._within_best_groups(choice)
        selected = ops.cast(ops.topk(choice, self.top_k, 1)[1], platform.dtype("int64"))
        return selected, count_keys(platform, selected, self.num_experts)

    def _logits(self, x: Tensor) -> Tensor:
        """Return the gate's results, float32 `[tokens, num_experts]`, whatever the dtype of `x` and of the gate."""
        ops, float32 = self.ops, self.platform.dtype("float32")
        weight, bias = _local(self.gate.weight), _local(self.gate.bias)
        bias = None if bias is None else ops.cast(bias, float32)
        return ops.linear(ops.cast(x, float32), ops.cast(weight, float32), bias)

    def _within_best_groups(self, choice: Tensor) -> Tensor:
        """Return `choice` with minus infinity for experts outside each token's best groups."""
        ops, groups = self.ops, self.num_expert_groups
        assert groups is not None
        tokens, size = choice.shape[0], self.num_experts // groups
        grouped = ops.reshape(choice, (tokens, groups, size))
        counted = min(2 if self.group_score == "top2_sum" else 1, size)
        group_scores = ops.sum(ops.topk(grouped, counted, 2)[0], 2)
        best = ops.topk(group_scores, self.num_limited_groups, 1)[1]
        allowed = ops.sum(ops.one_hot(ops.cast(best, self.platform.dtype("int64")), groups), 1)
        outside = ops.expand(ops.unsqueeze(ops.eq(allowed, 0), 2), (tokens, groups, size))
        return ops.reshape(ops.masked_fill(grouped, outside, float("-inf")), (tokens, self.num_experts))


def _local(parameter: Tensor | None) -> Tensor | None:
    """Return the plain tensor of a gate's parameter; where it is distributed, each rank adds its tokens' gradient."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)


def _problems(router: TokenChoiceTopKRouter) -> Iterator[str]:
    experts, top_k, groups = router.num_experts, router.top_k, router.num_expert_groups
    if not 1 <= top_k <= experts:
        yield f"top_k must be between 1 and num_experts = {experts}, got {top_k}"
    if router.score_func not in SCORINGS:
        yield f"score_func must be {_or(SCORINGS)}, got {router.score_func!r}"
    elif top_k == 1 and (router.route_norm or SCORINGS[router.score_func].sums_to_one):
        option = "route_norm" if router.route_norm else router.score_func
        yield f"{option} with top_k = 1 makes every score 1, so the gate would never learn; drop one of them"
    if router.group_score not in ("top2_sum", "max"):
        yield f"group_score must be 'top2_sum' or 'max', got {router.group_score!r}"
    if (groups is None) != (router.num_limited_groups is None):
        yield "num_expert_groups and num_limited_groups come together; only one of them is given"
    elif groups is not None:
        yield from _group_problems(experts, top_k, groups, router.num_limited_groups or 0)


def _group_problems(experts: int, top_k: int, groups: int, limited: int) -> Iterator[str]:
    if groups < 1 or experts % groups:
        yield f"num_expert_groups must divide num_experts = {experts}, got {groups}"
    elif not 1 <= limited <= groups:
        yield f"num_limited_groups must be between 1 and num_expert_groups = {groups}, got {limited}"
    elif limited * (experts // groups) < top_k:
        yield f"{limited} groups of {experts // groups} experts hold fewer than top_k = {top_k} experts"


def _or(names: Iterable[str]) -> str:
    *most, last = map(repr, names)
    return f"{', '.join(most)} or {last}"
