"""Mesh axes as strides: slicing, splitting and merging are arithmetic, the same cost for any number of ranks.

An axis is one or more (size, stride) pieces, outermost first, as in CuTe layouts, so that flattening axes that are
not adjacent in rank order is still arithmetic. An index is a position in row-major order; which global rank sits
there, the mesh says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hp_dtensor.exceptions import MeshError


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """A named axis: `sizes` and `strides` (in ranks) of its pieces, outermost first."""

    name: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of ranks along the axis."""
        return math.prod(self.sizes)

    def offset(self, coordinate: int) -> int:
        """Return the distance in ranks between `coordinate` and coordinate 0."""
        total = 0
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            coordinate, digit = divmod(coordinate, size)
            total += digit * stride
        return total

    def coordinate(self, index: int) -> int:
        """Return the coordinate of rank index `index`, whatever its position on other axes."""
        result = 0
        for size, stride in zip(self.sizes, self.strides, strict=True):
            result = result * size + (index // stride) % size
        return result


def row_major_axes(names: Sequence[str], shape: Sequence[int]) -> tuple[MeshAxis, ...]:
    """Return the axes of a mesh of `shape` whose indices run through it in row-major order."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return tuple(MeshAxis(name, (size,), (stride,)) for name, size, stride in zip(names, shape, strides, strict=True))


def check_disjoint(axes: Sequence[MeshAxis]) -> None:
    """Refuse axes that share ranks, such as `dp` and a flattened axis that contains it.

    Raises:
        MeshError: naming two such axes, or an axis that is named twice.
    """
    names = [axis.name for axis in axes]
    if len(set(names)) != len(names):
        raise MeshError(f"an axis is named twice: {names}")
    pieces = sorted(
        (stride, size, axis.name)
        for axis in axes
        for size, stride in zip(axis.sizes, axis.strides, strict=True)
        if size > 1
    )
    # Pieces are disjoint when each one's ranks fit between two steps of the next longer stride.
    for (stride, size, name), (next_stride, _, next_name) in itertools.pairwise(pieces):
        if stride * size > next_stride:
            raise MeshError(f"axes {name!r} and {next_name!r} share ranks and cannot be in one mesh")


def merge_axes(name: str, parts: Sequence[MeshAxis]) -> MeshAxis:
    """Return one axis of several; adjacent pieces are merged, so that equal axes have equal pieces."""
    merged: list[tuple[int, int]] = []
    for part in parts:
        for size, stride in zip(part.sizes, part.strides, strict=True):
            if size == 1:
                continue
            if merged and merged[-1][1] == size * stride:
                merged[-1] = (merged[-1][0] * size, stride)
            else:
                merged.append((size, stride))
    merged = merged or [(1, 1)]
    return MeshAxis(name, tuple(size for size, _ in merged), tuple(stride for _, stride in merged))


def remaining_axis(name: str, axes: Sequence[MeshAxis], num_ranks: int) -> MeshAxis:
    """Return the axis that, with `axes`, which share no ranks, covers `num_ranks` ranks."""
    rest, outer = [], num_ranks
    pieces = [(stride, size) for axis in axes for size, stride in zip(axis.sizes, axis.strides, strict=True)]
    for stride, size in sorted((piece for piece in pieces if piece[1] > 1), reverse=True):
        rest.append(MeshAxis(name, (outer // (stride * size),), (stride * size,)))
        outer = stride
    return merge_axes(name, [*rest, MeshAxis(name, (outer,), (1,))])


def split_axis(axis: MeshAxis, sizes: tuple[int, ...], names: tuple[str, ...]) -> tuple[MeshAxis, ...]:
    """Return several axes, the first outermost, that make up `axis`.

    Raises:
        MeshError: sizes that do not multiply to the axis's, or an axis flattened from others that are not adjacent.
    """
    if math.prod(sizes) != axis.size or len(sizes) != len(names):
        raise MeshError(
            f"axis {axis.name!r} of {axis.size} cannot be split into {dict(zip(names, sizes, strict=False))}"
        )
    if len(axis.sizes) != 1:
        raise MeshError(f"axis {axis.name!r} was flattened from axes that are not adjacent and cannot be split")
    tails = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return tuple(
        MeshAxis(name, (size,), (axis.strides[0] * tail,)) for name, size, tail in zip(names, sizes, tails, strict=True)
    )
