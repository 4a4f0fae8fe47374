"""Placements of a tensor on one mesh axis: replicated, sharded (in chunk order, strided, ragged), or partial."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hp_dtensor.comm.process_group import REDUCE_OPS
from hp_dtensor.exceptions import PlacementError


class Placement:
    """Base of all placements; immutable, hashable, compared by value.

    Example:
        >>> [placement.is_shard() for placement in (Shard(0), Replicate(), Partial())]
        [True, False, False]
    """

    def is_shard(self, dim: int | None = None) -> bool:
        """Return whether it cuts a tensor dimension (that one, if `dim` is given)."""
        return False

    def is_replicate(self) -> bool:
        """Return whether every rank holds the same data."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Return whether the value is a reduction over ranks (by `reduce_op`, if it is given)."""
        return False

    def parts(self, size: int, ranks: int) -> list[list[tuple[int, int]]]:
        """Return per rank of the axis the (start, stop) ranges of a dimension of `size` that it holds, ascending.

        Raises:
            PlacementError: the placement cuts no dimension, or does not fit the size.
        """
        raise PlacementError(f"{self!r} cuts no dimension")


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank of the axis holds the same data.

    Example:
        >>> Replicate() == Replicate(), Replicate().is_replicate()
        (True, True)
    """

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """Dimension `dim` is cut in chunk order: rank i holds rows [i*c, (i+1)*c), c = ceil(size / ranks).

    The last ranks may hold fewer rows or none.

    Example:
        >>> def program():
        ...     x = ones(5, device_mesh=init_device_mesh("cpu", (3,)), placements=[Shard(0)])
        ...     return tuple(x.to_local().shape)
        >>> run_ranks(program, 3)  # chunk order, as torch.chunk
        [(2,), (2,), (1,)]
    """

    dim: int

    def __post_init__(self) -> None:
        _check_dim(self)

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def interval(self, size: int, ranks: int, rank: int) -> tuple[int, int]:
        """Return (start, length) of `rank`'s part of a dimension of `size`."""
        chunk = -(-size // ranks)
        start = min(chunk * rank, size)
        return start, min(chunk, size - start)

    def parts(self, size: int, ranks: int) -> list[list[tuple[int, int]]]:
        chunk = -(-size // ranks)
        return [[(min(chunk * i, size), min(chunk * (i + 1), size))] for i in range(ranks)]

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard(Placement):
    """Dimension `dim` is cut as if `split_factor` shards of a later mesh axis had been cut first.

    The dimension is cut in chunk order into `split_factor` chunks, each of those into one piece per rank;
    rank i holds the i-th piece of every chunk, in order. With `Shard(dim)` on a later axis of `split_factor`
    ranks, that later axis cuts the dimension first. (torch's `_StridedShard`.)

    Example:
        >>> StridedShard(0, split_factor=2).is_shard(0)
        True
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        _check_dim(self)
        if not isinstance(self.split_factor, int) or self.split_factor < 1:
            raise PlacementError(f"StridedShard: split_factor must be >= 1, got {self.split_factor}")

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def parts(self, size: int, ranks: int) -> list[list[tuple[int, int]]]:
        result: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        for [(begin, end)] in Shard(self.dim).parts(size, self.split_factor):
            for rank, [(start, stop)] in enumerate(Shard(self.dim).parts(end - begin, ranks)):
                result[rank].append((begin + start, begin + stop))
        return result

    def __repr__(self) -> str:
        return f"StridedShard({self.dim}, split_factor={self.split_factor})"


@dataclass(frozen=True, slots=True)
class RaggedShard(Placement):
    """Dimension `dim` is cut in rank order into `units[i]` rows for rank i; zeros are allowed.

    What it cuts is the part that placements on earlier mesh axes left to this rank, so `units` may differ
    between ranks of other axes; they sum to that part's size. (Idea: veScale-FSDP, arXiv 2602.22437.)

    Example:
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
        _check_dim(self)
        if type(self.units) is not tuple:
            object.__setattr__(self, "units", tuple(self.units))
        if not all(isinstance(unit, int) and unit >= 0 for unit in self.units):
            raise PlacementError(f"RaggedShard: units must be ints >= 0, one per rank, got {self.units}")

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def interval(self, size: int, ranks: int, rank: int) -> tuple[int, int]:
        """Return (start, length) of `rank`'s part of a dimension of `size`."""
        if len(self.units) != ranks or sum(self.units) != size:
            raise PlacementError(
                f"{self} cannot cut a dimension of {size} over {ranks} ranks: "
                f"it has {len(self.units)} parts that sum to {sum(self.units)}"
            )
        return sum(self.units[:rank]), self.units[rank]

    def parts(self, size: int, ranks: int) -> list[list[tuple[int, int]]]:
        self.interval(size, ranks, 0)
        stops = list(itertools.accumulate(self.units))
        return [[(stop - unit, stop)] for stop, unit in zip(stops, self.units, strict=True)]

    def __repr__(self) -> str:
        return f"RaggedShard({self.dim}, {self.units})"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Every rank holds a contribution; the value is their reduction by `reduce_op`.

    Example:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = ones(4, device_mesh=mesh, placements=[Shard(0)])
        ...     total = platform.ops.sum(x)  # each rank's summand; nothing has been sent
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


def _check_dim(placement: Shard | StridedShard | RaggedShard) -> None:
    if not isinstance(placement.dim, int):
        raise PlacementError(f"{type(placement).__name__}: dim must be an int, got {placement.dim!r}")
