"""Redistributing a DTensor, at once or in the background."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.comm.collectives import staying
from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.exceptions import PlacementError
from hp_dtensor.redistribute import RedistributePlan, plan_across, plan_between
from hp_dtensor.spec import rank_checks
from hp_dtensor.spec.aliases import is_aliases, placements_for
from hp_dtensor.spec.placements import Placement, Replicate
from hp_dtensor.spec.tensor_spec import TensorSpec, require_placements
from hp_dtensor.tensor.varying_view import Source

Tensor = Any
DType = Any
Placements = Any
"""Placements (one per mesh axis), alias names (one per tensor dimension), or a layout."""


def redistribute(
    x: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    *,
    async_op: bool = False,
    forward_dtype: DType | None = None,
    backward_dtype: DType | None = None,
) -> Any:
    """Return `x` with other placements, on its own or on another mesh of the same world; differentiable.

    To another mesh every rank of both makes the call, and its backward communicates between them too. A rank
    outside the mesh of `x` passes an empty `x`; one outside the other mesh gets an empty result.

    Args:
        placements: one per mesh axis, or alias names, one per tensor dimension; default: replicated on every axis.
        async_op: return while the data is still on its way; the result waits for it when it is first used, and `x` must
            not be written before. Reductions by max, min or product, and results without dimensions, are waited for.
        forward_dtype: the dtype in which the data travels and which the result has; default: that of `x`.
        backward_dtype: the dtype in which the gradient travels; default: that of `x`. It arrives in that of `x`.

    Raises:
        PlacementError: placements that do not fit, a mesh of another world, or dtypes together with another mesh or
            with a partial max, min or product, whose gradient goes to the winners.
    """
    source: TensorSpec = x.spec
    mesh = source.mesh if device_mesh is None else require_mesh("redistribute", device_mesh)
    wanted = placements_on("redistribute", mesh, placements, source.ndim)
    if forward_dtype is not None or backward_dtype is not None:
        return _redistribute_in(x, mesh, wanted, forward_dtype, backward_dtype)
    return redistribute_to(x, TensorSpec(mesh, wanted, source.shape, source.dtype), async_op)


def redistribute_to(x: Any, target: TensorSpec, async_op: bool = False) -> Any:
    """Return `x` as `target`, which has the same shape; with `async_op` as one that waits for its data if it can."""
    source: TensorSpec = x.spec
    if source is target:
        return x
    platform = source.mesh.platform
    local = platform.unwrap(x)
    if source.mesh != target.mesh:
        return platform.wrap(plan_across(source, target, platform.itemsize(source.dtype)).run(local), target)
    rank_checks.check_moved(source, target)
    plan = plan_between(source, target, platform.itemsize(source.dtype))
    # A result that is waited for has no numbers yet. What selects looks at them (who was the maximum?), and torch reads
    # a tensor without dimensions as a number unasked.
    if async_op and plan.steps and source.shape and not (plan.selects or plan.is_elsewhere or platform.is_meta(local)):
        return _started(local, plan, target)
    return remembering(local, plan, plan.run(local), target)


def _started(local: Tensor, plan: RedistributePlan, target: TensorSpec) -> Any:
    """Begin the plan, and return its result as a DTensor that waits when it is first used."""
    platform = target.mesh.platform
    with platform.no_grad():
        finish = plan.start_data(platform.detach(local))
    # Autograd records the node now, in the order of the forward, on memory that has no values yet: only so may the
    # collective still run while the forward goes on. Storage and version counter are the result's own from the start.
    promised = platform.promised(target.local_shape, target.dtype, platform.device_of(local))
    moved = plan.record(local, promised)
    memory = _memory_of(local, plan, moved)
    result = platform.adopt_later(moved, target, finish)
    result.__dict__.update(memory)  # to set an attribute would wait
    return result


def _redistribute_in(
    x: Any, mesh: DeviceMesh, placements: Sequence[Placement], forward_dtype: DType | None, backward_dtype: DType | None
) -> Any:
    """Return `x` on `mesh` in `forward_dtype`, with its gradient travelling in `backward_dtype`."""
    source: TensorSpec = x.spec
    platform = source.mesh.platform
    given = forward_dtype if forward_dtype is not None else source.dtype
    there = source.with_dtype(given)
    target = TensorSpec(mesh, placements, source.shape, given)
    back_dtype = backward_dtype if backward_dtype is not None else source.dtype
    if source.mesh != mesh:
        raise PlacementError(
            "redistribute: forward_dtype and backward_dtype go with the tensor's own mesh; redistribute it there, then "
            f"to {mesh.describe()}"
        )
    plan = plan_between(there, target, platform.itemsize(given))
    if plan.selects:
        raise PlacementError(
            f"redistribute of {source!r}: forward_dtype and backward_dtype go with sums and averages; reduce it first"
        )
    rank_checks.check_moved(there, target)
    cast, local = platform.ops.cast, platform.unwrap(x)
    if platform.is_meta(local):
        return platform.wrap(plan.run(cast(local, given)), target)
    # One node: autograd would bring a gradient that passes between two nodes back to the dtype of the value there.
    moved = platform.linear_map(
        local,
        staying(lambda t: plan.run_data(cast(t, given))),
        lambda g: cast(plan.run_backward(cast(g, back_dtype)), source.dtype),
    )
    return platform.wrap(moved, target)


def remembering(local: Tensor, plan: RedistributePlan, moved: Tensor, target: TensorSpec) -> Any:
    """Return the result as a DTensor that knows its source, for gradients of uses that differ per rank."""
    result = target.mesh.platform.wrap(moved, target)
    result.__dict__.update(_memory_of(local, plan, moved))
    return result


def _memory_of(local: Tensor, plan: RedistributePlan, moved: Tensor) -> dict[str, Source]:
    """Return the attribute of a result that holds its source; none where no use takes the gradient past the result."""
    platform = plan.target.mesh.platform
    # The source's memory stays as long as the result, which autograd may keep until backward: that has to be of use.
    if not (plan.may_vary_cheaply and platform.requires_grad(local)):
        return {}
    # Both counters: a write in place to the source or to the result between here and a use makes the shortcut's
    # gradient that of other values, and `varying` then goes the long way.
    version = platform.version
    return {"_redistributed_from": Source(local, plan, version(local), version(moved))}


def placements_on(
    what: str, mesh: DeviceMesh, placements: Placements | None, ndim: int | None = None
) -> tuple[Placement, ...]:
    """Return the placements given, read from alias names where those are given; by default replicated ones.

    Args:
        ndim: the dimensions of the tensor, one alias name for each; None: placements only.

    Raises:
        PlacementError: in the name of `what`: a single placement, something else that is no sequence, alias names that
            the mesh does not have, that cut two dimensions, or whose number is not `ndim`.
    """
    if placements is None:
        return replicated_on(mesh)
    if type(placements) in (tuple, list) and placements and isinstance(placements[0], Placement):
        return tuple(placements)
    if ndim is None or not (hasattr(placements, "placements_on") or is_aliases(placements)):
        return require_placements(what, mesh, placements)
    if is_aliases(placements) and len(placements) != ndim:
        raise PlacementError(
            f"{what}: expected {ndim} alias names, one per dimension of the tensor ('None' or None where it is not "
            f"cut), got {placements!r}"
        )
    try:
        return placements_for(mesh, placements)
    except (TypeError, ValueError) as error:
        raise PlacementError(f"{what}: {error}") from error


def replicated_on(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Return the placements of a tensor that every rank of the mesh holds whole."""
    return (Replicate(),) * mesh.ndim
