"""Plans redistributions: reduce before gather, all-to-all instead of gather and slice, innermost shards first.

Several shards of one tensor dimension nest in mesh-axis order, so an axis may be gathered only when no later
axis cuts the same dimension, and sliced only when none does yet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from hp_dtensor.exceptions import PlacementError
from hp_dtensor.placements import Partial, Placement, RaggedShard, Replicate, Shard
from hp_dtensor.redistribute.steps import RedistributePlan, Step
from hp_dtensor.spec import TensorSpec

REPLICATE = Replicate()


@functools.lru_cache(maxsize=4096)
def plan_redistribute(source: TensorSpec, target: TensorSpec, itemsize: int = 4) -> RedistributePlan:
    """The steps from `source` to `target`, cached.

    Args:
        itemsize: bytes per element, for the byte counts.

    Raises:
        PlacementError: the specs have different meshes or shapes, or a rank outside the mesh asks.
    """
    if source.mesh != target.mesh:
        raise PlacementError(
            f"cannot redistribute between meshes: {source.mesh.describe()} -> {target.mesh.describe()}"
        )
    if source.shape != target.shape:
        raise PlacementError(f"cannot redistribute between shapes: {list(source.shape)} -> {list(target.shape)}")
    return _Planner(source, target, itemsize).plan()


class _Planner:
    def __init__(self, source: TensorSpec, target: TensorSpec, itemsize: int) -> None:
        self.source, self.target, self.itemsize = source, target, itemsize
        self.mesh = source.mesh
        self.current = list(source.placements)
        self.steps: list[Step] = []

    def plan(self) -> RedistributePlan:
        self._reduce()
        self._unshard()
        self._shard()
        assert tuple(self.current) == self.target.placements
        return RedistributePlan(self.source, self.target, tuple(self.steps))

    def _reduce(self) -> None:
        for axis, placement in enumerate(self.current):
            wanted = self.target.placements[axis]
            if not isinstance(placement, Partial) or placement == wanted:
                continue
            if placement.op == "sum" and self._may_become(axis, wanted):
                self._step("reduce_scatter", axis, wanted)
            else:
                self._step("all_reduce", axis, REPLICATE)

    def _unshard(self) -> None:
        while (axis := self._next_to_unshard()) is not None:
            wanted = self.target.placements[axis]
            if self._may_become(axis, wanted) and wanted.dim != self.current[axis].dim:  # type: ignore[attr-defined]
                self._step("all_to_all", axis, wanted)
            else:
                self._step("all_gather", axis, REPLICATE)

    def _shard(self) -> None:
        for axis, wanted in enumerate(self.target.placements):
            if self.current[axis] == wanted:
                continue
            if isinstance(wanted, Partial):
                if wanted.op != "sum":
                    raise PlacementError(f"cannot make {wanted} from {self.source.describe_placements()}; only sums")
                self._step("as_partial", axis, wanted)
            else:
                self._step("slice", axis, wanted)

    def _next_to_unshard(self) -> int | None:
        """The last axis whose shard must go: it is the innermost of its dimension. All-to-alls come first."""
        candidates = [axis for axis in reversed(range(self.mesh.ndim)) if self._must_unshard(axis)]
        innermost = [axis for axis in candidates if self._is_innermost(axis)]
        for axis in innermost:
            if self._may_become(axis, self.target.placements[axis]):
                return axis
        return innermost[0] if innermost else None

    def _must_unshard(self, axis: int) -> bool:
        """Whether this axis' shard is not the target's, or an outer one of its dimension is not yet."""
        placement = self.current[axis]
        if not isinstance(placement, (Shard, RaggedShard)):
            return False
        if placement != self.target.placements[axis]:
            return True
        return any(
            self.current[outer] != self.target.placements[outer]
            and (self.current[outer].is_shard(placement.dim) or self.target.placements[outer].is_shard(placement.dim))
            for outer in range(axis)
        )

    def _is_innermost(self, axis: int) -> bool:
        dim = self.current[axis].dim  # type: ignore[attr-defined]
        return not any(self.current[later].is_shard(dim) for later in range(axis + 1, self.mesh.ndim))

    def _may_become(self, axis: int, wanted: Placement) -> bool:
        """Whether `axis` can take the target's shard now: outer axes of that dimension are final, inner ones free."""
        if not isinstance(wanted, (Shard, RaggedShard)):
            return False
        dim = wanted.dim
        outer_final = all(
            self.current[outer] == self.target.placements[outer]
            for outer in range(axis)
            if self.current[outer].is_shard(dim) or self.target.placements[outer].is_shard(dim)
        )
        inner_free = not any(self.current[later].is_shard(dim) for later in range(axis + 1, self.mesh.ndim))
        return outer_final and inner_free

    def _step(self, name: str, axis: int, wanted: Placement) -> None:
        before = self._spec(self.current)
        without = self._spec([*self.current[:axis], REPLICATE, *self.current[axis + 1 :]])
        lengths_source = self._lengths(without, axis, self.current[axis])
        lengths_target = self._lengths(without, axis, wanted)
        nbytes = math.prod(before.local_shape) * self.itemsize
        wire = _wire_bytes(name, nbytes, self.mesh.shape[axis])
        self.steps.append(Step(name, axis, self.current[axis], wanted, lengths_source, lengths_target, wire))
        self.current[axis] = wanted

    def _spec(self, placements: Sequence[Placement]) -> TensorSpec:
        return TensorSpec(self.mesh, placements, self.source.shape, self.source.dtype)

    def _lengths(self, without: TensorSpec, axis: int, placement: Placement) -> tuple[int, ...]:
        if not isinstance(placement, (Shard, RaggedShard)):
            return ()
        size, ranks = without.local_shape[placement.dim], self.mesh.shape[axis]
        return tuple(placement.interval(size, ranks, rank)[1] for rank in range(ranks))


def _wire_bytes(name: str, nbytes: int, ranks: int) -> float:
    """Bytes a rank sends for a collective whose local input has `nbytes`."""
    match name:
        case "all_gather":
            return nbytes * (ranks - 1)
        case "reduce_scatter" | "all_to_all":
            return nbytes * (ranks - 1) / ranks
        case "all_reduce":
            return 2 * nbytes * (ranks - 1) / ranks
    return 0.0
