"""Tile sizes of the kernels: tuned on an H100, and small ones that fit every CUDA device for other devices."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch


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
