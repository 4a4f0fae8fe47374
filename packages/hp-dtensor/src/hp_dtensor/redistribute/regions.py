"""Parts of local tensors: taking them out, and putting a tensor together from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.tensor_spec import Ranges

Tensor = Any
Runs = tuple[tuple[int, int], ...]
"""(offset, length) pairs along one dimension of a local tensor, ascending."""
Received = dict[Hashable, Tensor]


class Region:
    """A part of a local tensor: some runs along each dimension.

    Args:
        sizes: the local tensor's shape.
    """

    __slots__ = ("_cuts", "runs", "shape")

    def __init__(self, runs: Sequence[Runs], sizes: Sequence[int]) -> None:
        self.runs = tuple(runs)
        self.shape = tuple([sum([length for _, length in some]) for some in runs])
        self._cuts = [
            (dim, some or ((0, 0),))
            for dim, (some, size) in enumerate(zip(self.runs, sizes, strict=True))
            # Most dimensions are taken whole and need no `narrow`.
            if some != ((0, size),)
        ]

    def of(self, platform: Platform, x: Tensor) -> Tensor:
        """Return that part of `x`, which may share its storage."""
        narrow = platform.ops.narrow
        for dim, runs in self._cuts:
            pieces = [narrow(x, dim, offset, length) for offset, length in runs]
            x = pieces[0] if len(pieces) == 1 else platform.ops.cat(pieces, dim)
        return x


def compact_copy(platform: Platform, x: Tensor) -> Tensor:
    """Return a copy with the strides of a tensor that came from another rank: random operations depend on strides.

    Of a dimension with one element, too, whose stride `contiguous` leaves as it is.
    """
    flat = platform.ops.reshape(platform.ops.clone(x), (math.prod(x.shape),))
    return platform.ops.reshape(flat, tuple(x.shape))


def runs_in(ranges: Ranges, held: Ranges) -> Runs:
    """Return the runs at which `ranges`, which `held` contains, lie in a local tensor that holds `held`."""
    result: list[tuple[int, int]] = []
    passed = i = 0
    for start, stop in ranges:
        while start < stop:
            while held[i][1] <= start:
                passed += held[i][1] - held[i][0]
                i += 1
            offset, length = passed + start - held[i][0], min(stop, held[i][1]) - start
            # Ranges that lie apart in the whole may be neighbours in the shard: one run, one copy.
            if result and sum(result[-1]) == offset:
                result[-1] = (result[-1][0], result[-1][1] + length)
            else:
                result.append((offset, length))
            start += length
    return tuple(result)


def size_of(ranges: Ranges) -> int:
    return sum([stop - start for start, stop in ranges])


class Recipe(Protocol):
    """Recipe by which a tensor is made of received ones."""

    def make(self, platform: Platform, received: Received, like: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Recipe for a region of the tensor received from `key`."""

    key: Hashable
    region: Region

    def make(self, platform: Platform, received: Received, like: Tensor) -> Tensor:
        return self.region.of(platform, received[self.key])


@dataclass(frozen=True, slots=True)
class Zeros:
    """Recipe for zeros of the dtype and device of the local tensor."""

    shape: tuple[int, ...]

    def make(self, platform: Platform, received: Received, like: Tensor) -> Tensor:
        return platform.zeros(self.shape, like.dtype, platform.device_of(like))


@dataclass(frozen=True, slots=True)
class Joined:
    """Recipe for parts one after the other along a dimension."""

    dim: int
    parts: tuple[Recipe, ...]

    def make(self, platform: Platform, received: Received, like: Tensor) -> Tensor:
        return platform.ops.cat([part.make(platform, received, like) for part in self.parts], self.dim)


def recipe_over(
    pieces: Sequence[Sequence[Any]], cell: Callable[[tuple[Any, ...]], Recipe], chosen: tuple[Any, ...] = ()
) -> Recipe:
    """Return the recipe for a grid of cells, one for each combination of one piece per dimension."""
    dim = len(chosen)
    if dim == len(pieces):
        return cell(chosen)
    parts = tuple(recipe_over(pieces, cell, (*chosen, piece)) for piece in pieces[dim])
    return parts[0] if len(parts) == 1 else Joined(dim, parts)
