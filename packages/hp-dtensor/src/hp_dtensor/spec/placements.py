"""Placements of a tensor on one mesh axis: replicated, sharded (plain, strided or ragged) or partial; their aliases.

An alias names, for each tensor dimension, the mesh axis that shards it, or is `"None"` or None. A specification of one
tensor is a tuple of placements (one per mesh axis), a tuple of alias names (one per tensor dimension; a nested tuple
names several axes, outermost first), or an object with `placements_on(mesh)`, as `hp_dtensor.Layout` is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import REDUCE_OPS
from hp_dtensor.exceptions import PlacementError


class Placement:
    """Base of all placements. They are immutable, hashable and compared by value.

    Examples:
        >>> [placement.is_shard() for placement in (Shard(0), Replicate(), Partial())]
        [True, False, False]
    """

    def is_shard(self, dim: int | None = None) -> bool:
        """Return whether it shards a tensor dimension (if `dim` is given: that one)."""
        return False

    def is_replicate(self) -> bool:
        """Return whether every rank holds the same data."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Return whether the value is a reduction over ranks (if `reduce_op` is given: by that)."""
        return False

    def shard_ranges(self, size: int, ranks: int) -> list[list[tuple[int, int]]]:
        """Return, for each rank of the axis, the ascending (start, stop) ranges of a dimension of `size` that it holds.

        Raises:
            PlacementError: the placement shards no dimension, or does not fit the size.
        """
        raise PlacementError(f"{self!r} shards no dimension")


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank of the axis holds the same data.

    Examples:
        >>> Replicate() == Replicate(), Replicate().is_replicate()
        (True, True)
    """

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """Dimension `dim` is sharded as by `torch.chunk`: rank i holds rows [i*c, (i+1)*c), c = ceil(size / ranks).

    The last ranks may hold fewer rows or none.

    Examples:
        >>> def program():
        ...     x = ones(5, device_mesh=init_device_mesh("cpu", (3,)), placements=[Shard(0)])
        ...     return tuple(x.to_local().shape)
        >>> run_ranks(program, 3)  # as torch.chunk(5, 3)
        [(2,), (2,), (1,)]
    """

    dim: int

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int):
            raise _no_dim(self)

    # Written out: every look-up of a spec compares placements, and those of a dataclass build tuples.
    def __eq__(self, other: object) -> bool:
        return other.dim == self.dim if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return self.dim

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def interval(self, size: int, ranks: int, rank: int) -> tuple[int, int]:
        """Return (start, length) of `rank`'s shard of a dimension of `size`."""
        chunk = -(-size // ranks)
        start = min(chunk * rank, size)
        return start, min(chunk, size - start)

    def shard_ranges(self, size: int, ranks: int) -> list[list[tuple[int, int]]]:
        chunk = -(-size // ranks)
        # Rounding up may leave the last ranks with no rows: `min` makes their ranges empty.
        return [[(min(chunk * i, size), min(chunk * (i + 1), size))] for i in range(ranks)]

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard(Placement):
    """Dimension `dim` is split into `split_factor` chunks, and every chunk is sharded over the ranks of the axis.

    Rank i holds the i-th piece of every chunk. With `Shard(dim)` on a later axis of `split_factor` ranks, the later
    axis is the outer sharding; two plain `Shard(dim)` nest in the order of the axes. Same as torch's `_StridedShard`.

    Examples:
        >>> StridedShard(0, split_factor=2).is_shard(0)
        True
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int):
            raise _no_dim(self)
        if not isinstance(self.split_factor, int) or self.split_factor < 1:
            raise PlacementError(f"StridedShard: split_factor must be >= 1, got {self.split_factor}")

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def shard_ranges(self, size: int, ranks: int) -> list[list[tuple[int, int]]]:
        # Both splits are those of `Shard`, so uneven sizes leave the same rows to a rank as the two steps would.
        result: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        for [(begin, end)] in Shard(self.dim).shard_ranges(size, self.split_factor):
            for rank, [(start, stop)] in enumerate(Shard(self.dim).shard_ranges(end - begin, ranks)):
                result[rank].append((begin + start, begin + stop))
        return result

    def __repr__(self) -> str:
        return f"StridedShard({self.dim}, split_factor={self.split_factor})"


@dataclass(frozen=True, slots=True)
class RaggedShard(Placement):
    """Dimension `dim` is sharded unevenly: rank i holds `units[i]` rows, in rank order. Units may be zero.

    `units` sum to the rows that placements on earlier mesh axes left to this rank, so they may differ between the ranks
    of other axes. (Idea: veScale-FSDP, arXiv 2602.22437.)

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = ones(4, 2, device_mesh=mesh, placements=[RaggedShard(0, (1, 3))])
        ...     return tuple(x.to_local().shape)
        >>> run_ranks(program, 2)
        [(1, 2), (3, 2)]
    """

    dim: int
    units: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int):
            raise _no_dim(self)
        # A list of units would make the placement unhashable.
        if type(self.units) is not tuple:
            object.__setattr__(self, "units", tuple(self.units))
        if not all(isinstance(unit, int) and unit >= 0 for unit in self.units):
            raise PlacementError(f"RaggedShard: units must be ints >= 0, one per rank, got {self.units}")

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def interval(self, size: int, ranks: int, rank: int) -> tuple[int, int]:
        """Return (start, length) of `rank`'s shard of a dimension of `size`."""
        if len(self.units) != ranks or sum(self.units) != size:
            raise PlacementError(
                f"{self} cannot shard a dimension of {size} over {ranks} ranks: "
                f"it has {len(self.units)} units that sum to {sum(self.units)}"
            )
        return sum(self.units[:rank]), self.units[rank]

    def shard_ranges(self, size: int, ranks: int) -> list[list[tuple[int, int]]]:
        self.interval(size, ranks, 0)
        stops = list(itertools.accumulate(self.units))
        return [[(stop - unit, stop)] for stop, unit in zip(stops, self.units, strict=True)]

    def __repr__(self) -> str:
        return f"RaggedShard({self.dim}, {self.units})"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Every rank holds a contribution. The value is their reduction by `reduce_op`.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = ones(4, device_mesh=mesh, placements=[Shard(0)])
        ...     total = platform.ops.sum(x)  # each rank's contribution; nothing has been communicated
        ...     return total.placements == (Partial(),), float(platform.to_numpy(total.full_tensor()))
        >>> run_ranks(program, 2)[0]
        (True, 4.0)
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            known = ", ".join(REDUCE_OPS)
            raise PlacementError(f"Partial: reduction {self.reduce_op!r} is unknown; expected one of {known}")

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"


def _no_dim(placement: Shard | StridedShard | RaggedShard) -> PlacementError:
    return PlacementError(f"{type(placement).__name__}: dim must be an int, got {placement.dim!r}")


NOT_SHARDED = "None"
AliasMap = tuple[str | tuple[str, ...], ...]


def is_specification(entry: Any) -> bool:
    """Return whether `entry` specifies one tensor, and is not a sequence of specifications.

    `(("dp", "tp"), None)` is a sequence: a specification of the first tensor and none of the second. One specification
    of a 2-D tensor is written `(("dp", "tp"), "None")`.
    """
    if hasattr(entry, "placements_on") or is_placements(entry):
        return True
    # None is both "not sharded" and "no specification". Beside a tuple it is the latter.
    return is_aliases(entry) and not (None in entry and any(isinstance(item, tuple) for item in entry))


def is_placements(items: Any) -> bool:
    """Return whether `items` is one specification by placements."""
    return isinstance(items, (tuple, list)) and bool(items) and all(isinstance(item, Placement) for item in items)


def is_aliases(items: Any) -> bool:
    """Return whether `items` is one specification by alias names."""
    if not isinstance(items, (tuple, list)) or all(item is None for item in items):
        return False
    return all(
        item is None
        or isinstance(item, str)
        or (isinstance(item, tuple) and item and all(isinstance(name, str) for name in item))
        for item in items
    )


def placements_for(device_mesh: DeviceMesh, specification: Any) -> tuple[Placement, ...]:
    """Return the placements of a specification on `device_mesh`. Raises a TypeError or a ValueError for a wrong one."""
    # By attribute, because `Layout` is in `compat`, which nothing outside of it imports.
    if hasattr(specification, "placements_on"):
        placements: tuple[Placement, ...] = specification.placements_on(device_mesh)
        return placements
    if is_placements(specification):
        return tuple(specification)
    if not isinstance(specification, (tuple, list)):
        raise TypeError(f"expected placements, alias names or a Layout, got {specification!r}")
    if not is_aliases(specification):
        raise TypeError(
            f"expected placements, one per mesh axis, or alias names, one per tensor dimension; got {specification!r}"
        )
    return placements_of_aliases(device_mesh.shape, device_mesh.mesh_dim_names, specification)


def placements_of_aliases(
    mesh_shape: Sequence[int], axis_names: Sequence[str], aliases: Sequence[str | tuple[str, ...] | None]
) -> tuple[Placement, ...]:
    """Return one placement per mesh axis for alias names. An unknown or repeated one raises a ValueError."""
    placements: list[Placement] = [Replicate()] * len(mesh_shape)
    used: set[str] = set()
    for dim, item in enumerate(aliases):
        names = [name for name in (item if isinstance(item, tuple) else (item,)) if name not in (None, NOT_SHARDED)]
        # Placements have one entry per axis, so an axis cannot shard two dimensions.
        for name in names:
            check_alias(name, axis_names)
            if name in used:
                raise ValueError(f"axis {name!r} is used for two tensor dimensions; each axis shards at most one")
            used.add(name)
        for axis, placement in _nested(dim, [axis_names.index(name) for name in names], mesh_shape):
            placements[axis] = placement
    return tuple(placements)


def check_alias(alias: str, axis_names: Sequence[str]) -> None:
    """Raise a ValueError if `alias` is not the name of an axis."""
    if alias not in axis_names:
        raise ValueError(f"unknown alias {alias!r}; known: {', '.join(axis_names)} and 'None'")


def _nested(dim: int, axes: Sequence[int], mesh_shape: Sequence[int]) -> list[tuple[int, Placement]]:
    """Return (axis, placement) for several axes that shard one dimension, the first one outermost.

    Plain shards nest in the order of the mesh axes. An axis inside of later ones is a strided shard, whose split factor
    is the number of shards of those.
    """
    result: list[tuple[int, Placement]] = []
    for position, axis in enumerate(axes):
        later = math.prod(mesh_shape[other] for other in axes[:position] if other > axis)
        result.append((axis, Shard(dim) if later == 1 else StridedShard(dim, later)))
    return result
