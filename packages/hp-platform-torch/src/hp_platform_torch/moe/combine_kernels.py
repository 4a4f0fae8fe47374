"""Sums of each token's rows in the order of its slots: deterministic, without atomics."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine_kernel(
    y,
    positions,
    scores,
    out,
    num_copies,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`out[t] = sum over slots s of scores[t, s] * y[positions[t, s]]`; a slot at `num_copies` has no row."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        position = tl.load(positions + token * SLOTS + slot).to(tl.int64)
        is_here = position < num_copies
        inside = tl.where(is_here, column, WIDTH) < WIDTH
        row = tl.load(y + position * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            # A slot without a row may have any score, one that is not finite too.
            row *= tl.where(is_here, tl.load(scores + token * SLOTS + slot).to(tl.float32), 0.0)
        total += row
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def score_gradient_kernel(parts, positions, out, num_copies, num_slots, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """`out[slot] = sum over n of parts[n, positions[slot]]`; zero for a slot without a row."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + slot, mask=slot < num_slots, other=0).to(tl.int64)
    is_here = (slot < num_slots) & (position < num_copies)
    total = tl.zeros((BLOCK,), tl.float32)
    for n in tl.static_range(NUM_PARTS):
        total += tl.load(parts + n * num_copies + position, mask=is_here, other=0.0)
    tl.store(out + slot, total.to(out.dtype.element_ty), mask=slot < num_slots)
