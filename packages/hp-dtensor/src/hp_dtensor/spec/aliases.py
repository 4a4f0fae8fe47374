"""Placements by alias: for each tensor dimension the name of the mesh axis that shards it, or `"None"` or None.

A specification of one tensor is a tuple of placements (one per mesh axis), a tuple of alias names (one per tensor
dimension; a nested tuple names several axes, outermost first), or an object with `placements_on(mesh)`, as
`hp_dtensor.Layout` is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.spec.placements import Placement, Replicate, Shard, StridedShard

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
    """Return the placements of a specification on `device_mesh`.

    Raises:
        TypeError: not a specification.
        ValueError: a layout of another mesh, an unknown alias, or one that shards two dimensions.
    """
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
    """Return one placement per mesh axis for alias names, one entry per tensor dimension.

    Raises:
        ValueError: an unknown alias, or one that shards two dimensions.
    """
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
