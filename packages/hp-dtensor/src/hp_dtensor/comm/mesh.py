"""Device meshes as strides: slicing, flattening and coordinates are arithmetic, the same cost for any size.

A mesh is a list of named axes over rank numbers. An axis is one or more (size, stride) pieces, outermost
first, as in CuTe layouts, so that flattening axes that are not adjacent in rank order is still arithmetic.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hp_dtensor.comm import current_mesh
from hp_dtensor.comm.world import ProcessGroup, World, alone, current_world
from hp_dtensor.exceptions import MeshError, PlatformError

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """A named axis: `sizes` and `strides` (in ranks) of its pieces, outermost first."""

    name: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def offset(self, coordinate: int) -> int:
        """Distance in ranks from coordinate 0."""
        total = 0
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            coordinate, digit = divmod(coordinate, size)
            total += digit * stride
        return total

    def coordinate(self, index: int) -> int:
        """The coordinate of rank index `index`, whatever its position on other axes."""
        result = 0
        for size, stride in zip(self.sizes, self.strides, strict=True):
            result = result * size + (index // stride) % size
        return result


class DeviceMesh:
    """A mesh of ranks, seen from one rank; immutable.

    Args:
        device_type: `cpu`, `cuda`, `npu`.
        mesh_shape: sizes of the axes (tuple of ints): ranks 0, 1, 2, ... in row-major order.
        mesh_dim_names: one name per axis; default `axis0`, `axis1`, ...
        ranks: explicit ranks in row-major order where they are not 0, 1, 2, ...
        world: default the current world.

    Raises:
        MeshError: names that repeat or do not fit, sizes below 1, ranks that repeat, or a mesh larger
            than the world.
    """

    __slots__ = (
        "_aliases",
        "_base",
        "_coordinate",
        "_groups",
        "_hash",
        "_ranks",
        "axes",
        "device_type",
        "shape",
        "world",
    )

    def __init__(
        self,
        device_type: str,
        mesh_shape: Sequence[int],
        mesh_dim_names: Sequence[str] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        world: World | None = None,
        platform: Platform | None = None,
    ) -> None:
        shape = _listed("mesh_shape", "ints", mesh_shape)
        default = [f"axis{i}" for i in range(len(shape))]
        names = _listed("mesh_dim_names", "names", default if mesh_dim_names is None else mesh_dim_names)
        world = world if world is not None else _world_here(platform)
        _check_new_mesh(device_type, shape, names, ranks, world)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        axes = tuple(
            MeshAxis(name, (size,), (stride,)) for name, size, stride in zip(names, shape, strides, strict=True)
        )
        explicit = None if ranks is None or tuple(ranks) == tuple(range(len(ranks))) else tuple(ranks)
        self._setup(device_type, axes, 0, explicit, world, {})

    def _setup(
        self,
        device_type: str,
        axes: tuple[MeshAxis, ...],
        base: int,
        ranks: tuple[int, ...] | None,
        world: World,
        aliases: dict[str, MeshAxis],
    ) -> None:
        self.device_type = device_type
        self.axes = axes
        self.shape = tuple(axis.size for axis in axes)
        self.world = world
        self._base = base
        self._ranks = ranks
        self._aliases = aliases
        self._coordinate = self._find_coordinate()
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._hash = hash((device_type, axes, base, ranks, id(world)))

    def _derive(self, axes: tuple[MeshAxis, ...], base: int) -> DeviceMesh:
        mesh = object.__new__(DeviceMesh)
        mesh._setup(self.device_type, axes, base, self._ranks, self.world, self._aliases)
        return mesh

    # What it is ------------------------------------------------------------------------------------------

    @property
    def platform(self) -> Platform:
        if self.world.platform is None:
            raise MeshError(
                "this mesh belongs to a world without a platform (a fake world); it can only be planned with"
            )
        return self.world.platform

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def ndim(self) -> int:
        return len(self.axes)

    def size(self, axis: int | str | None = None) -> int:
        """Number of ranks, of the mesh or along one axis."""
        return math.prod(self.shape) if axis is None else self.shape[self.axis_index(axis)]

    def axis_index(self, axis: int | str) -> int:
        """The position of an axis given by name or (negative) number."""
        if isinstance(axis, str):
            if axis in self.mesh_dim_names:
                return self.mesh_dim_names.index(axis)
            raise MeshError(self._unknown_axis(axis))
        if not -self.ndim <= axis < self.ndim:
            raise MeshError(f"mesh {self.describe()} has no axis {axis}")
        return axis % self.ndim

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's coordinate, or None when it is outside the mesh."""
        return self._coordinate

    def get_rank(self) -> int:
        """This process's global rank, in the mesh or outside."""
        return self.world.rank

    def get_local_rank(self, axis: int | str | None = None) -> int:
        """This rank's coordinate along one axis (of a 1-D mesh: its only one)."""
        if self._coordinate is None:
            raise MeshError(f"rank {self.world.rank} is outside mesh {self.describe()}")
        if axis is None and self.ndim != 1:
            raise MeshError(f"mesh {self.describe()} has {self.ndim} axes; say which")
        return self._coordinate[self.axis_index(0 if axis is None else axis)]

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The global rank at a coordinate."""
        index = self._base + sum(axis.offset(c) for axis, c in zip(self.axes, coordinate, strict=True))
        return index if self._ranks is None else self._ranks[index]

    def ranks_along(self, axis: int | str) -> tuple[int, ...]:
        """The global ranks of this rank's line along an axis."""
        where = self.axis_index(axis)
        mine = list(self._coordinate if self._coordinate is not None else (0,) * self.ndim)
        mine[where] = 0
        start = self._base + sum(axis.offset(c) for axis, c in zip(self.axes, mine, strict=True))
        line = [start + self.axes[where].offset(c) for c in range(self.shape[where])]
        return tuple(line) if self._ranks is None else tuple(self._ranks[index] for index in line)

    def ranks(self) -> tuple[int, ...]:
        """All global ranks in row-major order (as many as the mesh is large)."""
        line = [0]
        for axis in self.axes:
            line = [index + axis.offset(c) for index in line for c in range(axis.size)]
        line = [index + self._base for index in line]
        return tuple(line) if self._ranks is None else tuple(self._ranks[index] for index in line)

    def get_group(self, axis: int | str | None = None) -> ProcessGroup:
        """The process group of this rank's line along an axis (of a 1-D mesh: its only one); made on first use."""
        if self._coordinate is None:
            raise MeshError(f"rank {self.world.rank} is outside mesh {self.describe()} and has no group in it")
        if axis is None and self.ndim != 1:
            raise MeshError(f"mesh {self.describe()} has {self.ndim} axes; say which group is meant")
        return self.group_over((self.axis_index(0 if axis is None else axis),))

    def group_over(self, axes: tuple[int, ...]) -> ProcessGroup:
        """The group of the ranks that differ from this one on `axes` (numbers) only, in mesh order."""
        found = self._groups.get(axes)
        if found is None or found.is_closed:
            found = self._groups[axes] = self.world.group([self.rank_at(member) for member in self.members_over(axes)])
        return found

    def members_over(self, axes: Sequence[int]) -> list[tuple[int, ...]]:
        """The coordinates of that group's ranks."""
        here = self._coordinate
        assert here is not None
        return list(itertools.product(*(range(n) if a in axes else (here[a],) for a, n in enumerate(self.shape))))

    def get_all_groups(self) -> list[ProcessGroup]:
        """The process groups of this rank's lines, one per axis."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    # Other meshes of the same ranks ----------------------------------------------------------------------

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh of this rank along the named axes or aliases, in the order given."""
        wanted = (names,) if isinstance(names, str) else names
        if not isinstance(wanted, (tuple, list)) or not all(isinstance(name, str) for name in wanted):
            raise MeshError(f"a mesh is sliced by names of axes, got {names!r}; axes: {', '.join(self.mesh_dim_names)}")
        axes = tuple(self._axis_named(name) for name in wanted)
        _check_disjoint(axes)
        return self._derive(axes, self._base_of(axes))

    def flatten(self, name: str, axes: Sequence[str] | None = None) -> DeviceMesh:
        """The 1-D mesh of several axes (default: all) as one, outermost first; `mesh[name]` finds it from now on."""
        parts = tuple(self._axis_named(axis) for axis in (axes if axes is not None else self.mesh_dim_names))
        _check_disjoint(parts)
        axis = _merge_pieces(name, parts)
        self._add_alias(axis)
        return self._derive((axis,), self._base_of((axis,)))

    def unflatten(self, axis: str, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
        """This mesh with one axis split into several, the first outermost."""
        where = self.axis_index(axis)
        parts = _split_axis(self.axes[where], tuple(sizes), tuple(names))
        axes = self.axes[:where] + parts + self.axes[where + 1 :]
        _check_disjoint(axes)
        return self._derive(axes, self._base)

    def concatenate(self, other: DeviceMesh) -> DeviceMesh:
        """The mesh with this mesh's axes followed by `other`'s; both must be views of the same ranks."""
        if other.world is not self.world or other._ranks != self._ranks:
            raise MeshError(f"meshes {self.describe()} and {other.describe()} do not come from the same ranks")
        axes = self.axes + other.axes
        _check_disjoint(axes)
        return self._derive(axes, self._base_of(axes))

    @classmethod
    def from_group(
        cls,
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        world: World | None = None,
    ) -> DeviceMesh:
        """A mesh that communicates through existing groups.

        Args:
            group: that of the only axis, or one per axis, each with this rank in it.
            mesh: for several groups all ranks, as nested lists of the mesh's shape.

        Raises:
            MeshError: something else than groups, or groups that are not those of this rank in `mesh`.
        """
        import numpy as np

        groups: list[Any] = list(group) if isinstance(group, (tuple, list)) else [group]
        if not groups or not all(isinstance(one, ProcessGroup) for one in groups):
            raise MeshError(f"from_group takes a ProcessGroup, or one per axis, got {group!r}")
        if mesh is None and len(groups) > 1:
            raise MeshError(f"from_group with {len(groups)} groups needs mesh: all ranks, as nested lists")
        ranks = np.asarray(groups[0].ranks if mesh is None else mesh)
        world = world if world is not None else current_world(groups[0].platform)
        shape = tuple(map(int, ranks.shape))
        made = cls(device_type, shape, mesh_dim_names=mesh_dim_names, ranks=ranks.ravel().tolist(), world=world)
        made._use_groups(groups)
        return made

    def _use_groups(self, groups: Sequence[ProcessGroup]) -> None:
        """Take an existing group for each axis."""
        inside = self._coordinate is not None
        lines = [tuple(map(self.rank_at, self.members_over((axis,)))) if inside else () for axis in range(self.ndim)]
        if lines != [tuple(group.ranks) for group in groups]:
            raise MeshError(
                f"from_group: the groups of rank {self.world.rank} on mesh {self.describe()} are "
                f"{[list(line) for line in lines]}, got {[list(group.ranks) for group in groups]}"
            )
        for axis, group in enumerate(groups):
            self.world._groups.setdefault(group.ranks, group)
            self._groups[(axis,)] = group

    # Internals -------------------------------------------------------------------------------------------

    def _index(self) -> int | None:
        if self._ranks is None:
            return self.world.rank
        return self._ranks.index(self.world.rank) if self.world.rank in self._ranks else None

    def _find_coordinate(self) -> tuple[int, ...] | None:
        index = self._index()
        if index is None:
            return None
        coordinate = tuple(axis.coordinate(index) for axis in self.axes)
        here = self._base + sum(axis.offset(c) for axis, c in zip(self.axes, coordinate, strict=True))
        return coordinate if here == index else None

    def _base_of(self, axes: Iterable[MeshAxis]) -> int:
        index = self._index()
        if index is None or self._coordinate is None:
            return self._base
        return index - sum(axis.offset(axis.coordinate(index)) for axis in axes)

    def _axis_named(self, name: str) -> MeshAxis:
        if name in self.mesh_dim_names:
            return self.axes[self.mesh_dim_names.index(name)]
        if name in self._aliases:
            return self._aliases[name]
        raise MeshError(self._unknown_axis(name))

    def _unknown_axis(self, name: str) -> str:
        aliases = f", aliases: {', '.join(self._aliases)}" if self._aliases else ""
        return f"mesh {self.describe()} has no axis {name!r}; axes: {', '.join(self.mesh_dim_names)}{aliases}"

    def _add_alias(self, axis: MeshAxis) -> None:
        known = self._aliases.get(axis.name, axis)
        if known != axis or axis.name in self.mesh_dim_names:
            raise MeshError(f"the name {axis.name!r} is taken in mesh {self.describe()}")
        self._aliases[axis.name] = axis

    def describe(self) -> str:
        """Short form, such as `(dp=2, tp=4)`."""
        return "(" + ", ".join(f"{axis.name}={axis.size}" for axis in self.axes) + ")"

    def __enter__(self) -> DeviceMesh:
        """Make this the current mesh of the thread; see `hp_dtensor.get_current_mesh`."""
        current_mesh.enter(self)
        return self

    def __exit__(self, *exception: object) -> None:
        current_mesh.leave()

    def __reduce__(self) -> tuple[Any, ...]:
        platform = self.world.platform
        name = None if platform is None else platform.name
        where = (self.device_type, self.axes, self._base, self._ranks, self._aliases)
        return _restore, (name, self.world.size, *where)

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, DeviceMesh) and self._key() == other._key() and self.world is other.world

    def _key(self) -> tuple[Any, ...]:
        return self.device_type, self.axes, self._base, self._ranks

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"DeviceMesh({self.device_type!r}, {self.describe()})"


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    mesh_dim_names: Sequence[str] | None = None,
    *,
    platform: Platform | str | None = None,
) -> DeviceMesh:
    """A mesh over all ranks of the current world; see `DeviceMesh`.

    Raises:
        MeshError: also when the mesh does not hold exactly as many ranks as the world.
    """
    from hp_dtensor.platform.selection import get_platform

    if isinstance(platform, str) or (platform is None and current_world(None).size == 1):
        platform = get_platform(platform)
    mesh = DeviceMesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names, platform=platform)
    if mesh.size() != mesh.world.size:
        raise MeshError(
            f"mesh {mesh.describe()} has {mesh.size()} ranks, the world has {mesh.world.size}; "
            "for a mesh of some of them use DeviceMesh(device_type, mesh_shape, ranks=...)"
        )
    return mesh


def _restore(
    platform: str | None,
    world_size: int,
    device_type: str,
    axes: tuple[MeshAxis, ...],
    base: int,
    ranks: tuple[int, ...] | None,
    aliases: dict[str, MeshAxis],
) -> DeviceMesh:
    """A pickled mesh, of the same ranks, in the world of the process that reads it.

    Raises:
        MeshError: that world has another size.
    """
    from hp_dtensor.platform.selection import get_platform

    world = current_world(None if platform is None else get_platform(platform))
    if world.size != world_size:
        raise MeshError(f"a mesh of a world of {world_size} ranks was read in a world of {world.size}")
    mesh = object.__new__(DeviceMesh)
    mesh._setup(device_type, axes, base, ranks, world, aliases)
    return mesh


def _world_here(platform: Platform | None) -> World:
    """The current world; in a job of processes that of the selected platform, without its being named."""
    world = current_world(platform)
    if platform is not None or world is not alone(None):
        return world
    from hp_dtensor.platform.selection import get_platform

    with contextlib.suppress(PlatformError):  # without any platform one may plan all the same
        return current_world(get_platform())
    return world


def require_mesh(what: str, mesh: Any) -> None:
    """Refuse, in the name of `what`, a device mesh that is none.

    Raises:
        MeshError: naming what was given.
    """
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"{what}: device_mesh must be a DeviceMesh, got {mesh!r}")


def _listed(what: str, kind: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise MeshError(f"{what} must be a tuple of {kind}, got {value!r}")
    return tuple(value)


def _check_new_mesh(
    device_type: str, shape: tuple[int, ...], names: tuple[str, ...], ranks: Sequence[int] | None, world: World
) -> None:
    if not all(isinstance(size, int) for size in shape):
        raise MeshError(f"mesh_shape must be a tuple of ints, got {shape!r}; which ranks they are, ranks= says")
    if not all(isinstance(name, str) for name in names):
        raise MeshError(f"mesh_dim_names must be a tuple of names, got {names!r}")
    problems = []
    known = getattr(world.platform, "device_types", None)  # platforms that only plan may leave it out
    if known and device_type not in known:
        problems.append(f"the platform has no device {device_type!r} here, only {', '.join(known)}")
    if not shape or any(size < 1 for size in shape):
        problems.append(f"a mesh needs at least one axis and sizes >= 1, got shape {shape}")
    if len(names) != len(shape):
        problems.append(f"{len(shape)} axes need as many names, got {list(names)}")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        problems.append(f"axis names repeat: {', '.join(repeated)}")
    problems += _rank_problems(math.prod(shape), ranks, world)
    if problems:
        raise MeshError("; ".join(problems))


def _rank_problems(size: int, ranks: Sequence[int] | None, world: World) -> list[str]:
    if ranks is None:
        return [f"the mesh has {size} ranks, the world only {_size_of(world)}"] if size > world.size else []
    problems = []
    if len(ranks) != size:
        problems.append(f"the shape holds {size} ranks, {len(ranks)} were given")
    if len(set(ranks)) != len(ranks):
        problems.append(f"ranks repeat: {list(ranks)}")
    outside = [rank for rank in ranks if not 0 <= rank < world.size]
    if outside:
        problems.append(f"ranks {outside} are outside the world of {_size_of(world)}")
    return problems


def _size_of(world: World) -> str:
    if world is not alone(world.platform):
        return str(world.size)
    return "1: this process has joined no job, see hp_dtensor.init_process_group and hp_dtensor.launch"


def _check_disjoint(axes: Sequence[MeshAxis]) -> None:
    """Refuse axes that share ranks, such as `dp` and a flattened axis that contains it."""
    names = [axis.name for axis in axes]
    if len(set(names)) != len(names):
        raise MeshError(f"an axis is named twice: {names}")
    pieces = sorted(
        (stride, size, axis.name)
        for axis in axes
        for size, stride in zip(axis.sizes, axis.strides, strict=True)
        if size > 1
    )
    for (stride, size, name), (next_stride, _, next_name) in itertools.pairwise(pieces):
        if stride * size > next_stride:
            raise MeshError(f"axes {name!r} and {next_name!r} share ranks and cannot be in one mesh")


def _merge_pieces(name: str, parts: Sequence[MeshAxis]) -> MeshAxis:
    """One axis of several, adjacent pieces merged so that equal axes have equal pieces."""
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


def _split_axis(axis: MeshAxis, sizes: tuple[int, ...], names: tuple[str, ...]) -> tuple[MeshAxis, ...]:
    if math.prod(sizes) != axis.size or len(sizes) != len(names):
        raise MeshError(
            f"axis {axis.name!r} of {axis.size} cannot be split into {dict(zip(names, sizes, strict=False))}"
        )
    if len(axis.sizes) == 1:
        tails = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        return tuple(
            MeshAxis(name, (size,), (axis.strides[0] * tail,))
            for name, size, tail in zip(names, sizes, tails, strict=True)
        )
    raise MeshError(f"axis {axis.name!r} was flattened from axes that are not adjacent and cannot be split")
