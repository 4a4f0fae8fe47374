"""Triton kernels of SwiGLU experts: the table of tiles, grouped products and their backwards, and the combine.

Rows are in expert-major order. Operands that belong to tokens are gathered by the loads of a product, so there is no
permuted copy of the tokens. All sums are in float32 and in a fixed order, without atomics, so that results are
deterministic. Gradients of the weights of experts without rows are exactly zero.

Names in the kernels: H is the width of a token, I the width of an expert, BM, BN, BK the sizes of a tile, SLOTS the
number of experts per token. `entries[row] = token * SLOTS + slot` identifies the choice that a row belongs to. SCORE is
0 without scores, 1 if scores multiply results, 2 if they multiply the input of the experts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def schedule_kernel(
    counts,
    table,
    num_tiles,
    row_ends,
    num_groups,
    max_tiles,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill BLOCK lines of the table of tiles.

    Every program sums the counts of all groups itself, which is cheaper than a second launch.
    """
    group = tl.arange(0, GROUPS)
    count = tl.load(counts + group, mask=group < num_groups, other=0).to(tl.int32)
    tiles_of_group = (count + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(tiles_of_group, 0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # The groups that end at or before each tile; their number is the tile's group. Groups without rows are skipped.
    before = tile_ends[None, :] <= tile[:, None]
    tile_group = tl.sum(before.to(tl.int32), 1)
    first_row = tl.sum(tl.where(before, count[None, :], 0), 1)
    first_tile = tl.sum(tl.where(before, tiles_of_group[None, :], 0), 1)
    own_rows = tl.sum(tl.where(group[None, :] == tile_group[:, None], count[None, :], 0), 1)
    # Lines from `num_tiles` on are written too, but no kernel reads them.
    line, is_line = table + tile * 3, tile < max_tiles
    tl.store(line, tile_group, mask=is_line)
    tl.store(line + 1, first_row + (tile - first_tile) * ROWS, mask=is_line)
    tl.store(line + 2, first_row + own_rows, mask=is_line)
    if tl.program_id(0) == 0:
        tl.store(num_tiles, tl.sum(tiles_of_group, 0))
        tl.store(row_ends + group, tl.cumsum(count, 0), mask=group < num_groups)


@triton.jit
def _place(tile, num_m, num_n, GROUP: tl.constexpr):
    """Return (m, n) of a tile. Tiles that run together form bands of GROUP row tiles, to share the L2 cache."""
    band = tile // (GROUP * num_n)
    first = band * GROUP
    # The last band may have fewer row tiles.
    height = min(num_m - first, GROUP)
    inside = tile % (GROUP * num_n)
    return first + inside % height, inside // height


@triton.jit
def _row_scores(scores, entry, SCORE: tl.constexpr):
    """Return the float32 score of each row; ones without scores."""
    if SCORE == 0:
        return tl.full(entry.shape, 1.0, tl.float32)
    else:
        return tl.load(scores + entry).to(tl.float32)


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    return tl.load(pointers, mask=mask, other=0.0) if MASKED else tl.load(pointers)


@triton.jit
def gate_up_kernel(
    x,
    entries,
    scores,
    w1,
    w3,
    pre,
    act,
    table,
    num_tiles,
    H: tl.constexpr,
    I: tl.constexpr,
    SLOTS: tl.constexpr,
    SCORE: tl.constexpr,
    SAVES: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Compute `pre[r] = (w1 @ x[token], w3 @ x[token])`, stored if SAVES, and `act[r] = silu(gate) * up`."""
    num_m, num_n = tl.load(num_tiles), tl.cdiv(I, BN)
    # `num_tiles` is read on the device: the grid covers an upper bound, and surplus programs do nothing.
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        m, n = _place(tile, num_m, num_n, GROUP)
        expert = tl.load(table + m * 3).to(tl.int64)
        start, end = tl.load(table + m * 3 + 1), tl.load(table + m * 3 + 2)
        row = start + tl.arange(0, BM)
        is_row = row < end
        # Rows past the end of the group read token 0 and are not stored.
        entry = tl.load(entries + row, mask=is_row, other=0)
        column, k = n * BN + tl.arange(0, BN), tl.arange(0, BK)
        a = x + (entry // SLOTS).to(tl.int64)[:, None] * H + k[None, :]
        # Columns past the end wrap around to the first ones, so that loads need no mask. They are not stored.
        matrix = expert * I * H + (column % I)[None, :] * H + k[:, None]
        gate, up = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
        for first in range(0, H, BK):
            inside = k < H - first
            rows = _load(a + first, inside[None, :], H % BK != 0)
            b1 = _load(w1 + matrix + first, inside[:, None], H % BK != 0)
            gate = tl.dot(rows, b1, gate, input_precision=PRECISION)
            b3 = _load(w3 + matrix + first, inside[:, None], H % BK != 0)
            up = tl.dot(rows, b3, up, input_precision=PRECISION)
        out = is_row[:, None] & (column < I)[None, :]
        # Offsets of elements may exceed 2**31.
        wide = row.to(tl.int64)[:, None]
        if SAVES:
            tl.store(pre + wide * (2 * I) + column[None, :], gate.to(pre.dtype.element_ty), mask=out)
            tl.store(pre + wide * (2 * I) + I + column[None, :], up.to(pre.dtype.element_ty), mask=out)
        if SCORE == 2:
            score = _row_scores(scores, entry, SCORE)[:, None]
            gate, up = gate * score, up * score
        tl.store(act + wide * I + column[None, :], (gate * tl.sigmoid(gate) * up).to(act.dtype.element_ty), mask=out)


@triton.jit
def down_kernel(
    act,
    w2,
    y,
    table,
    num_tiles,
    H: tl.constexpr,
    I: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Compute `y[r] = w2 @ act[r]` for all rows r."""
    num_m, num_n = tl.load(num_tiles), tl.cdiv(H, BN)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        m, n = _place(tile, num_m, num_n, GROUP)
        expert = tl.load(table + m * 3).to(tl.int64)
        start, end = tl.load(table + m * 3 + 1), tl.load(table + m * 3 + 2)
        row = start + tl.arange(0, BM)
        is_row = row < end
        column, k = n * BN + tl.arange(0, BN), tl.arange(0, BK)
        # Rows past the end of the group read the group's first row, so that loads need no mask.
        a = act + tl.where(is_row, row, start).to(tl.int64)[:, None] * I + k[None, :]
        b = w2 + expert * H * I + (column % H)[None, :] * I + k[:, None]
        total = tl.zeros((BM, BN), tl.float32)
        for first in range(0, I, BK):
            inside = k < I - first
            rows = _load(a + first, inside[None, :], I % BK != 0)
            matrix = _load(b + first, inside[:, None], I % BK != 0)
            total = tl.dot(rows, matrix, total, input_precision=PRECISION)
        out = is_row[:, None] & (column < H)[None, :]
        tl.store(y + row.to(tl.int64)[:, None] * H + column[None, :], total.to(y.dtype.element_ty), mask=out)


@triton.jit
def _swiglu_backward(
    d_act,
    row,
    num_rows,
    column,
    score,
    pre,
    d_pre,
    weighted,
    I: tl.constexpr,
    SCORE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Store `d_pre` and the weighted activation of some columns of a tile, from the gradient of the activation.

    `d_act` is the gradient with respect to the weighted activation. `pre`, `d_pre` and `weighted` point to the tile's
    first row. Returns the sum over these columns of each row's score gradient.
    """
    if PARTS > 1:
        # Half of the columns at a time, by recursion: the values loaded and computed here must fit into registers in
        # addition to `d_act`.
        BM: tl.constexpr = d_act.shape[0]
        HALF: tl.constexpr = d_act.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(d_act, (BM, 2, HALF)), (0, 2, 1)))
        d_score = _swiglu_backward(left, row, num_rows, column, score, pre, d_pre, weighted, I, SCORE, PARTS // 2)
        column += HALF
        return d_score + _swiglu_backward(
            right, row, num_rows, column, score, pre, d_pre, weighted, I, SCORE, PARTS // 2
        )
    columns = column + tl.arange(0, d_act.shape[1])
    out = (row < num_rows)[:, None] & (columns < I)[None, :]
    at = row[:, None] * (2 * I) + columns[None, :]
    raw_gate = tl.load(pre + at, mask=out, other=0.0).to(tl.float32)
    raw_up = tl.load(pre + at + I, mask=out, other=0.0).to(tl.float32)
    # The score multiplies the input of the activation, or its output.
    inner = score[:, None] if SCORE == 2 else 1.0
    outer = score[:, None] if SCORE == 1 else 1.0
    gate, up = raw_gate * inner, raw_up * inner
    share = tl.sigmoid(gate)
    silu = gate * share
    act = silu * up
    # silu'(g) = s * (1 + g * (1 - s)) with s = sigmoid(g), and silu = g * s.
    d_gate = d_act * outer * up * share * (1.0 + gate - silu)
    d_up = d_act * outer * silu
    tl.store(weighted + row[:, None] * I + columns[None, :], (act * outer).to(weighted.dtype.element_ty), mask=out)
    tl.store(d_pre + at, (d_gate * inner).to(d_pre.dtype.element_ty), mask=out)
    tl.store(d_pre + at + I, (d_up * inner).to(d_pre.dtype.element_ty), mask=out)
    if SCORE == 2:
        d_score = d_gate * raw_gate + d_up * raw_up
    else:
        d_score = d_act * act
    return tl.sum(tl.where(out, d_score, 0.0), 1)


@triton.jit
def activation_backward_kernel(
    d_out,
    entries,
    scores,
    w2,
    pre,
    d_pre,
    weighted,
    d_scores,
    table,
    num_tiles,
    num_rows,
    H: tl.constexpr,
    I: tl.constexpr,
    SLOTS: tl.constexpr,
    SCORE: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Compute the gradient of `pre` from that of the output, and recompute the weighted activation.

    `d_scores[n, r]` is the partial sum of the gradient of row r's score over the n-th tile of columns.
    """
    num_m, num_n = tl.load(num_tiles), tl.cdiv(I, BN)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        m, n = _place(tile, num_m, num_n, GROUP)
        expert = tl.load(table + m * 3).to(tl.int64)
        start, end = tl.load(table + m * 3 + 1), tl.load(table + m * 3 + 2)
        row = start + tl.arange(0, BM)
        is_row = row < end
        entry = tl.load(entries + row, mask=is_row, other=0)
        column, k = n * BN + tl.arange(0, BN), tl.arange(0, BK)
        a = d_out + (entry // SLOTS).to(tl.int64)[:, None] * H + k[None, :]
        b = w2 + expert * H * I + (column % I)[None, :] + k[:, None] * I
        d_act = tl.zeros((BM, BN), tl.float32)
        for first in range(0, H, BK):
            inside = k < H - first
            rows = _load(a + first, inside[None, :], H % BK != 0)
            matrix = _load(b + first * I, inside[:, None], H % BK != 0)
            d_act = tl.dot(rows, matrix, d_act, input_precision=PRECISION)
        score = _row_scores(scores, entry, SCORE)
        at = start.to(tl.int64) * I
        d_score = _swiglu_backward(
            d_act,
            tl.arange(0, BM),
            end - start,
            n * BN,
            score,
            pre + 2 * at,
            d_pre + 2 * at,
            weighted + at,
            I,
            SCORE,
            PARTS,
        )
        if SCORE != 0:
            tl.store(d_scores + n.to(tl.int64) * num_rows + row, d_score, mask=is_row)


@triton.jit
def input_gradient_kernel(
    d_pre,
    w1,
    w3,
    d_rows,
    table,
    num_tiles,
    H: tl.constexpr,
    I: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Compute the gradient of each row's input: `d_rows[r] = w1.T @ d_pre[r, gate] + w3.T @ d_pre[r, up]`."""
    num_m, num_n = tl.load(num_tiles), tl.cdiv(H, BN)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        m, n = _place(tile, num_m, num_n, GROUP)
        expert = tl.load(table + m * 3).to(tl.int64)
        start, end = tl.load(table + m * 3 + 1), tl.load(table + m * 3 + 2)
        row = start + tl.arange(0, BM)
        is_row = row < end
        column, k = n * BN + tl.arange(0, BN), tl.arange(0, BK)
        a = d_pre + tl.where(is_row, row, start).to(tl.int64)[:, None] * (2 * I) + k[None, :]
        matrix = expert * I * H + (column % H)[None, :] + k[:, None] * H
        total = tl.zeros((BM, BN), tl.float32)
        for first in range(0, I, BK):
            inside = k < I - first
            gate = _load(a + first, inside[None, :], I % BK != 0)
            b1 = _load(w1 + matrix + first * H, inside[:, None], I % BK != 0)
            total = tl.dot(gate, b1, total, input_precision=PRECISION)
            up = _load(a + I + first, inside[None, :], I % BK != 0)
            b3 = _load(w3 + matrix + first * H, inside[:, None], I % BK != 0)
            total = tl.dot(up, b3, total, input_precision=PRECISION)
        out = is_row[:, None] & (column < H)[None, :]
        tl.store(d_rows + row.to(tl.int64)[:, None] * H + column[None, :], total.to(d_rows.dtype.element_ty), mask=out)


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
    """Compute `out[t] = sum over slots s of scores[t, s] * y[positions[t, s]]`.

    Slots whose position is `num_copies` or more have no row and add nothing.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    # Each program sums the slots of a token in order: no atomics, so that results are reproducible.
    for slot in tl.static_range(SLOTS):
        position = tl.load(positions + token * SLOTS + slot).to(tl.int64)
        is_here = position < num_copies
        inside = tl.where(is_here, column, WIDTH) < WIDTH
        row = tl.load(y + position * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            # The score of a slot without a row is not used: it may be infinite or NaN, and zero times it is NaN.
            row *= tl.where(is_here, tl.load(scores + token * SLOTS + slot).to(tl.float32), 0.0)
        total += row
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def score_gradient_kernel(parts, positions, out, num_copies, num_slots, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute `out[slot] = sum over n of parts[n, positions[slot]]`; zero for a slot without a row."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + slot, mask=slot < num_slots, other=0).to(tl.int64)
    is_here = (slot < num_slots) & (position < num_copies)
    total = tl.zeros((BLOCK,), tl.float32)
    for n in tl.static_range(NUM_PARTS):
        total += tl.load(parts + n * num_copies + position, mask=is_here, other=0.0)
    tl.store(out + slot, total.to(out.dtype.element_ty), mask=slot < num_slots)


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
    """Compute `out[e] = sum over rows r of expert e of outer(left[r], right[r])`, `[M, N]` for each expert.

    One operand has a row for each token and is gathered by `entries`: `left` if GATHER_LEFT, else `right`. With
    HALVES 2, `left` is `[rows, 2 * M]`, and each half of its columns gives one gradient.
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
        # An expert without rows has an empty loop, so that its gradient is exactly zero.
        for first in range(start, end, BK):
            row = first + k
            is_row = row < end
            token = tl.load(entries + row, mask=is_row, other=0) // SLOTS
            left_row = (token if GATHER_LEFT else row).to(tl.int64)
            right_row = (row if GATHER_LEFT else token).to(tl.int64)
            # Both operands are masked: zero times an infinite or NaN element of the other would be NaN.
            a = tl.load(at_left + left_row[None, :] * (HALVES * M), mask=is_row[None, :], other=0.0)
            b = tl.load(at_right + right_row[:, None] * N, mask=is_row[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        at = expert.to(tl.int64) * M * N + i[:, None] * N + j[None, :]
        inside = (i < M)[:, None] & (j < N)[None, :]
        result = total.to(first_out.dtype.element_ty)
        if HALVES == 1 or half == 0:
            tl.store(first_out + at, result, mask=inside)
        else:
            tl.store(second_out + at, result, mask=inside)
