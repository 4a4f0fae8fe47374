"""SwiGLU experts on the CPU as one autograd node.

Experts are computed in batches of a few, so that the tensors between their matrix products stay in the cache. Forward
saves the tokens and the products before the activation, as in `fused_experts`.
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

# Number of elements of the inputs of a batch of experts. Few enough that they are still in the cache when they are used
# again; enough that the overhead of an operation is small and that several threads share it.
_BATCH_ELEMENTS = 2**18


def host_experts(
    x: torch.Tensor,
    permutation: TokenPermutation,
    sizes: GroupSizes,
    scores: torch.Tensor | None,
    weights: tuple[torch.Tensor, ...],
    score_before_experts: bool,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, `[tokens, dim]`; see `hp_moe.hookspecs.hp_fused_experts`."""
    # Recomputation takes the saved order instead of sorting again.
    entries = saved_value(lambda: permutation.entries)
    groups = _Groups(entries, permutation.num_rows, permutation.num_slots, sizes.host)
    return _HostExperts.apply(groups, x, scores, score_before_experts, *weights)


class _Groups:
    """The rows of all experts in expert-major order, and their mapping to tokens.

    Args:
        entries: flat index of each row's slot, `token * num_slots + slot`, int `[rows]`.
        num_tokens: number of tokens.
        num_slots: number of slots per token, usually `top_k`.
        counts: number of rows of each expert.
        tables: the `tables` of an earlier object with the same arguments, which are then not computed again.
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
        """The constructor's arguments without `tables`."""
        return self.entries, self.num_tokens, self.num_slots, self.counts

    @property
    def tables(self) -> tuple[torch.Tensor | None, ...]:
        """Tensors computed from the arguments, to be passed to the constructor of an equal object."""
        return self.tokens, *self._bags

    def new_gradient(self, weight: torch.Tensor) -> torch.Tensor:
        """Return memory for the gradient of a weight: zeros for experts without rows, uninitialized for the others."""
        # Products overwrite the gradients of visited experts, so only the others are set to zero.
        gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for expert, count in enumerate(self.counts):
            if not count:
                gradient[expert].zero_()
        return gradient

    def scores(self, scores: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the score of each row, `[rows, 1]`, from `[tokens, slots]`."""
        return None if scores is None else scores.reshape(-1).index_select(0, self.entries).to(dtype)[:, None]

    def batches(self, width: int) -> list[_Batch]:
        """Split the experts that have rows into batches whose rows of this width fit into a core's cache."""
        found, experts, first, rows = [], [], 0, 0
        for expert, count in enumerate(self.counts):
            # An expert with more rows than fit is a batch of its own.
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
        """Return the sum of each token's rows, weighted by `scores` `[tokens, slots]`, added in the order of slots."""
        if not len(rows):
            return rows.new_zeros((self.num_tokens, rows.shape[1]))
        indices, firsts, slots = self._bags
        weights = None if scores is None else scores.reshape(-1).to(rows.dtype)
        if weights is not None and slots is not None:
            weights = weights.index_select(0, slots)
        # An embedding bag gathers and sums in one pass over the rows, without a permuted copy of them.
        return torch.ops.aten._embedding_bag_forward_only(rows, indices, firsts, False, 0, False, weights)[0]

    @functools.cached_property
    def _bags(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Arguments of an embedding bag that sums the rows of each token.

        Rows in token order; the offset of each token's first row; the slot of each row, or None if no slot is empty.
        """
        num_rows, num_slots = len(self.entries), self.num_tokens * self.num_slots
        # The inverse of `entries`: the row of each slot, -1 for slots without a row.
        order = torch.arange(num_slots)
        rows = torch.full((num_slots,), -1).index_copy_(0, self.entries, order[:num_rows])
        if num_rows == num_slots:
            return rows, order[:: self.num_slots].contiguous(), None
        # Tokens may have fewer rows than slots: offsets are the exclusive prefix sum of their numbers of rows.
        has_row = rows >= 0
        per_token = has_row.view(self.num_tokens, self.num_slots).sum(1)
        return rows[has_row], per_token.cumsum(0) - per_token, order[has_row]


@dataclass
class _Batch:
    """Consecutive experts that are computed together.

    Attributes:
        experts: numbers of the experts.
        counts: number of rows of each of them, above 0.
        rows: slice of their rows in expert-major order.
    """

    experts: list[int]
    counts: list[int]
    rows: slice

    def of_rows(self, *tensors: torch.Tensor | None) -> list[Any]:
        """Return the batch's rows of tensors with the rows of all experts; None stays None."""
        return [None if each is None else each[self.rows] for each in tensors]

    def within(self, *space: torch.Tensor) -> list[torch.Tensor]:
        """Return the first rows of each workspace tensor, as many as the batch has."""
        return [each[: self.rows.stop - self.rows.start] for each in space]

    def each(self, *tensors: torch.Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield the number of each expert, and views of its rows in tensors with the rows of this batch.

        One split makes the views of all experts, which is much cheaper than slicing for each expert.
        """
        return zip(self.experts, *(torch.split_with_sizes(tensor, self.counts) for tensor in tensors), strict=True)


def _workspace(batches: list[_Batch], like: torch.Tensor, *widths: int) -> list[torch.Tensor]:
    """Return memory for the rows of any one batch: `[rows of the largest batch, width]` for each width.

    All batches share it, because the C library maps and unmaps blocks of this size at every allocation.
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
        # Tables are saved as tensors, so that saved-tensor hooks (recomputation, offload) apply to them too. The
        # arguments alone are stored on `ctx`.
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
            groups.new_gradient(weight) if needed else None
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
    # Views of all experts' matrices, made once instead of by indexing in the loops.
    to_gate, to_result, to_up = (weight.transpose(1, 2).unbind(0) for weight in (w1, w2, w3))
    for batch in batches:
        tokens, gate, up, score, batch_results = batch.of_rows(groups.tokens, *pre, score_of_inputs, results)
        inputs, hidden = batch.within(*space)
        torch.index_select(x, 0, tokens, out=inputs)
        for expert, own_inputs, own_gate, own_up in batch.each(inputs, gate, up):
            # `out=` writes straight into the saved products: no temporary, no copy.
            torch.mm(own_inputs, to_gate[expert], out=own_gate)
            torch.mm(own_inputs, to_up[expert], out=own_up)
        # Out of place: `gate` and `up` are views of the saved products, which backward needs unweighted.
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
    """Write the gradients of weights, of each row's score, and of each row's inputs.

    Args:
        grad: gradient of the output, `[tokens, dim]`.
        weights: w1, w2, w3.
        d_weights: memory for the gradients of w1, w2, w3; None for a gradient that is not needed.
        by_row: five tensors with a row for each input of an expert: gate and up, the products before the activation;
            scores `[rows, 1]` and memory for their gradient `[rows]`, both None without scores; memory for the
            gradient of inputs `[rows, dim]`, None if it is not needed.
    """
    from_gate, from_result, from_up = (weight.unbind(0) for weight in weights)
    to_w1, to_w2, to_w3 = (None if each is None else each.unbind(0) for each in d_weights)
    dim, width = x.shape[1], weights[0].shape[1]
    batches = groups.batches(dim)
    space = _workspace(batches, x, dim, dim, *[width] * 4)
    for batch in batches:
        tokens, gate, up, score, d_score, d_inputs = batch.of_rows(groups.tokens, *by_row)
        d_results, inputs, d_hidden, *hidden_space = batch.within(*space)
        # Not weighted: `_activation_backward` applies the score to the hidden rows instead. Both orders are equal,
        # since w2 is linear.
        torch.index_select(grad, 0, tokens, out=d_results)
        for expert, own_d_results, own_d_hidden in batch.each(d_results, d_hidden):
            torch.mm(own_d_results, from_result[expert], out=own_d_hidden)
        d_gate, d_up, hidden = _activation_backward(d_hidden, (gate, up), (score, d_score), score_before, hidden_space)
        # Inputs are gathered again instead of saved: they are copies of tokens, `top_k` for each.
        if to_w1 is not None or to_w3 is not None:
            torch.index_select(x, 0, tokens, out=inputs)
        # Without a gradient of inputs, `inputs` takes its place in the split and is not written.
        by_expert = batch.each(d_results, hidden, inputs, d_gate, d_up, inputs if d_inputs is None else d_inputs)
        for expert, own_d_results, own_hidden, own_inputs, own_d_gate, own_d_up, own_d_inputs in by_expert:
            if to_w1 is not None:
                torch.mm(own_d_gate.t(), own_inputs, out=to_w1[expert])
            if to_w2 is not None:
                torch.mm(own_d_results.t(), own_hidden, out=to_w2[expert])
            if to_w3 is not None:
                torch.mm(own_d_up.t(), own_inputs, out=to_w3[expert])
            if d_inputs is not None:
                torch.mm(own_d_gate, from_gate[expert], out=own_d_inputs)
                own_d_inputs.addmm_(own_d_up, from_up[expert])


def _at_slots(d_rows: torch.Tensor, entries: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the gradient of scores `[tokens, slots]` from that of each row's score; zeros for slots without a row."""
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
    """Return the gradients of gate and up, and the weighted activation. All three are stored in `space`.

    Args:
        d_hidden: gradient of the weighted activation; it is overwritten.
        pre: the products before the activation, gate and up.
        scores: `[rows, 1]`, and memory for their gradient, `[rows]`; None without scores.
        space: three tensors like `d_hidden`.
    """
    raw_gate, raw_up = pre
    silu, hidden, product = space
    score, d_score = scores
    gate, up = (raw_gate * score, raw_up * score) if score is not None and score_before else pre
    torch.ops.aten.silu.out(gate, out=silu)
    torch.mul(silu, up, out=hidden)
    if score is not None and not score_before:
        # d_score = d_hidden · hidden, before either is scaled by the score below.
        torch.sum(torch.mul(d_hidden, hidden, out=product), 1, out=d_score)
        hidden.mul_(score)
        d_hidden.mul_(score)
    # In place: `silu` and then `d_hidden` are not needed any more, so that three buffers are enough.
    d_up = silu.mul_(d_hidden)
    d_gate = torch.ops.aten.silu_backward.grad_input(d_hidden.mul_(up), gate, grad_input=product)
    if score is not None and d_score is not None and score_before:
        # The score scales both inputs of the activation: gate = score * raw_gate, up = score * raw_up.
        torch.sum(torch.mul(d_gate, raw_gate), 1, out=d_score)
        d_score.add_(torch.linalg.vecdot(d_up, raw_up))
        d_gate.mul_(score)
        d_up.mul_(score)
    return d_gate, d_up, hidden
