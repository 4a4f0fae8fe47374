"""DeviceMesh: named axes over the ranks of a world, the process groups along them, and the current mesh."""

from __future__ import annotations

import contextlib
import math
import numbers
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from hp_dtensor.comm.mesh_layout import (
    MeshAxis,
    MeshCoordinates,
    check_disjoint,
    merge_axes,
    row_major_axes,
    split_axis,
)
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import World, current_world, existing_world, joined_world, single_rank_world
from hp_dtensor.exceptions import MeshError, PlatformError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform


def read_shape_and_ranks(
    mesh: Any, mesh_shape: Sequence[int] | None, ranks: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the axis sizes and the ranks in row-major order (None: 0, 1, 2, ...) that the arguments specify.

    A tuple of ints is a shape. Anything else that holds ints (a list, nested lists, an array, a tensor) is the ranks
    themselves, as torch's `DeviceMesh` takes them.
    """
    if (mesh is None) == (mesh_shape is None):
        raise MeshError("a mesh takes its ranks (mesh=, as in torch) or its shape (mesh_shape=): pass exactly one")
    if mesh_shape is not None:
        return require_tuple("mesh_shape", "ints", mesh_shape), None if ranks is None else tuple(ranks)
    if isinstance(mesh, tuple) and all(isinstance(size, numbers.Integral) for size in mesh):
        return tuple(map(int, mesh)), None if ranks is None else tuple(ranks)
    if ranks is not None:
        raise MeshError(f"mesh={mesh!r} already lists the ranks; ranks= goes with a shape, a tuple of ints")
    return _read_ranks(mesh)


def _read_ranks(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    import numpy as np

    message = f"mesh must be a shape (a tuple of ints) or ranks (nested lists of ints, an array), got {mesh!r}"
    if isinstance(mesh, (str, bytes)):
        raise MeshError(message)
    try:
        # Tensors of any framework have `tolist`, and need not be imported here.
        array = np.asarray(mesh.tolist() if hasattr(mesh, "tolist") else mesh)
    except ValueError as error:  # lists of different lengths
        raise MeshError(f"{message}: {error}") from error
    if array.dtype.kind not in "iu" or array.ndim == 0:
        raise MeshError(message)
    return tuple(map(int, array.shape)), tuple(map(int, array.ravel()))


def require_tuple(what: str, kind: str, value: Any) -> tuple[Any, ...]:
    """Return `value` as a tuple. A string or a value that is not iterable raises a `MeshError` about `what`."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise MeshError(f"{what} must be a tuple of {kind}, got {value!r}")
    return tuple(value)


def check_new_mesh(
    device_type: str, shape: tuple[int, ...], names: tuple[str, ...], ranks: Sequence[int] | None, world: World
) -> None:
    """Check that a mesh can exist in `world`. A MeshError lists every problem."""
    # Types first: the checks below compare numbers and names.
    if not all(isinstance(size, int) for size in shape):
        raise MeshError(f"mesh_shape must be a tuple of ints, got {shape!r}; pass the ranks themselves as ranks=")
    if not all(isinstance(name, str) for name in names):
        raise MeshError(f"mesh_dim_names must be a tuple of names, got {names!r}")
    if not all(isinstance(rank, numbers.Integral) for rank in ranks or ()):
        raise MeshError(f"ranks must be a sequence of ints, got {ranks!r}")
    problems = []
    known = getattr(world.platform, "device_types", None)  # missing on platforms that only plan
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
    if world is not single_rank_world(world.platform):
        return str(world.size)
    return "1: this process has joined no job, see hp_dtensor.init_process_group and hp_dtensor.launch"


class EnteredMeshes(threading.local):
    """The meshes of the `with mesh:` blocks that this thread is in, the outermost first."""

    # Per thread, because each simulated rank is a thread.
    def __init__(self) -> None:
        self.meshes: list[DeviceMesh] = []


entered = EnteredMeshes()


class DeviceMesh(MeshCoordinates):
    """An immutable mesh of ranks, seen from one of them. Follows torch's `DeviceMesh`.

    Args:
        device_type: `cpu`, `cuda`, `npu`.
        mesh: the global ranks, as a list, nested lists, an array or a tensor; or the axis sizes as a tuple of ints,
            for ranks 0, 1, 2, ... in row-major order. (In torch, a tuple lists ranks too.)
        mesh_dim_names: one name per axis; default `axis0`, `axis1`, ...
        mesh_shape: the axis sizes, instead of `mesh`.
        ranks: the ranks of a shape in row-major order, if they are not 0, 1, 2, ...
        world: default: the current world.
        platform: the platform or its name; default: that of the world.

    Raises:
        MeshError: a device type that the platform lacks, names that repeat or do not fit, sizes below 1, ranks that
            repeat, or a mesh larger than the world.

    Examples:
        >>> with fake_world(8):
        ...     mesh = DeviceMesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        ...     mesh["tp"].shape, mesh.get_coordinate()
        ((4,), (0, 0))
    """

    __slots__ = ("_groups", "_hash", "device_type", "platform")

    platform: Platform
    """The platform of the mesh's world. A fake world has none, which raises a MeshError."""

    def __init__(
        self,
        device_type: str,
        mesh: Any = None,
        mesh_dim_names: Sequence[str] | None = None,
        *,
        mesh_shape: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
        world: World | None = None,
        platform: Platform | str | None = None,
    ) -> None:
        shape, given = read_shape_and_ranks(mesh, mesh_shape, ranks)
        default = [f"axis{i}" for i in range(len(shape))]
        names = require_tuple("mesh_dim_names", "names", default if mesh_dim_names is None else mesh_dim_names)
        if world is None:
            world = current_world(get_platform(platform) if isinstance(platform, str) else platform)
        check_new_mesh(device_type, shape, names, given, world)
        # Ranks 0, 1, 2, ... are not stored: memory and hash stay constant in their number, and such a mesh equals one
        # that was created from its shape.
        explicit = None if given is None or given == tuple(range(len(given))) else given
        self._setup(device_type, row_major_axes(names, shape), 0, explicit, world, {})

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
        self._place(axes, base, ranks, world, aliases)
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        if world.platform is not None:
            self.platform = world.platform
        # Computed once: meshes are part of the key of every cached plan. Worlds are compared by identity, as in
        # `__eq__`.
        self._hash = hash((*self._identity, id(world)))

    @property
    def _identity(self) -> tuple[Any, ...]:
        """Return a hashable value that two meshes of one world share only if they are equal."""
        return self.device_type, self.axes, self._base, self._ranks

    def _derive(self, axes: tuple[MeshAxis, ...], base: int) -> DeviceMesh:
        """Return a mesh of other axes over the same world; see `_place`."""
        mesh = object.__new__(DeviceMesh)
        mesh._setup(self.device_type, axes, base, self._ranks, self.world, self._aliases)
        return mesh

    # Called for attributes without a value. As a property the platform would cost a call of Python at each of several
    # uses in every redistribution.
    def __getattr__(self, name: str) -> NoReturn:
        if name == "platform":
            raise MeshError(
                "this mesh belongs to a world without a platform (a fake world); it can only be planned with"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    @property
    def mesh(self) -> Any:
        """Return the global ranks as an int32 host tensor of the mesh's shape (in a fake world: a NumPy array)."""
        import numpy as np

        ranks = np.array(self.ranks(), np.int32).reshape(self.shape)
        platform: Platform | None = self.world.platform
        return ranks if platform is None else platform.from_numpy(ranks, platform.host_device)

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the framework's process group along an axis: on torch a `torch.distributed.ProcessGroup`.

        For functions of `torch.distributed`, `DistributedDataParallel` and libraries. For simulated ranks, and if the
        framework has no such class, it is the group of `group_along`.

        Raises:
            MeshError: this rank is outside the mesh, or the mesh has several axes and none was named.
        """
        return self.world.framework_group(self.group_along(mesh_dim), self.device_type)

    def group_along(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the process group of this rank along an axis (default: the only axis of a 1-D mesh).

        It is created on first use.

        Raises:
            MeshError: this rank is outside the mesh, or the mesh has several axes and none was named.
        """
        return self.group_over((self._axis_inside(mesh_dim, "group"),))

    def group_over(self, axes: tuple[int, ...]) -> ProcessGroup:
        """Return the group of the ranks that differ from this one, inside the mesh, only on `axes`, in mesh order."""
        # A group that was destroyed (`destroy_process_group`) is created again, by every rank, at its next use.
        found = self._groups.get(axes)
        if found is None or found.is_closed:
            found = self._groups[axes] = self.world.group([self.rank_at(member) for member in self.members_over(axes)])
        return found

    def _get_root_mesh(self) -> DeviceMesh:
        """Return this mesh. torch's `DistributedDataParallel(device_mesh=...)` calls this to find out if it is a slice.

        For a slice it would convert parameters that are torch's DTensors, which ours are not.
        """
        return self

    def get_all_groups(self) -> list[Any]:
        """Return the framework's process groups of this rank, one per axis; see `get_group`."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the sub-mesh of this rank along the named axes or aliases, in the order given.

        Raises:
            MeshError: an unknown name, or axes that share ranks.
        """
        wanted = (names,) if isinstance(names, str) else names
        if not isinstance(wanted, (tuple, list)) or not all(isinstance(name, str) for name in wanted):
            raise MeshError(f"a mesh is sliced by axis names, got {names!r}; axes: {', '.join(self.mesh_dim_names)}")
        return self.along([self._axis_named(name) for name in wanted])

    def along(self, axes: Sequence[MeshAxis]) -> DeviceMesh:
        """Return the mesh over this rank's ranks along `axes`, which may belong to another mesh over the same ranks.

        Raises:
            MeshError: axes that share ranks.
        """
        check_disjoint(axes)
        return self._derive(tuple(axes), self._base_of(axes))

    def flatten(self, name: str, axes: Sequence[str] | None = None) -> DeviceMesh:
        """Return the 1-D mesh of several axes (default: all) merged into one, the outermost first.

        From then on `mesh[name]` returns it, also in meshes sliced from this one.

        Raises:
            MeshError: the name is taken, an unknown axis, or axes that share ranks.
        """
        parts = tuple(self._axis_named(axis) for axis in (axes if axes is not None else self.mesh_dim_names))
        check_disjoint(parts)
        axis = merge_axes(name, parts)
        if self._aliases.get(name, axis) != axis or name in self.mesh_dim_names:
            raise MeshError(f"the name {name!r} is taken in mesh {self.describe()}")
        # Written to the dict that all meshes derived from the same one share.
        self._aliases[name] = axis
        return self._derive((axis,), self._base_of((axis,)))

    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """Flatten all axes: `flatten` under the name that it has in torch. Default name: axis names joined by `_`."""
        return self.flatten("_".join(self.mesh_dim_names) if mesh_dim_name is None else mesh_dim_name)

    def unflatten(self, axis: str, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
        """Return this mesh with one axis split into several, the first outermost.

        Raises:
            MeshError: sizes whose product is not the axis size, or repeated names.
        """
        where = self.axis_index(axis)
        parts = split_axis(self.axes[where], tuple(sizes), tuple(names))
        axes = self.axes[:where] + parts + self.axes[where + 1 :]
        check_disjoint(axes)
        # The same ranks as before, so the first of them is the same too.
        return self._derive(axes, self._base)

    def concatenate(self, other: DeviceMesh) -> DeviceMesh:
        """Return the mesh with the axes of this mesh followed by those of `other`.

        Raises:
            MeshError: the meshes were not derived from the same one, or share axes.
        """
        if other.world is not self.world or other._ranks != self._ranks:
            raise MeshError(f"meshes {self.describe()} and {other.describe()} do not come from the same ranks")
        return self.along(self.axes + other.axes)

    @classmethod
    def from_group(
        cls,
        group: Any,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        world: World | None = None,
    ) -> DeviceMesh:
        """Return a mesh that communicates through existing groups. Follows torch's `DeviceMesh.from_group`.

        Args:
            group: a `ProcessGroup` or a group of the framework (`torch.distributed`), or a list with one per axis. Each
                group contains this rank.
            mesh: required with several groups: all ranks, as nested lists of the mesh's shape.

        Raises:
            MeshError: an argument is not a group, or the groups are not those of this rank in `mesh`.
        """
        import numpy as np

        given: list[Any] = list(group) if isinstance(group, (tuple, list)) else [group]
        groups = [found for one in given if (found := _own_group(one)) is not None]
        if not groups or len(groups) < len(given):
            raise MeshError(f"from_group takes a ProcessGroup, or one per axis, got {group!r}")
        if mesh is None and len(groups) > 1:
            raise MeshError(f"from_group with {len(groups)} groups needs mesh: all ranks, as nested lists")
        ranks = np.asarray(groups[0].ranks if mesh is None else mesh)
        world = world if world is not None else current_world(groups[0].platform)
        made = cls(device_type, ranks, mesh_dim_names=mesh_dim_names, world=world)
        made._use_groups(groups)
        return made

    def _use_groups(self, groups: Sequence[ProcessGroup]) -> None:
        """Use an existing group for each axis, instead of creating one."""
        inside = self._coordinate is not None
        lines = [tuple(map(self.rank_at, self.members_over((axis,)))) if inside else () for axis in range(self.ndim)]
        if lines != [tuple(group.ranks) for group in groups]:
            raise MeshError(
                f"from_group: the groups of rank {self.world.rank} on mesh {self.describe()} are "
                f"{[list(line) for line in lines]}, got {[list(group.ranks) for group in groups]}"
            )
        for axis, group in enumerate(groups):
            # In the world too, so that no second group with its own connections is created for the same ranks.
            self.world._groups.setdefault(group.ranks, group)
            self._groups[(axis,)] = group

    def __enter__(self) -> DeviceMesh:
        """Make this the current mesh of the thread; see `hp_dtensor.get_current_mesh`."""
        entered.meshes.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        entered.meshes.pop()

    def __reduce__(self) -> tuple[Any, ...]:
        # Without groups, which belong to this process, and with the platform and the world by name and size.
        platform = self.world.platform
        name = None if platform is None else platform.name
        return _restore, (name, self.world.size, *self._identity, self._aliases)

    # Immutable, and a copy would create groups of its own: a copied model communicates over the same ones.
    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    def __eq__(self, other: object) -> bool:
        # Almost always the same object: specs of a model share their mesh, and every look-up of a plan compares them.
        if self is other:
            return True
        if not isinstance(other, DeviceMesh) or self.world is not other.world:
            return False
        return self._identity == other._identity

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
    """Return a mesh over all ranks of the current world; see `DeviceMesh`.

    A process that was started by a launcher (torchrun, msrun, srun) and has not joined the job yet joins it here.

    Args:
        mesh_shape: the axis sizes.
        platform: the platform or its name; default: that of the world, else the selected one.

    Raises:
        MeshError: as `DeviceMesh`, and if the mesh and the world differ in their numbers of ranks.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ...     return mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
        >>> run_ranks(program, 4)
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    # Inside `use_world` or a fake world of several ranks there is no job to join, nor a platform to select.
    if isinstance(platform, str) or (platform is None and existing_world(None).size == 1):
        platform = get_platform(platform)
        joined_world(platform)
    mesh = DeviceMesh(device_type, mesh_shape=mesh_shape, mesh_dim_names=mesh_dim_names, platform=platform)
    if mesh.size() != mesh.world.size:
        raise MeshError(
            f"mesh {mesh.describe()} has {mesh.size()} ranks, the world has {mesh.world.size}; "
            "for a mesh over some of the ranks use DeviceMesh(device_type, mesh_shape, ranks=...)"
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
    """Unpickle a mesh in the current world, which must have the size of the one in which it was pickled."""
    # Without joining: a worker process of a data loader has the launcher's environment too, but is not a rank.
    world = existing_world(None if platform is None else get_platform(platform))
    if world.size != world_size:
        raise MeshError(f"a mesh of a world of {world_size} ranks was read in a world of {world.size}")
    mesh = object.__new__(DeviceMesh)
    mesh._setup(device_type, axes, base, ranks, world, aliases)
    return mesh


def require_mesh(what: str, mesh: Any) -> DeviceMesh:
    """Return `mesh`, or a mesh of the framework as one over the same groups. Others raise a MeshError about `what`."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    platform = _platform_of_object(mesh)
    found = None if platform is None else platform.wrap_mesh(mesh)
    if not isinstance(found, DeviceMesh):
        raise MeshError(f"{what}: device_mesh must be a DeviceMesh, got {mesh!r}")
    return found


def as_group(group: Any) -> ProcessGroup:
    """Return a process group of the framework or of hp_dtensor as one of hp_dtensor. Others raise a MeshError."""
    found = _own_group(group)
    if found is None:
        raise MeshError(f"expected a process group with this rank in it, got {group!r}")
    return found


def _own_group(group: Any) -> ProcessGroup | None:
    if isinstance(group, ProcessGroup):
        return group
    platform = _platform_of_object(group)
    found = None if platform is None else platform.wrap_group(group)
    return found if isinstance(found, ProcessGroup) else None


def _platform_of_object(value: Any) -> Platform | None:
    """Return the platform of the framework that defines the type of `value`, or None."""
    # By name, so that no framework is imported to find out that a value is not one of its objects.
    framework = type(value).__module__.partition(".")[0]
    if framework in sys.builtin_module_names:
        return None
    with contextlib.suppress(PlatformError):
        return get_platform(framework)
    return None


def get_current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost `with mesh:` block of this thread.

    Raises:
        MeshError: there is none.

    Examples:
        >>> def program():
        ...     with init_device_mesh("cpu", (2,)) as mesh:
        ...         return get_current_mesh() is mesh
        >>> run_ranks(program, 2)
        [True, True]
    """
    if not entered.meshes:
        raise MeshError("no mesh was given and there is no current one; pass device_mesh=, or use `with mesh:`")
    return entered.meshes[-1]
