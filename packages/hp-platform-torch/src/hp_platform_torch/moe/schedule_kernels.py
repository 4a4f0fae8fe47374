"""The table of tiles, on the device."""

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
    """Fill BLOCK lines of the table; every program adds up all counts anew, which is cheaper than a second launch."""
    group = tl.arange(0, GROUPS)
    count = tl.load(counts + group, mask=group < num_groups, other=0).to(tl.int32)
    tiles_of_group = (count + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(tiles_of_group, 0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tile_ends[None, :] <= tile[:, None]
    tile_group = tl.sum(before.to(tl.int32), 1)
    first_row = tl.sum(tl.where(before, count[None, :], 0), 1)
    first_tile = tl.sum(tl.where(before, tiles_of_group[None, :], 0), 1)
    own_rows = tl.sum(tl.where(group[None, :] == tile_group[:, None], count[None, :], 0), 1)
    line, is_line = table + tile * 3, tile < max_tiles
    tl.store(line, tile_group, mask=is_line)
    tl.store(line + 1, first_row + (tile - first_tile) * ROWS, mask=is_line)
    tl.store(line + 2, first_row + own_rows, mask=is_line)
    if tl.program_id(0) == 0:
        tl.store(num_tiles, tl.sum(tiles_of_group, 0))
        tl.store(row_ends + group, tl.cumsum(count, 0), mask=group < num_groups)
