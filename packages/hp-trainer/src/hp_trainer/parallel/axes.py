"""Axes of the device meshes: which degrees multiply to the number of ranks, in which order, under which names."""

from __future__ import annotations

import math
from typing import Any, Literal

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
