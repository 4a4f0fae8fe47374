"""Mesh axes as strides: slicing, splitting and merging are arithmetic, the same cost for any number of ranks.

An axis is one or more (size, stride) pieces, outermost first, as in CuTe layouts, so that flattening axes that are
not adjacent in rank order is still arithmetic. An index is a position in row-major order. The mesh maps it to a global
rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hp_dtensor.comm.world import World
from hp_dtensor.exceptions import MeshError


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """A named axis, made of one or more pieces with `sizes` and `strides` (in ranks), the outermost first."""

    name: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of ranks along the axis."""
        return math.prod(self.sizes)

    def offset(self, coordinate: int) -> int:
        """Return the distance in ranks between `coordinate` and coordinate 0."""
        # The coordinate's digits in mixed radix, the innermost piece first.
        total = 0
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            coordinate, digit = divmod(coordinate, size)
            total += digit * stride
        return total

    def coordinate(self, index: int) -> int:
        """Return the coordinate on this axis of the rank at `index`."""
        result = 0
        for size, stride in zip(self.sizes, self.strides, strict=True):
            result = result * size + (index // stride) % size
        return result


def row_major_axes(names: Sequence[str], shape: Sequence[int]) -> tuple[MeshAxis, ...]:
    """Return the axes of a mesh of `shape` in row-major order."""
    # The last axis varies fastest.
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return tuple(MeshAxis(name, (size,), (stride,)) for name, size, stride in zip(names, shape, strides, strict=True))


def check_disjoint(axes: Sequence[MeshAxis]) -> None:
    """Check that no two axes share ranks, as `dp` and a flattened axis that contains it do, or have one name."""
    names = [axis.name for axis in axes]
    if len(set(names)) != len(names):
        raise MeshError(f"an axis is named twice: {names}")
    # A piece of one rank takes part in no overlap.
    pieces = sorted(
        (stride, size, axis.name)
        for axis in axes
        for size, stride in zip(axis.sizes, axis.strides, strict=True)
        if size > 1
    )
    # Pieces are disjoint if each one, in order of strides, ends before the stride of the next one.
    for (stride, size, name), (next_stride, _, next_name) in itertools.pairwise(pieces):
        if stride * size > next_stride:
            raise MeshError(f"axes {name!r} and {next_name!r} share ranks and cannot be in one mesh")


def merge_axes(name: str, parts: Sequence[MeshAxis]) -> MeshAxis:
    """Merge axes into one. Adjacent pieces are joined, so that equal axes have equal pieces."""
    merged: list[tuple[int, int]] = []
    for part in parts:
        for size, stride in zip(part.sizes, part.strides, strict=True):
            if size == 1:
                continue
            # The step of the outer piece is the extent of this one, so both together are one piece.
            if merged and merged[-1][1] == size * stride:
                merged[-1] = (merged[-1][0] * size, stride)
            else:
                merged.append((size, stride))
    merged = merged or [(1, 1)]
    return MeshAxis(name, tuple(size for size, _ in merged), tuple(stride for _, stride in merged))


def remaining_axis(name: str, axes: Sequence[MeshAxis], num_ranks: int) -> MeshAxis:
    """Return the axis that completes `axes`, which share no ranks, to `num_ranks` ranks."""
    # Walk from the outermost piece inwards: the gap between two neighbouring strides is a piece of the remaining axis.
    rest, outer = [], num_ranks
    pieces = [(stride, size) for axis in axes for size, stride in zip(axis.sizes, axis.strides, strict=True)]
    for stride, size in sorted((piece for piece in pieces if piece[1] > 1), reverse=True):
        rest.append(MeshAxis(name, (outer // (stride * size),), (stride * size,)))
        outer = stride
    return merge_axes(name, [*rest, MeshAxis(name, (outer,), (1,))])


def split_axis(axis: MeshAxis, sizes: tuple[int, ...], names: tuple[str, ...]) -> tuple[MeshAxis, ...]:
    """Split an axis, not flattened from axes that are not adjacent, into several, the first one outermost."""
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


class MeshCoordinates:
    """Named axes over the ranks of a world, the outermost first, seen from one rank: a mesh without its groups."""

    __slots__ = ("_aliases", "_base", "_coordinate", "_ranks", "axes", "shape", "world")

    def _place(
        self,
        axes: tuple[MeshAxis, ...],
        base: int,
        ranks: tuple[int, ...] | None,
        world: World,
        aliases: dict[str, MeshAxis],
    ) -> None:
        """Set axes and ranks, and compute the coordinate of this rank.

        Args:
            base: the index of coordinate (0, ..., 0).
            ranks: the global rank at each index; None: the index itself.
            aliases: flattened axes by name, shared with the meshes sliced from this one.
        """
        self.axes = axes
        self.shape = tuple(axis.size for axis in axes)
        self.world = world
        self._base = base
        self._ranks = ranks
        # One dict for all meshes derived from the same one, so that a flattened axis is known in all of them.
        self._aliases = aliases
        self._coordinate: tuple[int, ...] | None = None
        index = self._index()
        if index is not None:
            coordinate = tuple(axis.coordinate(index) for axis in axes)
            # `MeshAxis.coordinate` returns a value for any index. Only inside the mesh does it lead back to that index.
            if base + sum(axis.offset(c) for axis, c in zip(axes, coordinate, strict=True)) == index:
                self._coordinate = coordinate

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Return the names of the axes."""
        return tuple(axis.name for axis in self.axes)

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.axes)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks in the mesh or along one axis."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[self.axis_index(mesh_dim)]

    def axis_index(self, axis: int | str) -> int:
        """Return the index of an axis given by name or (possibly negative) index, or raise a MeshError."""
        if isinstance(axis, str):
            if axis in self.mesh_dim_names:
                return self.mesh_dim_names.index(axis)
            raise MeshError(self._unknown_axis(axis))
        if not -self.ndim <= axis < self.ndim:
            raise MeshError(f"mesh {self.describe()} has no axis {axis}")
        return axis % self.ndim

    def describe(self) -> str:
        """Return a short form, such as `(dp=2, tp=4)`."""
        return "(" + ", ".join(f"{axis.name}={axis.size}" for axis in self.axes) + ")"

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's coordinate, or None if it is outside the mesh."""
        return self._coordinate

    def get_rank(self) -> int:
        """Return this process's global rank, even if it is outside the mesh."""
        return self.world.rank

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's coordinate along an axis. The axis of a 1-D mesh need not be named.

        Raises:
            MeshError: this rank is outside the mesh, or the mesh has several axes and none was named.
        """
        axis = self._axis_inside(mesh_dim, "coordinate")
        assert self._coordinate is not None
        return self._coordinate[axis]

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the global rank at a coordinate."""
        index = self._base + sum(axis.offset(c) for axis, c in zip(self.axes, coordinate, strict=True))
        return index if self._ranks is None else self._ranks[index]

    def ranks_along(self, axis: int | str) -> tuple[int, ...]:
        """Return the global ranks that differ from this one only along an axis, in its order."""
        where = self.axis_index(axis)
        mine = list(self._coordinate if self._coordinate is not None else (0,) * self.ndim)
        mine[where] = 0
        # The offset of the other axes is added once: `rank_at` for every rank of a long line would be slower.
        start = self._base + sum(axis.offset(c) for axis, c in zip(self.axes, mine, strict=True))
        line = [start + self.axes[where].offset(c) for c in range(self.shape[where])]
        return tuple(line) if self._ranks is None else tuple(self._ranks[index] for index in line)

    def ranks(self) -> tuple[int, ...]:
        """Return all global ranks in row-major order, in time and memory linear in their number."""
        line = [self._base]
        for axis in self.axes:
            line = [index + axis.offset(c) for index in line for c in range(axis.size)]
        return tuple(line) if self._ranks is None else tuple(self._ranks[index] for index in line)

    def members_over(self, axes: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the coordinates of the ranks that differ from this one only on `axes`, in mesh order."""
        here = self._coordinate
        assert here is not None
        return list(itertools.product(*(range(n) if a in axes else (here[a],) for a, n in enumerate(self.shape))))

    def remaining_axis(self, name: str, axes: Sequence[str]) -> MeshAxis:
        """Return the axis over all ranks, also outside of a slice, with this rank's coordinates on the named axes."""
        num_ranks = self.world.size if self._ranks is None else len(self._ranks)
        return remaining_axis(name, [self._axis_named(axis) for axis in axes], num_ranks)

    def _index(self) -> int | None:
        if self._ranks is None:
            return self.world.rank
        return self._ranks.index(self.world.rank) if self.world.rank in self._ranks else None

    def _base_of(self, axes: Iterable[MeshAxis]) -> int:
        index = self._index()
        # A rank outside the mesh has no coordinates that a slice could keep.
        if index is None or self._coordinate is None:
            return self._base
        return index - sum(axis.offset(axis.coordinate(index)) for axis in axes)

    def _axis_inside(self, axis: int | str | None, wanted: str) -> int:
        """Return the index of an axis (None: the only one); errors name what is `wanted` of this rank in the mesh."""
        if self._coordinate is None:
            raise MeshError(f"rank {self.world.rank} is outside mesh {self.describe()} and has no {wanted} in it")
        if axis is None and self.ndim != 1:
            raise MeshError(f"mesh {self.describe()} has {self.ndim} axes; say which {wanted} is meant")
        return self.axis_index(0 if axis is None else axis)

    def _axis_named(self, name: str) -> MeshAxis:
        if name in self.mesh_dim_names:
            return self.axes[self.mesh_dim_names.index(name)]
        if name in self._aliases:
            return self._aliases[name]
        raise MeshError(self._unknown_axis(name))

    def _unknown_axis(self, name: str) -> str:
        aliases = f", aliases: {', '.join(self._aliases)}" if self._aliases else ""
        return f"mesh {self.describe()} has no axis {name!r}; axes: {', '.join(self.mesh_dim_names)}{aliases}"
