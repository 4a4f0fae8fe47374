"""Redistribution of DTensors: one, in the background, or many at once; and varying views of the results.

A replicated tensor that each rank uses differently (R -> V in the terms of `comm.collectives`) has a gradient that must
be summed over the ranks. Its *varying view* is the node of the graph where that happens; all users of a tensor share
one. The result of a redistribution remembers its source, so that a view of a gathered tensor sends its gradient to the
source by one reduce-scatter (S -> V), instead of by an all-reduce and a slice through the gathered tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm import collectives
from hp_dtensor.comm.collectives import saving_result
from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.exceptions import GradientPathError, MixedOperandsError, PlacementError
from hp_dtensor.redistribute import RedistributePlan, plan_across, plan_between
from hp_dtensor.redistribute.collectives import BUCKET_BYTES, run_data_together
from hp_dtensor.spec import rank_checks
from hp_dtensor.spec.placements import Placement, Replicate, is_aliases, placements_for
from hp_dtensor.spec.tensor_spec import TensorSpec, cached_by_spec, require_placements
from hp_dtensor.tensor.base import DTensorBase
from hp_dtensor.tensor.saved_shards import pass_on

Tensor = Any


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a redistributed DTensor.

    Attributes:
        local: the local data of the source.
        plan: the plan that redistributed it.
        version: version counter of `local` at that time. If it has changed, the result is not that of `local` any more.
        result_version: version counter of the result at that time.
    """

    local: Tensor
    plan: RedistributePlan
    version: int
    result_version: int


def vary(x: Any, axes: tuple[int, ...]) -> Tensor:
    """Return the varying view of `x` on `axes`: a plain local tensor whose gradient is summed over those axes.

    All users of `x` share the view, until `x` is written in place.
    """
    platform = x._spec.mesh.platform
    local = platform.unwrap(x)
    # R -> V is the identity in forward, so without a gradient there is nothing to do.
    if not (platform.is_grad_enabled() and platform.requires_grad(local)):
        return local
    return recorded_view(x, local, axes)


def recorded_view(x: Any, local: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the varying view of `x` as `vary` does, without checking that autograd records operations on `local`.

    Args:
        local: the local data of `x`, which requires a gradient.
    """
    platform = x._spec.mesh.platform
    # A leaf lives longer than a training step: a view stored on it would keep the graph of that step alive.
    if platform.is_leaf(x):
        return _varying_view(x, local, axes)
    # One view for all users: autograd adds up their gradients first, and they are reduced across ranks once. A view of
    # an earlier version would have the right values, but lead to the wrong node of the graph.
    version = platform.version(local)
    views = x.__dict__.setdefault("_varying_views", {})
    created_at, view = views.get(axes, (None, None))
    if created_at != version:
        view = _varying_view(x, local, axes)
        views[axes] = version, view
    return view


def forget_source(x: Any) -> None:
    """Drop the source of `x` and its varying views: gradients of later uses pass through `x` itself.

    Called when the data of `x` is replaced or its gradient is observed; see `observe_gradient`.
    """
    x.__dict__.pop("_redistributed_from", None)
    x.__dict__.pop("_varying_views", None)
    x.__dict__.pop("_saved_shard", None)


def observe_gradient(x: Any) -> None:
    """Make sure that the gradient of `x` passes through `x`, so that hooks and `retain_grad` see it.

    Raises:
        GradientPathError: `x` was already used in a way whose gradient goes straight to its source.
    """
    if shortcut_views(x):
        raise GradientPathError(
            f"a hook on {x.spec!r}, which was redistributed and then used differently per rank: that gradient goes "
            "straight to its source, and the hook would not see it. Register the hook before the first use."
        )
    forget_source(x)


def shortcut_views(x: Any) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return (axes, view) of the varying views of `x` whose gradients go straight to its source and bypass `x`.

    The gradient of such a view is partial on `axes`.
    """
    source: Source | None = x.__dict__.get("_redistributed_from")
    if source is None:
        return []
    version = x._spec.mesh.platform.version(x)
    views = x.__dict__.get("_varying_views", {})
    return [
        (axes, view)
        for axes, (created_at, view) in views.items()
        if created_at == version and _has_shortcut(x, source, axes)
    ]


def with_shortcuts(x: Any, grad: Tensor | None, past: Sequence[tuple[tuple[int, ...], Tensor | None]]) -> Tensor | None:
    """Return the full gradient (plain) of `x`, including that of the views in `shortcut_views`.

    Args:
        grad: the gradient that passed through `x`, or None.
        past: (axes, gradient) of each shortcut view. Each gradient is summed over its axes here.
    """
    mesh = x._spec.mesh
    for axes, of_view in past:
        if of_view is not None:
            summed = collectives.all_reduce(of_view, mesh.group_over(axes))
            grad = summed if grad is None else mesh.platform.ops.add(grad, summed)
    return grad


def _varying_view(x: Any, local: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Create a varying view, with a gradient that goes straight to the source of `x` where that saves bytes."""
    mesh = x._spec.mesh
    if mesh.get_coordinate() is None:  # this rank holds nothing, and is in no group to sum over
        return local
    source: Source | None = x.__dict__.get("_redistributed_from")
    if source is not None and _has_shortcut(x, source, axes):
        # The dual of S -> V is one reduce-scatter. Through the gathered tensor it would be an all-reduce (dual of R ->
        # V) and a slice (dual of S -> R), with twice the bytes.
        return pass_on(x, source.plan.run_varying(source.local, local, axes))
    return collectives.vary(local, [mesh.group_over(axes)])


def _has_shortcut(x: Any, source: Source, axes: tuple[int, ...]) -> bool:
    """Return whether the gradient of a varying view of `x` may go straight to its source."""
    # After a write to source or result the gradient of the result is not that of the source any more.
    version = x._spec.mesh.platform.version
    return (
        source.plan.varies_cheaply(axes)
        and source.result_version == version(x)
        and source.version == version(source.local)
    )


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

    For another mesh all ranks of both make the call, and backward communicates between both too. A rank outside the
    mesh of `x` passes an empty `x`. A rank outside the other mesh gets an empty result.

    Args:
        placements: one per mesh axis, or alias names, one per tensor dimension; default: replicated on every axis.
        async_op: return while the data is still being communicated. The result waits for it at its first use, and `x`
            must not be written before. Without effect for max, min, product and results without dimensions.
        forward_dtype: the dtype in which the data is sent, and the dtype of the result; default: that of `x`.
        backward_dtype: the dtype in which the gradient is sent, before it is cast to that of `x`; default: that of `x`.

    Raises:
        PlacementError: placements that do not fit, a mesh of another world, or dtypes together with another mesh or
            with a partial max, min or product.
    """
    source: TensorSpec = x.spec
    mesh = source.mesh if device_mesh is None else require_mesh("redistribute", device_mesh)
    wanted = placements_on("redistribute", mesh, placements, len(source.shape))
    if forward_dtype is not None or backward_dtype is not None:
        return _redistribute_in(x, mesh, wanted, forward_dtype, backward_dtype)
    # Cached for the own mesh, where the look-up of an interned spec would be a notable part.
    target = _placed(source, wanted) if device_mesh is None else TensorSpec(mesh, wanted, source.shape, source.dtype)
    return redistribute_to(x, target, async_op)


_placed = cached_by_spec(maxsize=4096)(TensorSpec.with_placements)


def redistribute_to(x: Any, target: TensorSpec, async_op: bool = False) -> Any:
    """Return `x` redistributed to `target`, of the same shape. With `async_op` the result is pending if possible."""
    source: TensorSpec = x.spec
    # Specs are interned, so equal ones are the same object.
    if source is target:
        return x
    platform = source.mesh.platform
    local = platform.unwrap(x)
    if source.mesh is not target.mesh and source.mesh != target.mesh:
        return platform.wrap(plan_across(source, target, platform.itemsize(source.dtype)).run(local), target)
    rank_checks.check_redistribution(source, target)
    plan = plan_between(source, target, platform.itemsize(source.dtype))
    # A pending result has no values yet. Max, min and product compare them with the input to save for backward, and
    # torch reads a tensor without dimensions as a number by itself.
    if (
        async_op
        and plan.steps
        and source.shape
        and not (plan.selects or plan.is_outside_mesh or platform.is_meta(local))
    ):
        return _start(local, plan, target)
    return wrap_with_source(local, plan, plan.run(local), target)


def redistribute_operand(x: Any, target: TensorSpec) -> Any:
    """Return `x` redistributed to `target`, of the same mesh, for an operation: plain where nothing is recorded."""
    source: TensorSpec = x._spec
    platform = source.mesh.platform
    local = platform.unwrap(x)
    if platform.is_grad_enabled() and platform.requires_grad(local):
        return redistribute_to(x, target)
    # Without a gradient there is no varying view, which needs a DTensor and its source.
    rank_checks.check_redistribution(source, target)
    return plan_between(source, target, platform.itemsize(source.dtype)).run(local)


def _start(local: Tensor, plan: RedistributePlan, target: TensorSpec) -> Any:
    """Start the plan and return its result as a pending DTensor."""
    platform = target.mesh.platform
    with platform.no_grad():
        finish = plan.start_data(platform.detach(local))
    # Autograd records the node now, in the order of the forward, on memory without values. So the collective may go on
    # while the forward continues. Storage and version counter are those of the final result from the start.
    promised = platform.empty_deferred(target.local_shape, target.dtype, platform.device_of(local))
    moved = plan.record(local, promised)
    memory = _source_attribute(local, plan, moved)
    result = platform.wrap_deferred(moved, target, finish)
    result.__dict__.update(memory)  # setting an attribute would wait for the data
    return result


def _redistribute_in(
    x: Any, mesh: DeviceMesh, placements: Sequence[Placement], forward_dtype: DType | None, backward_dtype: DType | None
) -> Any:
    """Return `x` redistributed in `forward_dtype`, with a gradient that is redistributed in `backward_dtype`."""
    source: TensorSpec = x.spec
    platform = source.mesh.platform
    sent_dtype = forward_dtype if forward_dtype is not None else source.dtype
    sent = source.with_dtype(sent_dtype)
    target = TensorSpec(mesh, placements, source.shape, sent_dtype)
    back_dtype = backward_dtype if backward_dtype is not None else source.dtype
    if source.mesh != mesh:
        raise PlacementError(
            "redistribute: forward_dtype and backward_dtype go with the tensor's own mesh; redistribute it there, then "
            f"to {mesh.describe()}"
        )
    plan = plan_between(sent, target, platform.itemsize(sent_dtype))
    if plan.selects:
        raise PlacementError(
            f"redistribute of {source!r}: forward_dtype and backward_dtype go with sums and averages; reduce it first"
        )
    rank_checks.check_redistribution(sent, target)
    cast, local = platform.ops.cast, platform.unwrap(x)
    if platform.is_meta(local):
        return platform.wrap(plan.run(cast(local, sent_dtype)), target)
    # One node: between two nodes autograd would cast the gradient to the dtype of the value there.
    moved = platform.linear_map(
        local,
        saving_result(lambda t: plan.run_data(cast(t, sent_dtype))),
        lambda g: cast(plan.run_backward(cast(g, back_dtype)), source.dtype),
    )
    return platform.wrap(moved, target)


def wrap_with_source(local: Tensor, plan: RedistributePlan, moved: Tensor, target: TensorSpec) -> Any:
    """Return the result of a plan as a DTensor that refers to its source, for its varying views."""
    platform = target.mesh.platform
    if moved is local:
        return platform.wrap(moved, target)
    memory = _source_attribute(local, plan, moved) if plan.may_vary_cheaply else None
    result = platform.wrap_fresh(moved, target)
    if memory is not None:
        result.__dict__.update(memory)
    return result


def _source_attribute(local: Tensor, plan: RedistributePlan, moved: Tensor) -> dict[str, Source]:
    """Return the attribute of a result that refers to its source; empty if no varying view could use it."""
    platform = plan.target.mesh.platform
    # The reference keeps the memory of the source alive as long as the result, which autograd may save until backward.
    if not (plan.may_vary_cheaply and platform.requires_grad(local)):
        return {}
    # Both counters: after an in-place write to source or result, the gradient has to pass through the result again.
    version = platform.version
    return {"_redistributed_from": Source(local, plan, version(local), version(moved))}


def placements_on(
    what: str, mesh: DeviceMesh, placements: Placements | None, ndim: int | None = None
) -> tuple[Placement, ...]:
    """Return placements from an argument that may hold placements, alias names or None (replicated).

    Args:
        ndim: number of tensor dimensions, each with an alias name; None: alias names are not accepted.

    Raises:
        PlacementError: not a sequence (such as a single placement), unknown alias names, names that shard two
            dimensions, or not `ndim` names. The message starts with `what`.
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
            f"sharded), got {placements!r}"
        )
    try:
        return placements_for(mesh, placements)
    except (TypeError, ValueError) as error:
        raise PlacementError(f"{what}: {error}") from error


def replicated_on(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Return the placements of a tensor that is replicated on every axis of the mesh."""
    return (Replicate(),) * mesh.ndim


def batch_redistribute(
    tensors: Iterable[Any],
    placements: Sequence[Placement] | Sequence[Sequence[Placement] | None] | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[Any]:
    """Redistribute many DTensors on their own meshes in shared collectives.

    Tensors of one dtype on one device share a collective if they need the same kind over the same ranks. Results and
    gradients are those of `redistribute`, bit for bit where no sums are formed in another order. Backward redistributes
    tensor by tensor. Saves latency for many small tensors, such as the parameters of a model to be saved.

    Args:
        placements: those of all tensors (default: replicated on every axis), or a list with those of each tensor (None:
            replicated).
        bucket_bytes: the most bytes that a rank sends in one collective. They are copied into one buffer, and another
            one of this size receives. A larger tensor is sent alone.

    Raises:
        TypeError: `tensors` is a single DTensor.
        MixedOperandsError: some are not DTensors. Lists their positions.
        PlacementError: placements that do not fit, by position. Nothing was communicated then.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     tensors = [ones(4, device_mesh=mesh, placements=[Shard(0)]) for _ in range(10)]
        ...     with record_collectives() as log:
        ...         replicated = batch_redistribute(tensors, [Replicate()])
        ...     return log.count(), {x.placements for x in replicated}
        >>> run_ranks(program, 2)[0]
        (1, {(Replicate(),)})
    """
    if isinstance(tensors, DTensorBase):
        raise TypeError(f"batch_redistribute takes many DTensors, got one, {tensors.spec!r}; use its redistribute()")
    tensors = list(tensors)
    others = {position: type(x).__name__ for position, x in enumerate(tensors) if not isinstance(x, DTensorBase)}
    if others:
        raise MixedOperandsError(
            f"batch_redistribute takes DTensors, got others at positions {others}; use distribute_tensor for them"
        )
    targets = _targets_of(tensors, placements)
    moving = [(x, target) for x, target in zip(tensors, targets, strict=True) if x.spec is not target]
    for x, target in moving:
        rank_checks.check_redistribution(x.spec, target)
    moved = iter(_redistribute_together([x for x, _ in moving], [target for _, target in moving], bucket_bytes))
    return [x if x.spec is target else next(moved) for x, target in zip(tensors, targets, strict=True)]


def _targets_of(tensors: Sequence[Any], placements: Any) -> list[TensorSpec]:
    """Return the target spec of each tensor; see `batch_redistribute` for `placements` and errors."""
    for_all = (
        placements is None or isinstance(placements, Placement) or any(isinstance(p, Placement) for p in placements)
    )
    each = [placements] * len(tensors) if for_all else placements
    if len(each) != len(tensors):
        raise PlacementError(
            f"batch_redistribute of {len(tensors)} tensors: expected the placements of all, or a list with those of "
            f"each, got {len(each)} lists"
        )
    targets, problems = [], []
    for position, (x, wanted) in enumerate(zip(tensors, each, strict=True)):
        source: TensorSpec = x.spec
        try:
            placed = placements_on("batch_redistribute", source.mesh, wanted)
            targets.append(TensorSpec(source.mesh, placed, source.shape, source.dtype))
        except PlacementError as error:
            problems.append(f"tensor {position} ({source!r}): {error}")
    # Raised before anything is communicated, so that no rank waits for this one.
    if problems:
        raise PlacementError("; ".join(problems))
    return targets


def _redistribute_together(tensors: Sequence[Any], targets: Sequence[TensorSpec], bucket_bytes: int) -> list[Any]:
    """Return the redistributed tensors, of which none has its target spec yet; see `batch_redistribute`."""
    sources: list[TensorSpec] = [x.spec for x in tensors]
    locals_ = [source.mesh.platform.unwrap(x) for x, source in zip(tensors, sources, strict=True)]
    plans = [
        plan_between(source, target, source.mesh.platform.itemsize(source.dtype))
        for source, target in zip(sources, targets, strict=True)
    ]
    # Max, min and product save their operands for backward, so they run and record themselves. The others are sums and
    # copies, whose backward needs no values.
    together = [
        i
        for i, (plan, local) in enumerate(zip(plans, locals_, strict=True))
        if plan.steps and not plan.selects and not plan.is_outside_mesh and not plan.source.mesh.platform.is_meta(local)
    ]
    data: dict[int, Tensor] = {}
    # In the order of the tensors, which is the same on all ranks, so that they call the same collectives.
    for platform in dict.fromkeys(plans[i].source.mesh.platform for i in together):
        mine = [i for i in together if plans[i].source.mesh.platform is platform]
        with platform.no_grad():
            given = [platform.detach(locals_[i]) for i in mine]
            data.update(zip(mine, run_data_together([plans[i] for i in mine], given, bucket_bytes), strict=True))
    results = []
    for i, (plan, local, target) in enumerate(zip(plans, locals_, targets, strict=True)):
        moved = plan.record(local, data[i]) if i in data else plan.run(local)
        results.append(wrap_with_source(local, plan, moved, target))
    return results
