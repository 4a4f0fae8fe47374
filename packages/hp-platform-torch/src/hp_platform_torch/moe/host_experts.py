"""SwiGLU experts on the CPU as one autograd node: one expert at a time, so that what is between its products is small.

Kept for backward are the tokens and the products before the activation, as in `fused_experts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hp_dtensor.parallel.recompute import kept
from hp_moe import GroupSizes, TokenPermutation


def host_experts(
    x: torch.Tensor,
    permutation: TokenPermutation,
    sizes: GroupSizes,
    scores: torch.Tensor | None,
    weights: tuple[torch.Tensor, ...],
    score_before_experts: bool,
) -> torch.Tensor:
    """The weighted sum of each token's experts, `[tokens, dim]`; see `hp_moe.hookspecs.hp_fused_experts`."""
    entries = kept(lambda: permutation.entries)
    groups = _Groups(entries, permutation.num_slots, sizes.host)
    return _HostExperts.apply(groups, x, scores, score_before_experts, *weights)


class _Groups:
    """The rows of each expert that has any: `(expert, its rows' range, their slots, their tokens)`."""

    def __init__(self, entries: torch.Tensor, num_slots: int, counts: tuple[int, ...]) -> None:
        self.entries = entries
        self.tokens = entries if num_slots == 1 else entries // num_slots
        self.counts = counts

    def gradient_of(self, weight: torch.Tensor) -> torch.Tensor:
        """Memory for a gradient, zeros for the experts that have no rows and so will not be visited."""
        gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for expert, count in enumerate(self.counts):
            if not count:
                gradient[expert].zero_()
        return gradient

    def __iter__(self) -> Iterator[tuple[int, slice, torch.Tensor, torch.Tensor]]:
        first = 0
        for expert, count in enumerate(self.counts):
            if count:
                rows = slice(first, first + count)
                yield expert, rows, self.entries[rows], self.tokens[rows]
            first += count


class _HostExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        groups: _Groups,
        x: torch.Tensor,
        scores: torch.Tensor | None,
        score_before: bool,
        w1: torch.Tensor,
        w2: torch.Tensor,
        w3: torch.Tensor,
    ) -> torch.Tensor:
        pre = x.new_empty((2, sum(groups.counts), w1.shape[1]))
        out = torch.zeros_like(x)
        for expert, rows, slots, tokens in groups:
            inputs = x.index_select(0, tokens)
            gate = torch.mm(inputs, w1[expert].t(), out=pre[0, rows])
            up = torch.mm(inputs, w3[expert].t(), out=pre[1, rows])
            score = _score(scores, slots, x.dtype)
            if score is not None and score_before:
                gate, up = gate * score, up * score
            hidden = F.silu(gate).mul_(up)
            # A row's score weighs its activation as well as its result, at a fraction of the work.
            if score is not None and not score_before:
                hidden.mul_(score)
            out.index_add_(0, tokens, hidden @ w2[expert].t())
        ctx.groups, ctx.score_before = groups, score_before
        ctx.save_for_backward(x, scores, w1, w2, w3, pre)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scores, w1, w2, w3, pre = ctx.saved_tensors
        groups, score_before = ctx.groups, ctx.score_before
        _, needs_x, needs_scores, _, *needs_weights = ctx.needs_input_grad
        d_x = torch.zeros_like(x) if needs_x else None
        d_scores = torch.zeros_like(scores) if needs_scores else None
        d_w1, d_w2, d_w3 = (
            groups.gradient_of(weight) if needed else None
            for weight, needed in zip((w1, w2, w3), needs_weights, strict=True)
        )
        for expert, rows, slots, tokens in groups:
            d_results = grad.index_select(0, tokens)
            score = _score(scores, slots, x.dtype)
            d_gate, d_up, d_score, hidden = _activation_backward(
                d_results @ w2[expert], pre[0, rows], pre[1, rows], score, score_before
            )
            if d_scores is not None:
                d_scores.view(-1)[slots] = d_score.to(d_scores.dtype)
            if d_w2 is not None:
                torch.mm(d_results.t(), hidden, out=d_w2[expert])
            if d_x is not None:
                d_x.index_add_(0, tokens, (d_gate @ w1[expert]).addmm_(d_up, w3[expert]))
            if d_w1 is not None or d_w3 is not None:
                inputs = x.index_select(0, tokens)
                for d_weight, d_pre in ((d_w1, d_gate), (d_w3, d_up)):
                    if d_weight is not None:
                        torch.mm(d_pre.t(), inputs, out=d_weight[expert])
        return None, d_x, d_scores, None, d_w1, d_w2, d_w3


def _score(scores: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """`[rows, 1]`."""
    return None if scores is None else scores.reshape(-1).index_select(0, slots).to(dtype)[:, None]


def _activation_backward(
    d_hidden: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_up: torch.Tensor,
    score: torch.Tensor | None,
    score_before: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Gradients of the products before the activation and `[rows]` of the scores; the weighted activation.

    `d_hidden` is the gradient of the weighted activation where scores weigh results; it is overwritten.
    """
    weighs_inputs, weighs_results = score is not None and score_before, score is not None and not score_before
    gate, up = (raw_gate * score, raw_up * score) if weighs_inputs else (raw_gate, raw_up)
    silu = F.silu(gate)
    hidden, d_score = silu * up, None
    if weighs_results:
        d_score = torch.linalg.vecdot(d_hidden, hidden)
        hidden.mul_(score)
        d_hidden.mul_(score)
    d_up = silu.mul_(d_hidden)
    d_gate = torch.ops.aten.silu_backward(d_hidden.mul_(up), gate)
    if weighs_inputs:
        d_score = torch.linalg.vecdot(d_gate, raw_gate).add_(torch.linalg.vecdot(d_up, raw_up))
        d_gate.mul_(score)
        d_up.mul_(score)
    return d_gate, d_up, d_score, hidden
