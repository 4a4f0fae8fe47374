"""Token-choice routing: every token picks its experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy

from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import kept
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Partial
from hp_dtensor.tensor.dtensor import DTensor
from hp_moe.exceptions import ExpertParallelError, MoEConfigError

Tensor = Any
ScoreFunction = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Routing:
    """Destinations of the tokens of one call: decided once, and kept until their results are back.

    Attributes:
        experts: int64 `[tokens, top_k]`, global expert numbers, distinct within a token.
        counts: int64 `[num_experts]`: how many tokens picked each expert.
        scores: float32 `[tokens, top_k]`; None: results are not weighted.
        is_expert_major: tokens are sorted by expert already and `top_k` is 1.

    Example:
        >>> experts = platform.from_numpy(np.array([[0, 1], [1, 2]]))  # of two tokens, two each
        >>> routing = Routing(experts, counts=platform.from_numpy(np.array([1, 2, 1])))
        >>> tuple(routing.experts.shape)
        (2, 2)
    """

    experts: Tensor
    counts: Tensor
    scores: Tensor | None = None
    is_expert_major: bool = False

    @classmethod
    def expert_major(cls, platform: Platform, counts: Tensor, num_rows: int, num_experts: int) -> Routing:
        """Return the routing of rows that are sorted by expert; this waits for the device, to read the counts.

        Args:
            counts: rows of each expert, an integer tensor `[num_experts]`.
            num_rows: rows there are.
            num_experts: experts there are, those of all ranks.

        Raises:
            ExpertParallelError: there is not one count for each expert, one is no whole number or below 0, or they do
                not add up to the rows.
        """
        host = platform.to_numpy(counts)
        _check_counts(host, num_rows, num_experts)
        experts = numpy.repeat(numpy.arange(num_experts), host).reshape(-1, 1)
        int64 = platform.ops.cast(counts, platform.dtype("int64"))
        return cls(platform.from_numpy(experts, platform.device_of(counts)), int64, is_expert_major=True)


class TokenChoiceTopKRouter(nn.Module):
    """Scores every expert for every token and picks the best `top_k`.

    Args:
        dim: width of a token.
        score_func: of the logits, in float32: softmax over all experts, or a sigmoid each.
        num_expert_groups: experts are in this many groups of equal size, consecutive; None: no groups.
        num_limited_groups: a token picks from this many groups, those with the best sum of their two best
            (biased) scores (DeepSeek-V3, arXiv 2412.19437).
        route_norm: divide a token's scores by their sum.
        route_scale: factor on the scores, after normalization.

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
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.score_func = score_func
        self.num_expert_groups = num_expert_groups
        self.num_limited_groups = num_limited_groups
        self.route_norm = route_norm
        self.route_scale = route_scale
        problems = list(_problems(self))
        if problems:
            raise MoEConfigError("router: " + "; ".join(problems))
        self.gate = nn.Linear(dim, num_experts)

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
        ops, scores = self.ops, self._scores(x)
        selected, counts = kept(lambda: self._choose(self.platform.detach(scores), expert_bias))
        top_scores = ops.gather(scores, 1, selected)
        if self.route_norm:
            # The added constant keeps sigmoid scores that are all zero finite.
            top_scores = ops.div(top_scores, ops.add(ops.sum(top_scores, 1, keepdim=True), 1e-20))
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

    def _scores(self, x: Tensor) -> Tensor:
        """Return the score of every expert for every token, float32 `[tokens, num_experts]`."""
        ops, float32 = self.ops, self.platform.dtype("float32")
        weight = self.gate.weight
        if isinstance(weight, DTensor):
            weight = weight.to_local(grad_placements=[Partial()] * weight.device_mesh.ndim)
        logits = ops.linear(ops.cast(x, float32), ops.cast(weight, float32))
        return ops.softmax(logits, 1) if self.score_func == "softmax" else ops.sigmoid(logits)

    def _within_best_groups(self, choice: Tensor) -> Tensor:
        """Return `choice` with minus infinity for experts outside each token's best groups (arXiv 2412.19437)."""
        ops, groups = self.ops, self.num_expert_groups
        assert groups is not None
        tokens, size = choice.shape[0], self.num_experts // groups
        grouped = ops.reshape(choice, (tokens, groups, size))
        group_scores = ops.sum(ops.topk(grouped, min(2, size), 2)[0], 2)
        best = ops.topk(group_scores, self.num_limited_groups, 1)[1]
        allowed = ops.sum(ops.one_hot(ops.cast(best, self.platform.dtype("int64")), groups), 1)
        outside = ops.expand(ops.unsqueeze(ops.eq(allowed, 0), 2), (tokens, groups, size))
        return ops.reshape(ops.masked_fill(grouped, outside, float("-inf")), (tokens, self.num_experts))


def count_keys(platform: Platform, keys: Tensor, num_keys: int) -> Tensor:
    """Count how often each key below `num_keys` occurs in an int tensor of any shape: int64 `[num_keys]`."""
    size = int(numpy.prod(keys.shape))
    if size == 0:
        return platform.zeros((num_keys,), platform.dtype("int64"))
    return platform.ops.bincount(platform.ops.reshape(keys, (size,)), num_keys)


def _check_counts(counts: numpy.ndarray, num_rows: int, num_experts: int) -> None:
    """Refuse counts that do not describe the rows: products of too few rows would go unnoticed."""
    if counts.shape != (num_experts,):
        raise ExpertParallelError(
            f"num_tokens_per_expert: expected one count for each of {num_experts} experts, got shape "
            f"{list(counts.shape)}"
        )
    if counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ExpertParallelError(
            f"num_tokens_per_expert: expected whole numbers of rows, got {counts.tolist()} ({counts.dtype})"
        )
    if counts.sum() != num_rows:
        raise ExpertParallelError(
            f"num_tokens_per_expert: the counts {counts.tolist()} add up to {int(counts.sum())}, but there are "
            f"{num_rows} rows"
        )


def _problems(router: TokenChoiceTopKRouter) -> Iterator[str]:
    experts, top_k, groups = router.num_experts, router.top_k, router.num_expert_groups
    if not 1 <= top_k <= experts:
        yield f"top_k must be between 1 and num_experts = {experts}, got {top_k}"
    if router.score_func not in ("softmax", "sigmoid"):
        yield f"score_func must be 'softmax' or 'sigmoid', got {router.score_func!r}"
    if router.route_norm and top_k == 1:
        yield "route_norm with top_k = 1 makes every score 1, so the gate would never learn; drop one of them"
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
