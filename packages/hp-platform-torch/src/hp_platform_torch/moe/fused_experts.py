"""SwiGLU experts of one rank as one autograd node over Triton kernels.

Forward saves the tokens and the products before the activation; everything else is recomputed in backward. The gradient
of the scores needs no outputs of experts: `d_score = d_act · act` with `d_act = w2.T @ d_out`, as in SonicMoE (arXiv
2512.14080).

The table of row tiles is computed on the device, so that the host need not know the token counts of experts.

Before the first use of each device, dtype and shape, `checked_fused_experts` compares the kernels with unfused matrix
products. Triton has been seen to compile kernels with wrong gradients, without an error, for a device that it supported
only recently. If the check fails, a warning is issued and the layer uses torch's own grouped products.

Tile sizes were tuned on an H100. Other devices get small ones that fit every CUDA device.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from hp_dtensor.parallel.recompute import saved_value
from hp_dtensor.platform.interface import Platform
from hp_moe import GroupSizes, TokenPermutation
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
        pre, act = _gate_up(problem, schedule, x, scores, w1, w3)
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
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the products before the activation, `[rows, 2 * hidden_dim]`, if they are saved, and the activation."""
    (_, width, dim), tile = w1.shape, problem.tiles.gate_up
    act = x.new_empty((problem.order.num_rows, width))
    pre = x.new_empty((problem.order.num_rows, 2 * width)) if problem.saves else None
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
        SAVES=problem.saves,
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


# Tolerances of the relative error (norm of the difference over the norm). Measured on an H100: 4e-3 for bfloat16 and
# 5e-4 for float16.
_LARGEST_ERROR = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Kind:
    """The arguments that the compiled code of the kernels depends on.

    Attributes:
        score_before: `score_before_experts` of `GroupedExperts`; None without scores.
    """

    device: torch.device
    dtype: torch.dtype
    dim: int
    hidden_dim: int
    num_slots: int
    score_before: bool | None
    tiles: TileSizes


_passed: dict[Kind, bool] = {}


def checked_fused_experts(
    x: torch.Tensor,
    permutation: TokenPermutation,
    sizes: GroupSizes,
    scores: torch.Tensor | None,
    weights: tuple[torch.Tensor, ...],
    score_before_experts: bool,
) -> torch.Tensor | None:
    """Apply `fused_experts`. Return None if the inputs are not supported or the kernels failed their check."""
    if not _applies(x, permutation, weights):
        return None
    tiles = choose_tile_sizes(x, permutation.num_copies, len(sizes))
    _, hidden_dim, dim = weights[0].shape
    score_before = None if scores is None else score_before_experts
    kind = Kind(x.device, x.dtype, dim, hidden_dim, permutation.num_slots, score_before, tiles)
    if not _passes(kind, permutation.platform):
        return None
    order = saved_value(lambda: order_rows(permutation, len(sizes)))
    return fused_experts(x, order, sizes.tensor, scores, weights, score_before_experts, tiles)


def _applies(x: torch.Tensor, permutation: TokenPermutation, weights: tuple[torch.Tensor, ...]) -> bool:
    return (
        x.is_cuda
        # Torch's products compute shapes alone for tensors without memory.
        and not isinstance(x, FakeTensor)
        # For float32 the device's own library is faster: measured 50 ms, and 68 ms with the kernels.
        and x.dtype in (torch.bfloat16, torch.float16)
        # Slots and rows are int32 in the kernels.
        and permutation.keys.numel() < 2**31
        and all(weight.dtype == x.dtype and weight.numel() > 0 for weight in weights)
        and permutation.num_copies > 0
        and not torch.compiler.is_compiling()
    )


def _passes(kind: Kind, platform: Platform) -> bool:
    """Return the result of `_check`, which runs at the first call for this kind."""
    if kind not in _passed:
        if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # The check synchronizes with the device, which is an error while a CUDA graph is captured. The result is
            # not cached, so that a later call outside of a capture checks.
            return False
        _passed[kind] = _check(kind, platform)
    return _passed[kind]


def _check(kind: Kind, platform: Platform) -> bool:
    """Return True if the kernels agree with plain products on a small layer; otherwise warn."""
    try:
        # Apart from the caller: the check needs gradients in evaluation too. The hooks and modes of a checkpoint would
        # record its tensors and products, which recomputation does not repeat. Autocast would round the reference.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            saved_tensors_hooks(lambda x: x, lambda x: x),
            _disable_current_modes(),
            torch.autocast(kind.device.type, enabled=False),
        ):
            error = largest_error(kind, platform)
    except Exception as failure:  # compilers and drivers raise errors of any class
        reason = f"{type(failure).__name__}: {failure}"
    else:
        if error <= _LARGEST_ERROR[kind.dtype]:
            return True
        reason = f"relative error {error:.1e}, expected at most {_LARGEST_ERROR[kind.dtype]:.0e}"
    warnings.warn(
        f"hp-platform-torch: the Triton kernels failed their check on {_name(kind.device)} for experts of dim "
        f"{kind.dim}, hidden_dim {kind.hidden_dim} in {kind.dtype}: {reason}. torch's grouped products are used "
        "instead, which is slower; please report it",
        stacklevel=2,
    )
    return False


def largest_error(kind: Kind, platform: Platform) -> float:
    """Return the largest relative error of the output and of all gradients of a small layer; infinity for NaN.

    The error is the norm of the difference divided by the norm. The layer has two experts with a partly filled last
    tile, and one without rows.
    """
    tokens, device = kind.tiles.rows + kind.tiles.rows // 2 + 3, kind.device
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x, grad = normal(tokens, kind.dim).to(kind.dtype), normal(tokens, kind.dim).to(kind.dtype)
    shapes = ((3, kind.hidden_dim, kind.dim), (3, kind.dim, kind.hidden_dim), (3, kind.hidden_dim, kind.dim))
    weights = tuple((normal(*shape) / shape[2] ** 0.5).to(kind.dtype).requires_grad_() for shape in shapes)
    leaves, scores = [x.requires_grad_(), *weights], None
    if kind.score_before is not None:
        scores = (torch.rand((tokens, kind.num_slots), generator=generator, device=device) + 0.5).requires_grad_()
        leaves.append(scores)
    # Experts 0 and 2 only: expert 1 has no rows, and a token may have the same expert in two slots.
    experts = 2 * torch.randint(2, (tokens, kind.num_slots), generator=generator, device=device)
    order = order_rows(TokenPermutation(platform, experts, experts.numel()), 3)
    counts = torch.bincount(experts.reshape(-1), minlength=3)
    y = fused_experts(x, order, counts, scores, weights, bool(kind.score_before), kind.tiles)
    plain = _plain(x, experts, scores, weights, bool(kind.score_before))
    got = (y, *torch.autograd.grad(y, leaves, grad))
    expected = (plain, *torch.autograd.grad(plain, leaves, grad.to(plain.dtype)))
    errors = [(a - b).norm() / b.norm() for a, b in zip(got, expected, strict=True)]
    return float(torch.stack(errors).detach().nan_to_num(nan=torch.inf).max())


def _plain(
    x: torch.Tensor,
    experts: torch.Tensor,
    scores: torch.Tensor | None,
    weights: tuple[torch.Tensor, ...],
    score_before: bool,
) -> torch.Tensor:
    """Return the reference output `[tokens, dim]` in twice the precision, computing each expert on every token."""
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    x, (w1, w2, w3) = x.to(wide), (weight.to(wide) for weight in weights)
    factors = torch.ones(experts.shape, dtype=wide, device=x.device) if scores is None else scores.to(wide)
    out = torch.zeros_like(x)
    for expert in (0, 2):
        of_slots = torch.where(experts == expert, factors, 0.0)
        # Scores of results may be summed over the slots of an expert. Scores of inputs may not, since the activation is
        # not linear.
        for factor in of_slots.split(1, 1) if score_before else (of_slots.sum(1, keepdim=True),):
            rows = x * factor if score_before else x
            results = (F.silu(rows @ w1[expert].T) * (rows @ w3[expert].T)) @ w2[expert].T
            out = out + (results if score_before else results * factor)
    return out


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


@dataclass(frozen=True, slots=True)
class Tile:
    """Launch options of one kernel.

    Attributes:
        rows, columns: size of a tile of the result.
        depth: size of the tile along the dimension that is summed over.
        warps, stages: Triton's `num_warps` and `num_stages`.
        group: number of row tiles that are computed together for each column tile, so that they share the L2 cache.
        programs: number of persistent programs per multiprocessor; 0 for one program per tile.
        flatten: overlap the end of a tile with the start of the program's next one.
        parts: number of column slices in which the backward of the activation is computed, to limit registers.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8
    programs: int = 0
    flatten: bool = False
    parts: int = 1

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of a kernel launch."""
        return {
            "BM": self.rows,
            "BN": self.columns,
            "BK": self.depth,
            "GROUP": self.group,
            "FLATTEN": self.flatten,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


@dataclass(frozen=True, slots=True, eq=False)
class TileSizes:
    """One `Tile` for each kernel. The first four have the same `rows`, those of the tile schedule.

    Compared by identity, so that it is a cheap dictionary key.
    """

    gate_up: Tile
    down: Tile
    activation_backward: Tile
    input_gradient: Tile
    w2_gradient: Tile
    w13_gradient: Tile

    @property
    def rows(self) -> int:
        return self.gate_up.rows


# For at least 512, at least 96 and fewer rows per expert, on compute capability 9.
_MANY_ROWS = TileSizes(
    gate_up=Tile(128, 128, 64, 8, 4, group=4),
    down=Tile(128, 256, 64, 8, 4, programs=1),
    activation_backward=Tile(128, 256, 64, 8, 4, parts=4),
    input_gradient=Tile(128, 256, 32, 8, 4, group=4),
    w2_gradient=Tile(128, 256, 64, 8, 5),
    w13_gradient=Tile(128, 256, 64, 8, 5),
)
_SOME_ROWS = replace(_MANY_ROWS, w2_gradient=Tile(128, 256, 32, 8, 5), w13_gradient=Tile(128, 256, 32, 8, 5))
_FEW_ROWS = TileSizes(
    gate_up=Tile(64, 128, 64, 4, 4),
    down=Tile(64, 128, 64, 4, 4),
    activation_backward=Tile(64, 128, 64, 4, 4, parts=2),
    input_gradient=Tile(64, 128, 32, 4, 4),
    w2_gradient=Tile(64, 128, 32, 4, 4),
    w13_gradient=Tile(64, 128, 32, 4, 4),
)
# For other devices in 16-bit dtypes, and for float32, whose tiles need twice the shared memory.
_SMALL = TileSizes(*[Tile(64, 64, 32, 4, 3, parts=2)] * 6)
_FLOAT32 = TileSizes(*[Tile(32, 32, 32, 4, 2)] * 6)


def choose_tile_sizes(x: torch.Tensor, num_rows: int, num_experts: int) -> TileSizes:
    """Return tile sizes for inputs like `x` with `num_rows` rows in total.

    Depends only on values known to the host, so that it does not synchronize with the device.
    """
    if x.element_size() > 2:
        return _FLOAT32
    if not x.is_cuda or _capability(x.device)[0] != 9:
        return _SMALL
    rows_per_expert = num_rows / num_experts
    return _FEW_ROWS if rows_per_expert < 96 else _SOME_ROWS if rows_per_expert < 512 else _MANY_ROWS


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
