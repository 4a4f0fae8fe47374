"""Axes of the device meshes: which degrees multiply to the number of ranks, in which order, under which names.

Divisors of a number, and the nearest ones to suggest.

The device mesh of a set of degrees, with every name that the trainer asks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from math import isqrt
from typing import Any, Literal

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import World

ExpertMesh = Literal["folded", "peer"]

# Fields of `ParallelDims` that are degrees of parallelism, `ulysses_degree` included.
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "ulysses_degree")

CpMethod = Literal["auto", "ulysses", "ring", "all_gather"]

# Axes of the dense mesh, outermost first. Folded: pipeline stages talk least and are outermost, tensor parallel
# ranks talk most and are neighbours. Peer: the order of the HyperParallel interface.
DENSE_AXES: dict[ExpertMesh, tuple[str, ...]] = {
    "folded": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    "peer": ("dp_replicate", "dp_shard", "ep", "cp", "tp", "pp"),
}

# The axes that each alias spans, in the order of the mesh. `fsdp` of the folded mesh shards over cp as well:
# context parallel ranks hold the same weights, so they can share them.
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
    """Multiply the attributes `names` of `degrees`."""
    return math.prod(getattr(degrees, name) for name in names)


def dense_degrees(expert_mesh: ExpertMesh) -> tuple[str, ...]:
    """Return the degrees whose product is the world size, in the order in which messages spell the equation."""
    return ("dp_replicate", "dp_shard", "cp", "tp", "pp") + (("ep",) if expert_mesh == "peer" else ())


def around_dp_shard(expert_mesh: ExpertMesh) -> tuple[str, ...]:
    """Return the degrees of the equation but `dp_shard`: what -1 leaves out."""
    return tuple(name for name in dense_degrees(expert_mesh) if name != "dp_shard")


def divisors(n: int) -> list[int]:
    """Return all divisors of `n`, ascending. O(sqrt(n))."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def nearest_divisors(n: int, target: int) -> list[int]:
    """Return the divisors of `n` next to `target` on either side (`target` itself when it is one)."""
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
    """Build a dense mesh over all ranks of `world`, with other names for the same ranks reachable as `mesh[name]`.

    Args:
        device_type: `cpu`, `cuda`, `npu`.
        world: its size is the product of the dense sizes.
        dense: size of every axis of the dense mesh, outermost first. Those of size 1 are no axes of the mesh, but
            their names give meshes of one rank; of all ones, `dp_shard` stays.
        aliases: names for several dense axes taken together.
        sparse: sizes of the experts' view of the same ranks, outermost first, among them `efsdp`, `ep` and `etp`;
            None: those three are named by `dense` and `aliases`.
    """
    root = DeviceMesh(device_type, (world.size,), mesh_dim_names=("world",), world=world)
    used = {name: size for name, size in dense.items() if size > 1} or {"dp_shard": 1}
    mesh = root.unflatten("world", tuple(used.values()), tuple(used))
    for name, parts in ({name: (name,) for name in dense} | dict(aliases)).items():
        if name not in used:
            mesh.flatten(name, [part for part in parts if part in used])
    if sparse is not None:
        # Views of one root share their aliases: what is named on the sparse view is found on the dense one.
        view = root.unflatten("world", tuple(sparse.values()), tuple(f"sparse_{name}" for name in sparse))
        for name in ("efsdp", "ep", "etp"):
            view.flatten(name, [f"sparse_{name}"])
    return mesh
