"""Scores of experts from the gate's logits, float32 `[tokens, num_experts]` in and out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Tensor = Any
Ops = Any
ScoreFunction = Literal["softmax", "sigmoid", "sqrt_softplus", "softmax_of_top_k"]


@dataclass(frozen=True)
class Scoring:
    """A score function in its two steps, and the distribution that auxiliary losses even out.

    Attributes:
        scores: from logits to the scores that experts are chosen by and weighted with.
        weights: from the chosen scores `[tokens, top_k]` to weights.
        probabilities: from logits and scores to a distribution over all experts.
        sums_to_one: a token's weights always do.

    Example:
        >>> def share(ops, logits, scores):
        ...     return ops.softmax(logits, 1)
        >>> with nn.building(platform):
        ...     router = TokenChoiceTopKRouter(dim=4, num_experts=8, top_k=2)
        >>> router.scoring = Scoring(lambda ops, logits: logits, lambda ops, chosen: chosen, share)
        >>> scores, experts, counts = router(platform.ops.ones((3, 4), platform.dtype("float32")))
        >>> float(platform.to_numpy(scores).sum())  # logits of a gate of zeros
        0.0
    """

    scores: Callable[[Ops, Tensor], Tensor]
    weights: Callable[[Ops, Tensor], Tensor]
    probabilities: Callable[[Ops, Tensor, Tensor], Tensor]
    sums_to_one: bool = False


def normalized(ops: Ops, scores: Tensor) -> Tensor:
    """Divide each row by its sum; the added constant keeps scores that are all zero finite."""
    return ops.div(scores, ops.add(ops.sum(scores, 1, keepdim=True), 1e-20))


def _sqrt_softplus(ops: Ops, logits: Tensor) -> Tensor:
    # log(exp(0) + exp(x)): its gradient is right everywhere, and the added constant keeps the root's finite at 0.
    softplus = ops.logsumexp(ops.stack([logits, ops.zeros_like(logits)], 0), 0)
    return ops.sqrt(ops.add(softplus, 1e-30))


def _same(ops: Ops, scores: Tensor) -> Tensor:
    return scores


def _share(ops: Ops, logits: Tensor, scores: Tensor) -> Tensor:
    return normalized(ops, scores)


SCORINGS: dict[str, Scoring] = {
    "softmax": Scoring(lambda ops, logits: ops.softmax(logits, 1), _same, lambda ops, logits, scores: scores),
    # DeepSeek-V3, arXiv 2412.19437.
    "sigmoid": Scoring(lambda ops, logits: ops.sigmoid(logits), _same, _share),
    # DeepSeek-V4.
    "sqrt_softplus": Scoring(_sqrt_softplus, _same, _share),
    # gpt-oss, arXiv 2508.10925: experts are chosen by logits, and the chosen logits' softmax weighs.
    "softmax_of_top_k": Scoring(
        _same,
        lambda ops, chosen: ops.softmax(chosen, 1),
        lambda ops, logits, scores: ops.softmax(logits, 1),
        sums_to_one=True,
    ),
}
