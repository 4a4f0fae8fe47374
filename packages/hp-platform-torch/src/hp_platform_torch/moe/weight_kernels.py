"""Gradients of experts' matrices: sums of outer products over ragged rows, exactly zero for experts without rows."""

from __future__ import annotations

import triton
import triton.language as tl

from hp_platform_torch.moe.row_kernels import _place


@triton.jit
def weight_gradient_kernel(
    left,
    right,
    entries,
    row_ends,
    first_out,
    second_out,
    num_groups,
    M: tl.constexpr,
    N: tl.constexpr,
    HALVES: tl.constexpr,
    SLOTS: tl.constexpr,
    GATHER_LEFT: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """`out[e] = sum over rows r of expert e of outer(left[r], right[r])`, `[M, N]` for each expert.

    One of the operands belongs to tokens and is gathered by `entries`. With HALVES 2, `left` is `[rows, 2 * M]`
    and its halves give two gradients.
    """
    num_m, num_n = HALVES * tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), num_groups * num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        expert = tile // (num_m * num_n)
        m, n = _place(tile % (num_m * num_n), num_m, num_n, GROUP)
        half = m // tl.cdiv(M, BM)
        start = tl.load(row_ends + expert - 1, mask=expert > 0, other=0)
        end = tl.load(row_ends + expert)
        i, j = (m - half * tl.cdiv(M, BM)) * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        at_left, at_right = left + half * M + (i % M)[:, None], right + (j % N)[None, :]
        total = tl.zeros((BM, BN), tl.float32)
        for first in range(start, end, BK):
            row = first + k
            is_row = row < end
            token = tl.load(entries + row, mask=is_row, other=0) // SLOTS
            left_row = (token if GATHER_LEFT else row).to(tl.int64)
            right_row = (row if GATHER_LEFT else token).to(tl.int64)
            # Both are masked: zero times what is not finite would not be zero.
            a = tl.load(at_left + left_row[None, :] * (HALVES * M), mask=is_row[None, :], other=0.0)
            b = tl.load(at_right + right_row[:, None] * N, mask=is_row[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        at = expert.to(tl.int64) * M * N + i[:, None] * N + j[None, :]
        inside = (i < M)[:, None] & (j < N)[None, :]
        result = total.to(first_out.dtype.element_ty)
        if HALVES == 1:
            tl.store(first_out + at, result, mask=inside)
        elif half == 0:
            tl.store(first_out + at, result, mask=inside)
        else:
            tl.store(second_out + at, result, mask=inside)
