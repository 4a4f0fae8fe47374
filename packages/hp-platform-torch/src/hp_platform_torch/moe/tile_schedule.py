"""Tiles of ragged row groups: a table made on the device, so that no kernel waits for the host to know the counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from hp_platform_torch.moe.schedule_kernels import schedule_kernel

_TABLE_ELEMENTS = 16384


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """The rows of each tile of `rows_per_tile` rows; no tile crosses from one group to the next.

    Attributes:
        table: int32 `[max_tiles, 3]`: group, first row and end of the group's rows, of each tile.
        num_tiles: int32 `[1]`: how many lines of the table are tiles.
        row_ends: int32 `[groups]`: the end of each group's rows.
        max_tiles: as many as there can be with this number of rows; known on the host.
        rows_per_tile: rows of a tile; a group's last tile may have fewer.
    """

    table: torch.Tensor
    num_tiles: torch.Tensor
    row_ends: torch.Tensor
    max_tiles: int
    rows_per_tile: int


def schedule_tiles(counts: torch.Tensor, num_rows: int, rows_per_tile: int) -> TileSchedule:
    """Cut groups of `counts` (int64 `[groups]`, on the device, `num_rows` together) into tiles."""
    num_groups = counts.shape[0]
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
