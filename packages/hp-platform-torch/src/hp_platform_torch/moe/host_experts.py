"""SwiGLU experts on the CPU as one autograd node: one expert at a time, so that what is between its products is small.

Kept for backward are the tokens and the products before the activation, as in `fused_experts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hp_dtensor.comm.recompute_record import PRODUCTS, kept, kept_result
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
    """The rows of each expert."""

    def __init__(self, entries: torch.Tensor, num_slots: int, counts: tuple[int, ...]) -> None:
        self.entries = entries
        self.tokens = entries if num_slots == 1 else entries // num_slots
        self.counts = counts
        self.most = max(counts, default=0)

    def gradient_of(self, weight: torch.Tensor) -> torch.Tensor:
        """Memory for a gradient, zeros for the experts that have no rows and so will not be visited."""
        gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for expert, count in enumerate(self.counts):
            if not count:
                gradient[expert].zero_()
        return gradient

    def scores(self, scores: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """The score of each row, `[rows, 1]`."""
        return None if scores is None else scores.reshape(-1).index_select(0, self.entries).to(dtype)[:, None]

    def workspace(self, like: torch.Tensor, *widths: int) -> list[torch.Tensor]:
        """Memory for the rows of any one expert, `[rows of the busiest, width]` each.

        Made once for all experts: of the size of theirs, the C library maps and gives back memory at every call.
        """
        return [like.new_empty((self.most, width)) for width in widths]

    def parts(self, *of_experts: Any, of_rows: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """For each expert with rows: its tokens, its part of each of `of_experts`, its rows of each of `of_rows`.

        Views are taken for all experts at once, which costs a fraction of taking them one by one; None stays None.
        """
        columns = [self.tokens.split(self.counts)]
        columns += [[None] * len(self.counts) if each is None else each.unbind(0) for each in of_experts]
        columns += [[None] * len(self.counts) if each is None else each.split(self.counts) for each in of_rows]
        return (part for part in zip(*columns, strict=True) if len(part[0]))


class _HostExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        groups: _Groups,
        x: torch.Tensor,
        scores: torch.Tensor | None,
        score_before: bool,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        pre, out = kept_result(PRODUCTS, lambda: _products(groups, x, scores, score_before, *weights))
        ctx.groups, ctx.score_before = groups, score_before
        ctx.save_for_backward(x, scores, *weights, pre)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scores, w1, w2, w3, pre = ctx.saved_tensors
        groups, score_before = ctx.groups, ctx.score_before
        _, needs_x, needs_scores, _, *needs_weights = ctx.needs_input_grad
        d_x = torch.zeros_like(x) if needs_x else None
        row_scores = groups.scores(scores, x.dtype)
        d_row_scores = None if scores is None else x.new_empty((len(groups.entries),))
        d_w1, d_w2, d_w3 = (
            groups.gradient_of(weight) if needed else None
            for weight, needed in zip((w1, w2, w3), needs_weights, strict=True)
        )
        dim, width = x.shape[1], w1.shape[1]
        space = groups.workspace(x, dim, dim, *[width] * 4)
        by_row = (*pre, row_scores, d_row_scores)
        for tokens, own_w1, own_w2, own_w3, to_w1, to_w2, to_w3, gate, up, score, d_score in groups.parts(
            w1, w2, w3, d_w1, d_w2, d_w3, of_rows=by_row
        ):
            d_results, inputs, d_hidden, *hidden_space = (each[: len(tokens)] for each in space)
            torch.index_select(grad, 0, tokens, out=d_results)
            torch.mm(d_results, own_w2, out=d_hidden)
            d_gate, d_up, hidden = _activation_backward(
                d_hidden, (gate, up), (score, d_score), score_before, hidden_space
            )
            if to_w2 is not None:
                torch.mm(d_results.t(), hidden, out=to_w2)
            if to_w1 is not None or to_w3 is not None:
                torch.index_select(x, 0, tokens, out=inputs)
                for d_weight, d_pre in ((to_w1, d_gate), (to_w3, d_up)):
                    if d_weight is not None:
                        torch.mm(d_pre.t(), inputs, out=d_weight)
            if d_x is not None:
                # Of no use any more, the results' gradients make room for the inputs'.
                torch.mm(d_gate, own_w1, out=d_results)
                d_x.index_add_(0, tokens, d_results.addmm_(d_up, own_w3))
        d_scores = _at_slots(d_row_scores, groups.entries, scores) if needs_scores else None
        return None, d_x, d_scores, None, d_w1, d_w2, d_w3


def _products(
    groups: _Groups,
    x: torch.Tensor,
    scores: torch.Tensor | None,
    score_before: bool,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products before the activation, `[2, rows, hidden]`, and the sum of each token's experts."""
    dim, width = x.shape[1], w1.shape[1]
    pre = x.new_empty((2, sum(groups.counts), width))
    row_scores = groups.scores(scores, x.dtype)
    out = torch.zeros_like(x)
    space = groups.workspace(x, dim, width, dim)
    transposed = (weight.transpose(1, 2) for weight in (w1, w2, w3))
    for tokens, own_w1, own_w2, own_w3, gate, up, score in groups.parts(*transposed, of_rows=(*pre, row_scores)):
        inputs, hidden, results = (each[: len(tokens)] for each in space)
        torch.index_select(x, 0, tokens, out=inputs)
        torch.mm(inputs, own_w1, out=gate)
        torch.mm(inputs, own_w3, out=up)
        if score is not None and score_before:
            gate, up = gate * score, up * score
        torch.ops.aten.silu.out(gate, out=hidden).mul_(up)
        # A row's score weighs its activation as well as its result, at a fraction of the work.
        if score is not None and not score_before:
            hidden.mul_(score)
        out.index_add_(0, tokens, torch.mm(hidden, own_w2, out=results))
    return pre, out


def _at_slots(d_rows: torch.Tensor, entries: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The gradient of scores `[tokens, slots]` from that of each row; zeros for slots without a row."""
    d_scores = torch.zeros_like(scores, memory_format=torch.contiguous_format)
    d_scores.view(-1).index_copy_(0, entries, d_rows.to(scores.dtype))
    return d_scores


def _activation_backward(
    d_hidden: torch.Tensor,
    pre: tuple[torch.Tensor, torch.Tensor],
    scores: tuple[torch.Tensor | None, torch.Tensor | None],
    score_before: bool,
    space: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the products before the activation, and the weighted activation; all within `space`.

    Args:
        d_hidden: gradient of the weighted activation where scores weigh results; it is overwritten.
        pre: the products before the activation, gate and up.
        scores: `[rows, 1]`, and memory for their gradient, `[rows]`; None: results are not weighted.
        space: three tensors like `d_hidden`.
    """
    raw_gate, raw_up = pre
    silu, hidden, product = space
    score, d_score = scores
    gate, up = (raw_gate * score, raw_up * score) if score is not None and score_before else pre
    torch.ops.aten.silu.out(gate, out=silu)
    torch.mul(silu, up, out=hidden)
    if score is not None and not score_before:
        torch.sum(torch.mul(d_hidden, hidden, out=product), 1, out=d_score)
        hidden.mul_(score)
        d_hidden.mul_(score)
    d_up = silu.mul_(d_hidden)
    d_gate = torch.ops.aten.silu_backward.grad_input(d_hidden.mul_(up), gate, grad_input=product)
    if score is not None and d_score is not None and score_before:
        torch.sum(torch.mul(d_gate, raw_gate), 1, out=d_score)
        d_score.add_(torch.linalg.vecdot(d_up, raw_up))
        d_gate.mul_(score)
        d_up.mul_(score)
    return d_gate, d_up, hidden
