"""The collectives a redistribution consists of: each changes the placement of one mesh axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hp_dtensor import collectives
from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.placements import Placement
from hp_dtensor.spec import TensorSpec, describe

Tensor = Any


@dataclass(frozen=True, slots=True)
class Step:
    """One collective on one mesh axis.

    Attributes:
        name: `all_gather`, `slice`, `all_reduce`, `reduce_scatter`, `all_to_all` or `as_partial`.
        axis: the mesh axis.
        source, target: its placement before and after.
        lengths_source, lengths_target: per rank of the axis, the extent of the sharded dimension.
        wire_bytes: bytes that this rank sends to others.
    """

    name: str
    axis: int
    source: Placement
    target: Placement
    lengths_source: tuple[int, ...]
    lengths_target: tuple[int, ...]
    wire_bytes: float

    def run(self, local: Tensor, mesh: DeviceMesh) -> Tensor:
        """The step on this rank's local tensor; differentiable."""
        group = mesh.get_group(self.axis)
        source, target = self.source, self.target
        match self.name:
            case "all_gather":
                return collectives.all_gather(local, group, source.dim, self.lengths_source)  # type: ignore[attr-defined]
            case "slice":
                return collectives.local_slice(local, group, target.dim, self.lengths_target)  # type: ignore[attr-defined]
            case "all_reduce":
                return collectives.all_reduce(local, group, source.op)  # type: ignore[attr-defined]
            case "reduce_scatter":
                return collectives.reduce_scatter(local, group, target.dim, self.lengths_target)  # type: ignore[attr-defined]
            case "all_to_all":
                return collectives.all_to_all(
                    local,
                    group,
                    target.dim,  # type: ignore[attr-defined]
                    self.lengths_target,
                    source.dim,  # type: ignore[attr-defined]
                    self.lengths_source,
                )
        assert self.name == "as_partial"
        return collectives.as_partial(local, group)

    def run_varying(self, local: Tensor, gathered: Tensor, mesh: DeviceMesh) -> Tensor:
        """The result of an all-gather step, at hand as `gathered`, for a use that differs per rank."""
        assert self.name == "all_gather"
        group = mesh.get_group(self.axis)
        return collectives.regather_varying(local, gathered, group, self.source.dim, self.lengths_source)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class RedistributePlan:
    """The steps from one spec to another.

    Attributes:
        wire_bytes: sent per rank, for this rank's shards.
    """

    source: TensorSpec
    target: TensorSpec
    steps: tuple[Step, ...]

    @property
    def wire_bytes(self) -> float:
        return math.fsum(step.wire_bytes for step in self.steps)

    def run(self, local: Tensor) -> Tensor:
        """`local` (plain) redistributed; differentiable."""
        for step in self.steps:
            local = step.run(local, self.source.mesh)
        return local

    def __str__(self) -> str:
        names = self.source.mesh.mesh_dim_names
        head = f"{self.source.describe_placements()} -> {self.target.describe_placements()}"
        lines = [
            f"  {step.name} on {names[step.axis]}: {describe(step.source)} -> {describe(step.target)}, "
            f"{step.wire_bytes:.0f} bytes"
            for step in self.steps
        ]
        return "\n".join([f"{head}: {self.wire_bytes:.0f} bytes per rank", *lines])
