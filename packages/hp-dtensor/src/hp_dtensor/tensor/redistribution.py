"""Varying views: how a DTensor enters a computation that differs per rank, with its gradient summed over those ranks.

Replicated data that ranks use differently (R -> V in the terms of `comm.collectives`) has a gradient that must be
summed over them. The view is the point of the graph where that happens, and one view serves all users of a tensor.
What was gathered just before keeps its source here, so that its view sends the gradient back by one reduce-scatter
(S -> V), past the gathered tensor, instead of by an all-reduce and a slice.

Redistributing a DTensor, at once or in the background.

Redistribution of many DTensors at once.
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
from hp_dtensor.redistribute.batch import BUCKET_BYTES, run_data_together
from hp_dtensor.spec import rank_checks
from hp_dtensor.spec.aliases import is_aliases, placements_for
from hp_dtensor.spec.placements import Placement, Replicate
from hp_dtensor.spec.tensor_spec import TensorSpec, require_placements
from hp_dtensor.tensor.base import DTensorBase

Tensor = Any


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a redistributed DTensor.

    Attributes:
        local: the local data of the source.
        plan: the plan that moved it.
        version: of `local` then; once it has been written, the result is of other values.
        result_version: of the result then, likewise.
    """

    local: Tensor
    plan: RedistributePlan
    version: int
    result_version: int


def vary(x: Any, axes: tuple[int, ...]) -> Tensor:
    """Return the varying view of `x` on `axes` as a plain local tensor: its gradient is summed over those axes.

    One view serves all users of `x`, until `x` is written in place; the view of something just gathered reduces
    straight to its source.
    """
    platform = x._spec.mesh.platform
    local = platform.unwrap(x)
    # R -> V is nothing in forward; without a gradient there is nothing at all to do.
    if not (platform.is_grad_enabled() and platform.requires_grad(local)):
        return local
    return recorded_view(x, local, axes)


def recorded_view(x: Any, local: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return `vary` of `x`, whose local data is `local`, where it is known that operations on it are recorded."""
    platform = x._spec.mesh.platform
    # A leaf outlives the step: a view kept on it would keep the graph of that step alive.
    if platform.is_leaf(x):
        return _varying_view(x, local, axes)
    # One view for all users: their gradients add up in autograd first, and are reduced across ranks once. A view of
    # an earlier version would have the right numbers and the wrong place in the graph.
    version = platform.version(local)
    views = x.__dict__.setdefault("_varying_views", {})
    made_at, view = views.get(axes, (None, None))
    if made_at != version:
        view = _varying_view(x, local, axes)
        views[axes] = version, view
    return view


def forget_source(x: Any) -> None:
    """Let gradients of `x` come through `x` itself from now on, not past it to what it was gathered from.

    Whoever replaces the data of `x` calls it, and whoever looks at its gradient; see `observe_gradient`.
    """
    x.__dict__.pop("_redistributed_from", None)
    x.__dict__.pop("_varying_views", None)


def observe_gradient(x: Any) -> None:
    """Let the gradient of `x` be seen and changed where it passes, as hooks and `retain_grad` do.

    Raises:
        GradientPathError: `x` has been used already in a way whose gradient goes past it.
    """
    if shortcut_views(x):
        raise GradientPathError(
            f"a hook on {x.spec!r}, which was redistributed and then used differently per rank: that gradient goes "
            "straight to what it came from, and the hook would not see it. Register it before the first use."
        )
    forget_source(x)


def shortcut_views(x: Any) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return (axes, view) of the varying views of `x` as it is now whose gradients go past it, partial on `axes`."""
    source: Source | None = x.__dict__.get("_redistributed_from")
    if source is None:
        return []
    version = x._spec.mesh.platform.version(x)
    views = x.__dict__.get("_varying_views", {})
    return [
        (axes, view) for axes, (made_at, view) in views.items() if made_at == version and _has_shortcut(x, source, axes)
    ]


def with_shortcuts(x: Any, grad: Tensor | None, past: Sequence[tuple[tuple[int, ...], Tensor | None]]) -> Tensor | None:
    """Return the gradient (plain) of `x`: what came through it, plus what went past it by its `shortcut_views`.

    Args:
        grad: what came through `x`; None: nothing.
        past: (axes, gradient) of each shortcut view, to be summed over those axes.
    """
    mesh = x._spec.mesh
    for axes, part in past:
        if part is not None:
            summed = collectives.all_reduce(part, mesh.group_over(axes))
            grad = summed if grad is None else mesh.platform.ops.add(grad, summed)
    return grad


def _varying_view(x: Any, local: Tensor, axes: tuple[int, ...]) -> Tensor:
    mesh = x._spec.mesh
    source: Source | None = x.__dict__.get("_redistributed_from")
    if source is not None and _has_shortcut(x, source, axes):
        # The dual of S -> V is one reduce-scatter; through the gathered tensor it would be an all-reduce (the dual of
        # R -> V) and then a slice (that of S -> R): twice the bytes.
        return source.plan.run_varying(source.local, local, axes)
    return collectives.vary(local, [mesh.group_over(axes)])


def _has_shortcut(x: Any, source: Source, axes: tuple[int, ...]) -> bool:
    # A write to either end changes what the shortcut would leave out.
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
        saving_result(lambda t: plan.run_data(cast(t, given))),
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


def batch_redistribute(
    tensors: Iterable[Any],
    placements: Sequence[Placement] | Sequence[Sequence[Placement] | None] | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[Any]:
    """Redistribute many DTensors on their own meshes, with one collective where each would take its own.

    What tensors of one dtype on one device send in the same kind of collective over the same ranks goes together. The
    results, their gradients too, are those of `redistribute`, bit for bit where no sums are formed in another order;
    backward goes tensor by tensor. For many small tensors, of which each collective costs its latency: parameters of a
    model to be shown or saved, partial gradients.

    Args:
        placements: of all, by default replicated on every axis; or a list with those of each tensor (None: replicated).
        bucket_bytes: what is sent together at most, per rank. So much is copied to lie together, and held twice
            while it is under way; a tensor above it goes alone.

    Raises:
        TypeError: a single DTensor.
        MixedOperandsError: others than DTensors, by position.
        PlacementError: placements that do not fit, by position. Nothing has been communicated then.

    Example:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     tensors = [ones(4, device_mesh=mesh, placements=[Shard(0)]) for _ in range(10)]
        ...     with record_collectives() as log:
        ...         whole = batch_redistribute(tensors, [Replicate()])
        ...     return log.count(), {x.placements for x in whole}
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
        rank_checks.check_moved(x.spec, target)
    moved = iter(_moved_together([x for x, _ in moving], [target for _, target in moving], bucket_bytes))
    return [x if x.spec is target else next(moved) for x, target in zip(tensors, targets, strict=True)]


def _targets_of(tensors: Sequence[Any], placements: Any) -> list[TensorSpec]:
    each = [placements] * len(tensors) if _is_of_all(placements) else placements
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
    if problems:
        raise PlacementError("; ".join(problems))
    return targets


def _is_of_all(placements: Any) -> bool:
    return placements is None or isinstance(placements, Placement) or any(isinstance(p, Placement) for p in placements)


def _moved_together(tensors: Sequence[Any], targets: Sequence[TensorSpec], bucket_bytes: int) -> list[Any]:
    sources: list[TensorSpec] = [x.spec for x in tensors]
    locals_ = [source.mesh.platform.unwrap(x) for x, source in zip(tensors, sources, strict=True)]
    plans = [
        plan_between(source, target, source.mesh.platform.itemsize(source.dtype))
        for source, target in zip(sources, targets, strict=True)
    ]
    # A selection (max, min, product) needs its operands in backward, so it records itself; the others are sums and
    # copies, whose backward needs no values.
    together = [
        i
        for i, (plan, local) in enumerate(zip(plans, locals_, strict=True))
        if plan.steps and not plan.selects and not plan.is_elsewhere and not plan.source.mesh.platform.is_meta(local)
    ]
    data: dict[int, Tensor] = {}
    # In the order of the tensors, alike on all ranks, so that collectives meet.
    for platform in dict.fromkeys(plans[i].source.mesh.platform for i in together):
        mine = [i for i in together if plans[i].source.mesh.platform is platform]
        with platform.no_grad():
            given = [platform.detach(locals_[i]) for i in mine]
            data.update(zip(mine, run_data_together([plans[i] for i in mine], given, bucket_bytes), strict=True))
    results = []
    for i, (plan, local, target) in enumerate(zip(plans, locals_, targets, strict=True)):
        moved = plan.record(local, data[i]) if i in data else plan.run(local)
        results.append(remembering(local, plan, moved, target))
    return results
