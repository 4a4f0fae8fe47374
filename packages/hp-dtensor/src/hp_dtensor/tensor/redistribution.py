"""Redistributing a DTensor, at once or in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.redistribute import RedistributePlan, plan_across, plan_between
from hp_dtensor.spec import rank_checks
from hp_dtensor.spec.placements import Placement, Replicate
from hp_dtensor.spec.tensor_spec import TensorSpec, require_placements
from hp_dtensor.tensor.varying import Source

Tensor = Any


def redistribute(
    x: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    async_op: bool = False,
) -> Any:
    """Return `x` with other placements, on its own or on another mesh of the same world; differentiable.

    To another mesh every rank of both makes the call, and its backward communicates between them too. A rank
    outside the mesh of `x` passes an empty `x`; one outside the other mesh gets an empty result.

    Args:
        placements: default: replicated on every axis.
        async_op: return a `PendingDTensor` whose `wait()` gives the result; `x` must not be written before.

    Raises:
        PlacementError: placements that do not fit, or a mesh of another world.
    """
    source: TensorSpec = x.spec
    mesh = source.mesh if device_mesh is None else require_mesh("redistribute", device_mesh)
    wanted = placements_on("redistribute", mesh, placements)
    target = TensorSpec(mesh, wanted, source.shape, source.dtype)
    if async_op:
        return _start_redistribute(x, target)
    return redistribute_to(x, target)


def redistribute_to(x: Any, target: TensorSpec) -> Any:
    """Return `x` as `target`, which has the same shape."""
    source: TensorSpec = x.spec
    if source is target:
        return x
    platform = source.mesh.platform
    local = platform.unwrap(x)
    if source.mesh != target.mesh:
        return platform.wrap(plan_across(source, target, platform.itemsize(source.dtype)).run(local), target)
    rank_checks.check_moved(source, target)
    plan = plan_between(source, target, platform.itemsize(source.dtype))
    moved = plan.run(local)
    return remembering(local, plan, moved, target)


class PendingDTensor:
    """A redistribution under way.

    Attributes:
        spec: that of the result.
    """

    def __init__(self, spec: TensorSpec, finish: Callable[[], Any]) -> None:
        self.spec = spec
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Return the DTensor, once its communication is over; the same one every time."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result


def _start_redistribute(x: Any, target: TensorSpec) -> PendingDTensor:
    source: TensorSpec = x.spec
    if source is target or source.mesh != target.mesh:
        result = redistribute_to(x, target)
        return PendingDTensor(target, lambda: result)
    platform = source.mesh.platform
    rank_checks.check_moved(source, target)
    local = platform.unwrap(x)
    plan = plan_between(source, target, platform.itemsize(source.dtype))
    finish = plan.start(local)
    return PendingDTensor(target, lambda: remembering(local, plan, finish(), target))


def remembering(local: Tensor, plan: RedistributePlan, moved: Tensor, target: TensorSpec) -> Any:
    """Return the result as a DTensor that knows its source, for gradients of uses that differ per rank."""
    platform = target.mesh.platform
    result = platform.wrap(moved, target)
    if platform.requires_grad(local):
        result._redistributed_from = Source(local, plan, platform.version(local), platform.version(moved))
    return result


def placements_on(what: str, mesh: DeviceMesh, placements: Sequence[Placement] | None) -> tuple[Placement, ...]:
    """Return the placements given, by default replicated ones.

    Raises:
        PlacementError: a single placement, or something else that is no sequence.
    """
    if placements is None:
        return replicated_on(mesh)
    return require_placements(what, mesh, placements)


def replicated_on(mesh: DeviceMesh) -> tuple[Placement, ...]:
    return (Replicate(),) * mesh.ndim
