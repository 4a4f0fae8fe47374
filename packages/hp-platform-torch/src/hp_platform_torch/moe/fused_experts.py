"""SwiGLU experts of one rank as one autograd node over Triton kernels.

Forward saves the tokens and the products before the activation; everything else is recomputed in backward. The gradient
of the scores needs no outputs of experts: `d_score = d_act · act` with `d_act = w2.T @ d_out`, as in SonicMoE (arXiv
2512.14080).

The table of row tiles is computed on the device, so that the host need not know the token counts of experts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from hp_moe import TokenPermutation
from hp_platform_torch.moe.tile_sizes import Tile, TileSizes
from hp_platform_torch.moe.triton_kernels import (
    activation_backward_kernel,
    combine_kernel,
    down_kernel,
    gate_up_kernel,
    input_gradient_kernel,
    schedule_kernel,
    score_gradient_kernel,
    weight_gradient_kernel,
)


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of rows by expert, and its inverse.

    Attributes:
        entries: int32 `[num_rows]`, flat index of each row's slot, `token * num_slots + slot`.
        positions: int32 `[num_tokens * num_slots]`, row of each slot; `num_rows` or more for empty slots.
    """

    entries: torch.Tensor
    positions: torch.Tensor
    num_tokens: int
    num_slots: int
    num_rows: int


def order_rows(permutation: TokenPermutation, num_experts: int) -> RowOrder:
    """Return the order of a `permutation`, computed faster than by its own methods."""
    keys = permutation.keys.reshape(-1)
    # A radix sort takes time for each byte of a key, so keys are narrowed first.
    narrow = torch.int16 if num_experts < 2**15 else torch.int64
    # Stable: rows of an expert stay in token order, so that every sum has one order.
    order = torch.sort(keys.to(narrow), stable=True).indices
    positions = torch.empty(order.shape, dtype=torch.int32, device=order.device)
    # The inverse permutation by one scatter instead of a second sort.
    positions[order] = torch.arange(order.shape[0], dtype=torch.int32, device=order.device)
    return RowOrder(
        order[: permutation.num_copies].int(),
        positions,
        permutation.num_rows,
        permutation.num_slots,
        permutation.num_copies,
    )


# Elements of the (lines, groups) comparison that one program of `schedule_kernel` holds at once.
_TABLE_ELEMENTS = 16384


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """Tiles of `rows_per_tile` consecutive rows, none of which spans two groups.

    Attributes:
        table: int32 `[max_tiles, 3]`: group, first row, and end of the group's rows, for each tile.
        num_tiles: int32 `[1]`, number of valid lines of the table.
        row_ends: int32 `[groups]`, end of each group's rows.
        max_tiles: upper bound of the number of tiles, known on the host; it sizes the grids of kernels.
        rows_per_tile: rows of a tile; the last tile of a group may have fewer.
    """

    table: torch.Tensor
    num_tiles: torch.Tensor
    row_ends: torch.Tensor
    max_tiles: int
    rows_per_tile: int


def schedule_tiles(counts: torch.Tensor, num_rows: int, rows_per_tile: int) -> TileSchedule:
    """Split groups of `counts` rows (int64 `[groups]` on the device, `num_rows` in total) into tiles."""
    num_groups = counts.shape[0]
    # Every group with rows may end in a partly filled tile.
    max_tiles = num_rows // rows_per_tile + min(num_groups, num_rows)
    int32 = {"dtype": torch.int32, "device": counts.device}
    table, num_tiles = torch.empty((max_tiles, 3), **int32), torch.empty((1,), **int32)
    row_ends = torch.empty((num_groups,), **int32)
    width = triton.next_power_of_2(num_groups)
    block = max(1, min(triton.next_power_of_2(max_tiles), _TABLE_ELEMENTS // width))
    schedule_kernel[(triton.cdiv(max_tiles, block),)](
        counts, table, num_tiles, row_ends, num_groups, max_tiles, rows_per_tile, width, block
    )
    return TileSchedule(table, num_tiles, row_ends, max_tiles, rows_per_tile)


_COMBINE_BLOCK = 2048
_SCORE_BLOCK = 1024
_SCORE_NONE, _SCORE_AFTER, _SCORE_BEFORE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class _Problem:
    """Sizes and options of one call; its rows are the copies of tokens in expert-major order.

    Attributes:
        order: order of the rows.
        counts: int64 `[experts]`, number of rows of each expert.
        score: one of the `_SCORE_` constants.
        tiles: tile sizes of all kernels.
        saves: whether forward saves tensors for backward.
    """

    order: RowOrder
    counts: torch.Tensor
    score: int
    tiles: TileSizes
    saves: bool

    def schedule(self) -> TileSchedule:
        return schedule_tiles(self.counts, self.order.num_rows, self.tiles.rows)


def fused_experts(
    x: torch.Tensor,
    order: RowOrder,
    counts: torch.Tensor,
    scores: torch.Tensor | None,
    weights: tuple[torch.Tensor, ...],
    score_before_experts: bool,
    tiles: TileSizes,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, `[tokens, dim]`; see `hp_moe.hookspecs.hp_fused_experts`.

    There must be at least one row. All tensors but the float32 `scores` have the same dtype, and `counts` (int64
    `[experts]`) belong to `order`.
    """
    score = _SCORE_NONE if scores is None else _SCORE_BEFORE if score_before_experts else _SCORE_AFTER
    inputs = (x, scores, *weights)
    # Inside of `forward` gradients are disabled, and `requires_grad` of the inputs does not show `no_grad`.
    saves = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
    return _FusedExperts.apply(_Problem(order, counts, score, tiles, saves), *inputs)


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        problem: _Problem,
        x: torch.Tensor,
        scores: torch.Tensor | None,
        w1: torch.Tensor,
        w2: torch.Tensor,
        w3: torch.Tensor,
    ) -> torch.Tensor:
        x, w1, w2, w3 = (tensor.contiguous() for tensor in (x, w1, w2, w3))
        scores = None if scores is None else scores.contiguous()
        # One schedule for all kernels over tiles of rows, in forward and backward.
        schedule = problem.schedule()
        pre, act = _gate_up(problem, schedule, x, scores, w1, w3, problem.saves)
        y = _down(problem, schedule, act, w2)
        ctx.problem, ctx.schedule = problem, schedule
        ctx.save_for_backward(x, scores, w1, w2, w3, pre)
        return _combine(problem, y, scores if problem.score == _SCORE_AFTER else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scores, w1, w2, w3, pre = ctx.saved_tensors
        problem, schedule, grad = ctx.problem, ctx.schedule, grad.contiguous()
        _, needs_x, needs_scores, *needs_weights = ctx.needs_input_grad
        d_x = d_scores = d_w1 = d_w2 = d_w3 = None
        d_pre, weighted, parts = _activation_backward(problem, schedule, grad, scores, w2, pre)
        if needs_scores:
            d_scores = _score_gradient(problem, parts, scores)
        if needs_weights[1]:
            (d_w2,) = _weight_gradients(problem, schedule, grad, weighted, [w2], problem.tiles.w2_gradient)
        # Freed before the gradients below are allocated, which bounds the peak of memory.
        del weighted, parts
        if needs_x:
            d_x = _combine(problem, _input_gradient(problem, schedule, d_pre, w1, w3), None)
        if needs_weights[0] or needs_weights[2]:
            d_w1, d_w3 = _weight_gradients(problem, schedule, d_pre, x, [w1, w3], problem.tiles.w13_gradient)
        return None, d_x, d_scores, d_w1, d_w2, d_w3


def _programs(like: torch.Tensor, tile: Tile, num_tiles: int) -> tuple[int]:
    """Return the grid of a kernel for at most `num_tiles` tiles."""
    if tile.programs and like.is_cuda:
        return (min(num_tiles, _num_multiprocessors(like.device) * tile.programs),)
    return (num_tiles,)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _precision(x: torch.Tensor) -> str:
    """Return the precision of products: float32 inputs are not rounded to tf32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _gate_up(
    problem: _Problem,
    schedule: TileSchedule,
    x: torch.Tensor,
    scores: torch.Tensor | None,
    w1: torch.Tensor,
    w3: torch.Tensor,
    keep: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the products before the activation, `[rows, 2 * hidden_dim]`, if they are saved, and the activation."""
    (_, width, dim), tile = w1.shape, problem.tiles.gate_up
    act = x.new_empty((problem.order.num_rows, width))
    pre = x.new_empty((problem.order.num_rows, 2 * width)) if keep else None
    grid = _programs(x, tile, schedule.max_tiles * triton.cdiv(width, tile.columns))
    gate_up_kernel[grid](
        x,
        problem.order.entries,
        scores,
        w1,
        w3,
        pre,
        act,
        schedule.table,
        schedule.num_tiles,
        H=dim,
        I=width,
        SLOTS=problem.order.num_slots,
        SCORE=problem.score,
        KEEP=keep,
        PRECISION=_precision(x),
        **tile.options(),
    )
    return pre, act


def _down(problem: _Problem, schedule: TileSchedule, act: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Return the result of each row, `[rows, dim]`, not weighted by scores."""
    (_, dim, width), tile = w2.shape, problem.tiles.down
    y = act.new_empty((problem.order.num_rows, dim))
    grid = _programs(act, tile, schedule.max_tiles * triton.cdiv(dim, tile.columns))
    down_kernel[grid](
        act, w2, y, schedule.table, schedule.num_tiles, H=dim, I=width, PRECISION=_precision(act), **tile.options()
    )
    return y


def _combine(problem: _Problem, y: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
    """Return the (weighted) sum of each token's rows: `[rows, dim]` -> `[tokens, dim]`."""
    order, width = problem.order, y.shape[1]
    out = y.new_empty((order.num_tokens, width))
    block = min(_COMBINE_BLOCK, triton.next_power_of_2(width))
    combine_kernel[(order.num_tokens, triton.cdiv(width, block))](
        y,
        order.positions,
        scores,
        out,
        order.num_rows,
        WIDTH=width,
        SLOTS=order.num_slots,
        WEIGHTED=scores is not None,
        BLOCK=block,
    )
    return out


def _activation_backward(
    problem: _Problem,
    schedule: TileSchedule,
    grad: torch.Tensor,
    scores: torch.Tensor | None,
    w2: torch.Tensor,
    pre: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of `pre`, the weighted activation, and partial sums `[parts, rows]` of the scores' gradient."""
    (_, dim, width), tile = w2.shape, problem.tiles.activation_backward
    num_columns = triton.cdiv(width, tile.columns)
    d_pre, weighted = torch.empty_like(pre), pre.new_empty((problem.order.num_rows, width))
    # One partial sum for each tile of columns instead of atomics, which would add in any order.
    parts = pre.new_empty((num_columns, problem.order.num_rows), dtype=torch.float32)
    activation_backward_kernel[_programs(grad, tile, schedule.max_tiles * num_columns)](
        grad,
        problem.order.entries,
        scores,
        w2,
        pre,
        d_pre,
        weighted,
        parts,
        schedule.table,
        schedule.num_tiles,
        problem.order.num_rows,
        H=dim,
        I=width,
        SLOTS=problem.order.num_slots,
        SCORE=problem.score,
        PRECISION=_precision(grad),
        PARTS=tile.parts,
        **tile.options(),
    )
    return d_pre, weighted, parts


def _score_gradient(problem: _Problem, parts: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the scores' gradient, `[tokens, slots]`, from its partial sums."""
    out = torch.empty_like(scores)
    score_gradient_kernel[(triton.cdiv(out.numel(), _SCORE_BLOCK),)](
        parts,
        problem.order.positions,
        out,
        problem.order.num_rows,
        out.numel(),
        NUM_PARTS=parts.shape[0],
        BLOCK=_SCORE_BLOCK,
    )
    return out


def _input_gradient(
    problem: _Problem, schedule: TileSchedule, d_pre: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of each row's input, `[rows, dim]`. `_combine` sums those of a token."""
    (_, width, dim), tile = w1.shape, problem.tiles.input_gradient
    d_rows = d_pre.new_empty((problem.order.num_rows, dim))
    grid = _programs(d_pre, tile, schedule.max_tiles * triton.cdiv(dim, tile.columns))
    input_gradient_kernel[grid](
        d_pre,
        w1,
        w3,
        d_rows,
        schedule.table,
        schedule.num_tiles,
        H=dim,
        I=width,
        PRECISION=_precision(d_pre),
        **tile.options(),
    )
    return d_rows


def _weight_gradients(
    problem: _Problem,
    schedule: TileSchedule,
    left: torch.Tensor,
    right: torch.Tensor,
    weights: list[torch.Tensor],
    tile: Tile,
) -> list[torch.Tensor]:
    """Return the gradients of `weights`, each `[experts, M, N]`.

    For `[w2]`, `left` has a row for each token and `right` for each copy; for `[w1, w3]` it is the reverse.
    """
    out = [torch.empty_like(weight) for weight in weights]
    num_experts, rows, columns = weights[0].shape
    num_tiles = num_experts * len(weights) * triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    weight_gradient_kernel[_programs(left, tile, num_tiles)](
        left,
        right,
        problem.order.entries,
        schedule.row_ends,
        out[0],
        out[-1],
        num_experts,
        M=rows,
        N=columns,
        HALVES=len(weights),
        SLOTS=problem.order.num_slots,
        GATHER_LEFT=len(weights) == 1,
        PRECISION=_precision(left),
        **tile.options(),
    )
    return out
