"""Axes of the device mesh: their order, names and aliases, divisors of degrees, and the mesh itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from math import isqrt
from typing import Any, Literal, get_args

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import World

ExpertMesh = Literal["folded", "peer"]
EXPERT_MESHES: tuple[ExpertMesh, ...] = get_args(ExpertMesh)

# Fields of `ParallelDims` that are degrees of parallelism, `ulysses_degree` included.
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "ulysses_degree")

# Fields of `ParallelDims` by which layouts are listed.
LAYOUT_COLUMNS = (*DEGREES[:-1], "expert_mesh")

CpMethod = Literal["auto", "ulysses", "ring", "all_gather"]
CP_METHODS: tuple[CpMethod, ...] = get_args(CpMethod)

# Axes of the dense mesh, outermost first. Folded: pipeline stages communicate least and are outermost, tensor parallel
# ranks communicate most and are neighbours. Peer: the order of the HyperParallel interface.
DENSE_AXES: dict[ExpertMesh, tuple[str, ...]] = {
    "folded": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    "peer": ("dp_replicate", "dp_shard", "ep", "cp", "tp", "pp"),
}

# The axes that each alias spans, in the order of the mesh. `fsdp` of the folded mesh shards over cp as well:
# context parallel ranks use the same weights, so they can shard them.
ALIASES: dict[ExpertMesh, dict[str, tuple[str, ...]]] = {
    "folded": {
        "fsdp": ("dp_shard", "cp"),
        "dp": ("dp_replicate", "dp_shard"),
        "batch": ("dp_replicate", "dp_shard"),
        "loss": ("dp_replicate", "dp_shard", "cp"),
    },
    "peer": {
        "fsdp": ("dp_shard",),
        "dp": ("dp_replicate", "dp_shard"),
        "batch": ("dp_replicate", "dp_shard"),
        "loss": ("dp_replicate", "dp_shard", "cp"),
    },
}


def product(degrees: Any, names: tuple[str, ...]) -> int:
    """Return the product of the attributes `names` of `degrees`."""
    return math.prod(getattr(degrees, name) for name in names)


def dense_degrees(expert_mesh: ExpertMesh) -> tuple[str, ...]:
    """Return the degrees whose product is the world size, in the order in which messages spell the equation."""
    return ("dp_replicate", "dp_shard", "cp", "tp", "pp") + (("ep",) if expert_mesh == "peer" else ())


def degrees_without_dp_shard(expert_mesh: ExpertMesh) -> tuple[str, ...]:
    """Return the degrees of the equation except `dp_shard`. `dp_shard=-1` is the world size over their product."""
    return tuple(name for name in dense_degrees(expert_mesh) if name != "dp_shard")


def divisors(n: int) -> list[int]:
    """Return all divisors of `n`, ascending. O(sqrt(n))."""
    # Divisors come in pairs d * (n / d), of which one is at most sqrt(n).
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def nearest_divisors(n: int, target: int) -> list[int]:
    """Return the nearest divisors of `n` on either side of `target`, or `target` itself if it is a divisor."""
    choices = divisors(n)
    below = [d for d in choices if d <= target]
    above = [d for d in choices if d >= target]
    return sorted({*below[-1:], *above[:1]})


def build_mesh(
    device_type: str,
    world: World,
    dense: Mapping[str, int],
    aliases: Mapping[str, tuple[str, ...]],
    sparse: Mapping[str, int] | None,
) -> DeviceMesh:
    """Build a dense mesh over all ranks of `world`, with aliases for the same ranks as `mesh[name]`.

    Args:
        world: its size is the product of the dense sizes.
        dense: size of every axis of the dense mesh, outermost first. Axes of size 1 are left out of the mesh, but
            `mesh[name]` returns a mesh of one rank for them. If all are 1, `dp_shard` remains.
        sparse: sizes of the experts' view of the same ranks, outermost first, including `efsdp`, `ep` and `etp`; None:
            these three are names in `dense` or `aliases`.
    """
    root = DeviceMesh(device_type, (world.size,), mesh_dim_names=("world",), world=world)
    # Axes of size 1 would add dimensions to every placement without sharding anything.
    used = {name: size for name, size in dense.items() if size > 1} or {"dp_shard": 1}
    mesh = root.unflatten("world", tuple(used.values()), tuple(used))
    for name, axes in ({name: (name,) for name in dense} | dict(aliases)).items():
        if name not in used:
            mesh.flatten(name, [axis for axis in axes if axis in used])
    if sparse is not None:
        # Views of one root share their aliases: names given to the sparse view are found on the dense one.
        view = root.unflatten("world", tuple(sparse.values()), tuple(f"sparse_{name}" for name in sparse))
        # The prefix keeps a sparse axis apart from a dense one of the same name.
        for name in ("efsdp", "ep", "etp"):
            view.flatten(name, [f"sparse_{name}"])
    return mesh
