"""Visualization of shardings: a table of the ranks that hold each region of a tensor."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.exceptions import PlacementError
from hp_dtensor.spec.placements import Partial
from hp_dtensor.spec.rank_checks import name_ranks
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.dtensor import DTensor

Boundary = tuple[int, int]
MAX_CELLS = 1024


@dataclass(frozen=True)
class ShardingPicture:
    """One or two dimensions of a tensor split into cells, each with the ranks that hold it.

    Attributes:
        spec: the spec of the tensor.
        dims: the tensor dimensions shown as rows and columns; a single one for a vector, none for a scalar.
        rows, columns: (start, stop) of each row and column of cells; a single (0, 1) for a missing dimension.
        holders: (row, column) -> ranks, ascending.
    """

    spec: TensorSpec
    dims: tuple[int, ...]
    rows: tuple[Boundary, ...]
    columns: tuple[Boundary, ...]
    holders: dict[tuple[int, int], tuple[int, ...]]

    def cell(self, row: int, column: int) -> str:
        """Return the ranks of a cell as a short text."""
        ranks = self.holders.get((row, column), ())
        return shorten(ranks) if ranks else "-"


def sharding_picture(x: TensorSpec | Any, dims: Sequence[int] = (0, 1)) -> ShardingPicture:
    """Return the cells of a spec or a DTensor and the ranks that hold them. Needs no processes and no framework.

    Args:
        dims: the one or two tensor dimensions to show. Shardings of other dimensions are not shown.

    Raises:
        PlacementError: dimensions that the tensor does not have, or more than 1024 cells.
        TypeError: not a spec or a DTensor.
    """
    spec: TensorSpec = x.spec if isinstance(x, DTensor) else x
    if not isinstance(spec, TensorSpec):
        raise TypeError(f"a picture of a sharding takes a DTensor or a TensorSpec, got {type(x).__name__}")
    shown = tuple(dim for dim in dims if -spec.ndim <= dim < spec.ndim)
    if len(dims) > 2 or (len(shown) < len(dims) and tuple(dims) != (0, 1)):
        raise PlacementError(f"a picture shows one or two of the {spec.ndim} dimensions, got {list(dims)}")
    shown = tuple(dim % spec.ndim for dim in shown)
    held = _held(spec, shown)
    # A cell ends where the range of any rank starts or stops.
    edges = [sorted({edge for ranges in held.values() for each in ranges[i] for edge in each}) for i in (0, 1)]
    rows, columns = (tuple(itertools.pairwise(each)) or ((0, 0),) for each in edges)
    if len(rows) * len(columns) > MAX_CELLS:
        raise PlacementError(
            f"a picture of {len(rows)} x {len(columns)} cells is too large (limit {MAX_CELLS}); slice the mesh"
        )
    return ShardingPicture(spec, shown, rows, columns, _holders(held, rows, columns))


def visualize_sharding(x: TensorSpec | Any, dims: Sequence[int] = (0, 1)) -> str:
    """Return a table of a spec or a DTensor with the ranks that hold each region of the tensor.

    Args:
        dims: the one or two tensor dimensions to show.

    Examples:
        >>> with fake_world(2):
        ...     table = visualize_sharding(TensorSpec(DeviceMesh("cpu", (2,)), [Shard(0)], (4, 4), None))
        >>> table.splitlines()[1:]
        ['      | [0:4]', '------+------', '[0:2] | 0', '[2:4] | 1']
    """
    picture = sharding_picture(x, dims)
    lines = [["", *map(_range, picture.columns)]] if len(picture.dims) > 1 else []
    for row, boundary in enumerate(picture.rows):
        cells = [picture.cell(row, column) for column in range(len(picture.columns))]
        lines.append([_range(boundary) if picture.dims else "value", *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    body = [" | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    if len(picture.dims) > 1:
        body.insert(1, "-+-".join("-" * width for width in widths))
    return "\n".join([_title(picture), *body, *_notes(picture)])


# Cells -----------------------------------------------------------------------------------------------------


def _held(spec: TensorSpec, dims: tuple[int, ...]) -> dict[int, tuple[Sequence[Boundary], Sequence[Boundary]]]:
    """Return rank -> its ranges of the two shown dimensions, without ranks whose shard is empty."""
    held: dict[int, tuple[Sequence[Boundary], Sequence[Boundary]]] = {}
    # Every rank of the mesh is visited, so pictures are for meshes that fit on a screen.
    for coordinate in itertools.product(*map(range, spec.mesh.shape)):
        ranges = spec.ranges(coordinate)
        if spec.ndim and not all(any(start < stop for start, stop in dim) for dim in ranges):
            continue
        shown = [ranges[dim] for dim in dims] + [((0, 1),)] * (2 - len(dims))
        held[spec.mesh.rank_at(coordinate)] = (shown[0], shown[1])
    return held


def _holders(
    held: dict[int, tuple[Sequence[Boundary], Sequence[Boundary]]],
    rows: tuple[Boundary, ...],
    columns: tuple[Boundary, ...],
) -> dict[tuple[int, int], tuple[int, ...]]:
    holders: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, (row_ranges, column_ranges) in held.items():
        for cell in itertools.product(_covered(rows, row_ranges), _covered(columns, column_ranges)):
            holders[cell].append(rank)
    return {cell: tuple(sorted(ranks)) for cell, ranks in sorted(holders.items())}


def _covered(cells: tuple[Boundary, ...], ranges: Sequence[Boundary]) -> list[int]:
    # Cells are bounded by the edges of all ranges, so each one is inside a range or outside of it.
    return [i for i, (start, stop) in enumerate(cells) if any(a <= start and stop <= b for a, b in ranges)]


def shorten(ranks: Sequence[int]) -> str:
    """Return ranks as a short text: `0,2`, `0-3`, `0-6:2`, or the first six of an irregular list."""
    if len(ranks) <= 2:
        return ",".join(map(str, ranks))
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    if len(steps) == 1:
        (step,) = steps
        return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    more = ",..." if len(ranks) > 6 else ""
    return ",".join(map(str, ranks[:6])) + more


# Output ----------------------------------------------------------------------------------------------------


def _title(picture: ShardingPicture) -> str:
    spec = picture.spec
    return f"{list(spec.shape)} {spec.describe_placements()} on mesh {spec.mesh.describe()}"


def _notes(picture: ShardingPicture) -> list[str]:
    spec = picture.spec
    held = {rank for ranks in picture.holders.values() for rank in ranks}
    empty = [rank for rank in spec.mesh.ranks() if rank not in held]
    notes = [f"nothing on {name_ranks(empty)}"] if empty else []
    partial = [
        f"{name} ({placement.reduce_op})"
        for name, placement in zip(spec.mesh.mesh_dim_names, spec.placements, strict=True)
        if isinstance(placement, Partial)
    ]
    if partial:
        notes.append(f"partial results along {', '.join(partial)}: a cell's value is their reduction")
    hidden = [d for d in range(spec.ndim) if d not in picture.dims and any(p.is_shard(d) for p in spec.placements)]
    if hidden:
        notes.append(f"dimensions {hidden} are sharded too, and not shown")
    return notes


def _range(boundary: Boundary) -> str:
    return f"[{boundary[0]}:{boundary[1]}]"
