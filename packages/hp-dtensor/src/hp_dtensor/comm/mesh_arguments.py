"""The arguments of a new device mesh: how they are read, and what is refused."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

from hp_dtensor.comm.world import World, alone
from hp_dtensor.exceptions import MeshError


def read_shape_and_ranks(
    mesh: Any, mesh_shape: Sequence[int] | None, ranks: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the sizes of the axes and the ranks in row-major order (None: 0, 1, 2, ...) that the arguments mean.

    A tuple of ints is a shape. Anything else that holds ints (a list, nested lists, an array, a tensor) is the ranks
    themselves, as torch's `DeviceMesh` takes them.

    Raises:
        MeshError: both a mesh and a shape, neither, or something that is neither.
    """
    if (mesh is None) == (mesh_shape is None):
        raise MeshError("a mesh takes its ranks (mesh=, as in torch) or its shape (mesh_shape=): give one of them")
    if mesh_shape is not None:
        return listed("mesh_shape", "ints", mesh_shape), None if ranks is None else tuple(ranks)
    if _is_shape(mesh):
        return tuple(map(int, mesh)), None if ranks is None else tuple(ranks)
    if ranks is not None:
        raise MeshError(f"mesh={mesh!r} gives the ranks already; ranks= goes with a shape, a tuple of ints")
    return _read_ranks(mesh)


def _is_shape(mesh: Any) -> bool:
    return isinstance(mesh, tuple) and all(isinstance(size, numbers.Integral) for size in mesh)


def _read_ranks(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    import numpy as np

    message = f"mesh must be a shape (a tuple of ints) or ranks (nested lists of ints, an array), got {mesh!r}"
    if isinstance(mesh, (str, bytes)):
        raise MeshError(message)
    try:
        array = np.asarray(mesh.tolist() if hasattr(mesh, "tolist") else mesh)
    except ValueError as error:  # lists of different lengths
        raise MeshError(f"{message}: {error}") from error
    if array.dtype.kind not in "iu" or array.ndim == 0:
        raise MeshError(message)
    return tuple(map(int, array.shape)), tuple(map(int, array.ravel()))


def listed(what: str, kind: str, value: Any) -> tuple[Any, ...]:
    """Return `value` as a tuple; a text or a single thing is refused in the name of `what`."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise MeshError(f"{what} must be a tuple of {kind}, got {value!r}")
    return tuple(value)


def check_new_mesh(
    device_type: str, shape: tuple[int, ...], names: tuple[str, ...], ranks: Sequence[int] | None, world: World
) -> None:
    """Refuse a mesh that cannot exist in `world`.

    Raises:
        MeshError: listing every problem.
    """
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
