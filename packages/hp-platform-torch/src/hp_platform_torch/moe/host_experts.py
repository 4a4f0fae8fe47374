"""SwiGLU experts on the CPU as one autograd node: a few experts at a time, so that what is between products is small.

Kept for backward are the tokens and the products before the activation, as in `fused_experts`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hp_dtensor.comm.saved_tensors import PRODUCTS, saved_result, saved_value
from hp_moe import GroupSizes, TokenPermutation

# A batch of experts has about so many elements of its inputs: few enough to be in the cache still when they are used
# again, and enough that starting an operation costs little beside it, and that threads share it.
_BATCH_ELEMENTS = 2**18


def host_experts(
    x: torch.Tensor,
    permutation: TokenPermutation,
    sizes: GroupSizes,
    scores: torch.Tensor | None,
    weights: tuple[torch.Tensor, ...],
    score_before_experts: bool,
) -> torch.Tensor:
    """The weighted sum of each token's experts, `[tokens, dim]`; see `hp_moe.hookspecs.hp_fused_experts`."""
    entries = saved_value(lambda: permutation.entries)
    groups = _Groups(entries, permutation.num_rows, permutation.num_slots, sizes.host)
    return _HostExperts.apply(groups, x, scores, score_before_experts, *weights)


class _Groups:
    """The rows of each expert, in expert-major order, and the way from and to their tokens.

    Args:
        entries: the flat slot of each row, int `[rows]`.
        num_tokens, num_slots: shape of the slots.
        counts: number of rows of each expert.
        tables: what an earlier one of the same arguments has made of them.
    """

    def __init__(
        self,
        entries: torch.Tensor,
        num_tokens: int,
        num_slots: int,
        counts: tuple[int, ...],
        tables: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self.entries = entries
        self.num_tokens, self.num_slots = num_tokens, num_slots
        self.counts = counts
        if tables:
            self.tokens, *self._bags = tables
        else:
            self.tokens = entries if num_slots == 1 else entries // num_slots

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments that another one is made with, without tables."""
        return self.entries, self.num_tokens, self.num_slots, self.counts

    @property
    def tables(self) -> tuple[torch.Tensor | None, ...]:
        """Tensors made of the arguments, for another one."""
        return self.tokens, *self._bags

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

    def batches(self, width: int) -> list[_Batch]:
        """Cut the experts that have rows into batches of few enough rows of this width to stay in a core's cache."""
        found, experts, first, rows = [], [], 0, 0
        for expert, count in enumerate(self.counts):
            if experts and (rows + count) * width > _BATCH_ELEMENTS:
                found.append(_Batch(experts, [self.counts[each] for each in experts], slice(first, first + rows)))
                experts, first, rows = [], first + rows, 0
            if count:
                experts.append(expert)
                rows += count
        if experts:
            found.append(_Batch(experts, [self.counts[each] for each in experts], slice(first, first + rows)))
        return found

    def sums(self, rows: torch.Tensor, scores: torch.Tensor | None = None) -> torch.Tensor:
        """Add up each token's rows, weighted by `scores` `[tokens, slots]`, in the order of its slots."""
        if not len(rows):
            return rows.new_zeros((self.num_tokens, rows.shape[1]))
        indices, firsts, slots = self._bags
        weights = None if scores is None else scores.reshape(-1).to(rows.dtype)
        if weights is not None and slots is not None:
            weights = weights.index_select(0, slots)
        # In one pass over the rows, which the sum of a permuted copy is not.
        return torch.ops.aten._embedding_bag_forward_only(rows, indices, firsts, False, 0, False, weights)[0]

    @functools.cached_property
    def _bags(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The rows of all tokens one after the other, where each token's begin, and their slots; None: every slot."""
        num_rows, num_slots = len(self.entries), self.num_tokens * self.num_slots
        order = torch.arange(num_slots)
        rows = torch.full((num_slots,), -1).index_copy_(0, self.entries, order[:num_rows])
        if num_rows == num_slots:
            return rows, order[:: self.num_slots].contiguous(), None
        has_row = rows >= 0
        per_token = has_row.view(self.num_tokens, self.num_slots).sum(1)
        return rows[has_row], per_token.cumsum(0) - per_token, order[has_row]


@dataclass
class _Batch:
    """Experts that are worked on together.

    Attributes:
        experts: their numbers.
        counts: their numbers of rows, all above 0.
        rows: where their rows are among those of all experts.
    """

    experts: list[int]
    counts: list[int]
    rows: slice

    def of_rows(self, *tensors: torch.Tensor | None) -> list[Any]:
        """The rows of this batch of each tensor that has those of all experts; None stays None."""
        return [None if each is None else each[self.rows] for each in tensors]

    def within(self, *space: torch.Tensor) -> list[torch.Tensor]:
        """As many rows of each tensor in `space` as the batch has."""
        return [each[: self.rows.stop - self.rows.start] for each in space]

    def each(self, *tensors: torch.Tensor) -> Iterator[tuple[Any, ...]]:
        """For each expert, in order: its number, and its rows of tensors with the rows of this batch.

        Views are taken for all experts at once, which costs a fraction of taking them one by one.
        """
        return zip(self.experts, *(torch.split_with_sizes(tensor, self.counts) for tensor in tensors), strict=True)


def _workspace(batches: list[_Batch], like: torch.Tensor, *widths: int) -> list[torch.Tensor]:
    """Memory for the rows of any one batch, `[rows of the largest, width]` each.

    Made once for all batches: of the size of theirs, the C library maps and gives back memory at every call.
    """
    most = max((batch.rows.stop - batch.rows.start for batch in batches), default=0)
    return [like.new_empty((most, width)) for width in widths]


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
        pre, out = saved_result(PRODUCTS, lambda: _products(groups, x, scores, score_before, w1, w2, w3))
        # The tables are saved with the rest, so that they may be made again instead of being kept.
        ctx.groups, ctx.score_before = groups.arguments, score_before
        ctx.save_for_backward(x, scores, w1, w2, w3, pre, *groups.tables)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scores, w1, w2, w3, pre, *tables = ctx.saved_tensors
        weights, groups = (w1, w2, w3), _Groups(*ctx.groups, tables)
        _, needs_x, needs_scores, _, *needs_weights = ctx.needs_input_grad
        d_rows = x.new_empty((len(groups.entries), x.shape[1])) if needs_x else None
        d_row_scores = None if scores is None else x.new_empty((len(groups.entries),))
        d_weights = [
            groups.gradient_of(weight) if needed else None
            for weight, needed in zip(weights, needs_weights, strict=True)
        ]
        by_row = (*pre, groups.scores(scores, x.dtype), d_row_scores, d_rows)
        _products_backward(groups, x, grad, ctx.score_before, weights, d_weights, by_row)
        d_x = None if d_rows is None else groups.sums(d_rows)
        d_scores = _at_slots(d_row_scores, groups.entries, scores) if needs_scores else None
        return None, d_x, d_scores, None, *d_weights


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
    dim, width, num_rows = x.shape[1], w1.shape[1], len(groups.entries)
    pre, results = x.new_empty((2, num_rows, width)), x.new_empty((num_rows, dim))
    score_of_inputs = groups.scores(scores, x.dtype) if score_before else None
    batches = groups.batches(dim)
    space = _workspace(batches, x, dim, width)
    to_gate, to_result, to_up = (weight.transpose(1, 2).unbind(0) for weight in (w1, w2, w3))
    for batch in batches:
        tokens, gate, up, score, batch_results = batch.of_rows(groups.tokens, *pre, score_of_inputs, results)
        inputs, hidden = batch.within(*space)
        torch.index_select(x, 0, tokens, out=inputs)
        for expert, own_inputs, own_gate, own_up in batch.each(inputs, gate, up):
            torch.mm(own_inputs, to_gate[expert], out=own_gate)
            torch.mm(own_inputs, to_up[expert], out=own_up)
        if score is not None:
            gate, up = gate * score, up * score
        torch.ops.aten.silu.out(gate, out=hidden).mul_(up)
        for expert, own_hidden, own_results in batch.each(hidden, batch_results):
            torch.mm(own_hidden, to_result[expert], out=own_results)
    return pre, groups.sums(results, None if score_before else scores)


def _products_backward(
    groups: _Groups,
    x: torch.Tensor,
    grad: torch.Tensor,
    score_before: bool,
    weights: Sequence[torch.Tensor],
    d_weights: Sequence[torch.Tensor | None],
    by_row: Sequence[torch.Tensor | None],
) -> None:
    """Fill in the gradients of weights, row scores and rows.

    Args:
        grad: of the output, `[tokens, dim]`.
        weights, d_weights: of w1, w2, w3, and memory for their gradients; None: not wanted.
        by_row: the products before the activation, gate and up; the scores `[rows, 1]` and memory for their gradient
            `[rows]`; memory for the gradient of inputs `[rows, dim]`. None: not weighted, not wanted.
    """
    from_gate, from_result, from_up = (weight.unbind(0) for weight in weights)
    to_w1, to_w2, to_w3 = (None if each is None else each.unbind(0) for each in d_weights)
    dim, width = x.shape[1], weights[0].shape[1]
    batches = groups.batches(dim)
    space = _workspace(batches, x, dim, dim, *[width] * 4)
    for batch in batches:
        tokens, gate, up, score, d_score, d_inputs = batch.of_rows(groups.tokens, *by_row)
        d_results, inputs, d_hidden, *hidden_space = batch.within(*space)
        torch.index_select(grad, 0, tokens, out=d_results)
        for expert, own_d_results, own_d_hidden in batch.each(d_results, d_hidden):
            torch.mm(own_d_results, from_result[expert], out=own_d_hidden)
        d_gate, d_up, hidden = _activation_backward(d_hidden, (gate, up), (score, d_score), score_before, hidden_space)
        if to_w2 is not None:
            for expert, own_d_results, own_hidden in batch.each(d_results, hidden):
                torch.mm(own_d_results.t(), own_hidden, out=to_w2[expert])
        if to_w1 is not None or to_w3 is not None:
            torch.index_select(x, 0, tokens, out=inputs)
        for to_weight, d_pre in ((to_w1, d_gate), (to_w3, d_up)):
            if to_weight is not None:
                for expert, own_d_pre, own_inputs in batch.each(d_pre, inputs):
                    torch.mm(own_d_pre.t(), own_inputs, out=to_weight[expert])
        if d_inputs is not None:
            for expert, own_d_gate, own_d_up, own_d_inputs in batch.each(d_gate, d_up, d_inputs):
                torch.mm(own_d_gate, from_gate[expert], out=own_d_inputs)
                own_d_inputs.addmm_(own_d_up, from_up[expert])


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
