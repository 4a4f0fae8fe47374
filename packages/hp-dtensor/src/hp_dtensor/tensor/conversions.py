"""Making, converting and redistributing DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm import collectives
from hp_dtensor.comm.current_mesh import get_current_mesh
from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.exceptions import GradientPathError, MeshError, MixedOperandsError, PlacementError, ShardShapeError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute import RedistributePlan, plan_across, plan_between
from hp_dtensor.redistribute.explicit import check_explicit
from hp_dtensor.spec import rank_checks
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec, grad_spec, has_gradient, normalize_placements, require_placements
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    source_rank: int | None = 0,
) -> Any:
    """A DTensor of a whole tensor.

    Args:
        tensor: the whole tensor, plain, on every rank.
        device_mesh: default: the current one (`with mesh:`).
        placements: default: replicated on every axis.
        source_rank: mesh coordinate (on every axis) whose data counts; it is broadcast. None: every rank
            already has the same data, and nothing is communicated.

    Raises:
        PlacementError: placements that do not fit.
        MixedOperandsError: `tensor` is a DTensor already (use `redistribute`).
    """
    if isinstance(tensor, DTensor):
        raise MixedOperandsError("distribute_tensor takes a plain tensor, got a DTensor; use its redistribute()")
    device_mesh, chosen = _where("distribute_tensor", tensor, device_mesh, placements)
    platform = device_mesh.platform
    target = TensorSpec(device_mesh, chosen, tuple(tensor.shape), tensor.dtype)
    rank_checks.check_created("distribute_tensor", target)
    if not platform.is_meta(tensor):
        tensor = _agreed(tensor, device_mesh, source_rank)
    whole = target.with_placements(_replicated(device_mesh))
    if device_mesh.get_coordinate() is None:
        return platform.wrap(platform.empty((0,) * target.ndim, tensor.dtype), target)
    return platform.wrap(plan_between(whole, target, platform.itemsize(target.dtype)).run(tensor), target)


def from_local(
    local: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    shape: Sequence[int] | None = None,
    grad_placements: Sequence[Placement] | None = None,
    run_check: bool = False,
) -> Any:
    """A DTensor whose shard on this rank is `local`; no tensor is communicated.

    Args:
        device_mesh: default: the current one (`with mesh:`).
        placements: default: replicated.
        shape: the global shape; default: every rank's shard is as large as this one.
        grad_placements: placements to which the gradient is brought before it reaches `local`; default:
            what follows from `placements` (R -> R, S -> S, P -> R). Where `placements` cut, they cut alike.
        run_check: exchange shapes and fingerprints of values between all ranks of the mesh: without `shape` the
            global one is what all shards, also uneven ones, sum to, and replicas must be equal. Every rank
            must say the same. Always done in `check_mode`.

    Raises:
        PlacementError: placements that do not fit.
        ShardShapeError: `local` is not the shard that `placements` give for `shape`; with `run_check`, on every
            rank, naming those whose shards do not fit.
        RankMismatchError: with `run_check`: replicas or dtypes differ; names the ranks.
    """
    if isinstance(local, DTensor):
        raise MixedOperandsError("from_local takes a plain local tensor, got a DTensor")
    device_mesh, given = _where("from_local", local, device_mesh, placements)
    platform = device_mesh.platform
    placements = normalize_placements(device_mesh, given, len(local.shape))
    if run_check or rank_checks.is_checking():
        shape = rank_checks.global_shape(local, device_mesh, placements, shape)
    global_shape = tuple(shape) if shape is not None else even_global_shape(local.shape, device_mesh, placements)
    spec = TensorSpec(device_mesh, placements, global_shape, local.dtype)
    if tuple(local.shape) != spec.local_shape:
        outside = device_mesh.get_coordinate() is None
        raise ShardShapeError(
            f"from_local: the shard on rank {device_mesh.world.rank} of a tensor {list(global_shape)} placed "
            f"{spec.describe_placements()} must be {list(spec.local_shape)}, got {list(local.shape)}"
            + (f"; this rank is outside mesh {device_mesh.describe()} and holds nothing of it" if outside else "")
        )
    if grad_placements is not None:
        wanted = _gradient_placed("from_local", spec, grad_placements)
        local = _with_grad_plan(platform, local, grad_spec(spec), wanted)
    return platform.wrap(local, spec)


def to_local(x: Any, grad_placements: Sequence[Placement] | None = None) -> Tensor:
    """The local shard of a DTensor as a plain tensor; see `DTensor.to_local`."""
    spec: TensorSpec = x.spec
    platform = spec.mesh.platform
    local = platform.unwrap(x)
    if grad_placements is None:
        return local
    comes = _gradient_placed("to_local", spec, grad_placements)
    return _with_grad_plan(platform, local, comes, grad_spec(spec))


def redistribute(
    x: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    async_op: bool = False,
) -> Any:
    """`x` with other placements, on its own or on another mesh of the same world; differentiable.

    To another mesh every rank of both makes the call, and its backward communicates between them too. A rank
    outside the mesh of `x` passes an empty `x`; one outside the other mesh gets an empty result.

    Args:
        placements: default: replicated on every axis.
        async_op: return a `PendingDTensor` whose `wait()` gives the result; `x` must not be written before.

    Raises:
        PlacementError: placements that do not fit, or a mesh of another world.
    """
    source: TensorSpec = x.spec
    mesh = device_mesh if device_mesh is not None else source.mesh
    require_mesh("redistribute", mesh)
    wanted = placements_on("redistribute", mesh, placements)
    target = TensorSpec(mesh, wanted, source.shape, source.dtype)
    if async_op:
        return _start_redistribute(x, target)
    return redistribute_to(x, target)


def redistribute_to(x: Any, target: TensorSpec) -> Any:
    """`x` as `target`, which has the same shape."""
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
        """The DTensor, once its communication is over; the same one every time."""
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
    """The result as a DTensor that knows what it came from, for gradients of uses that differ per rank."""
    platform = target.mesh.platform
    result = platform.wrap(moved, target)
    if platform.requires_grad(local):
        result._redistributed_from = _Source(local, plan, platform.version(local), platform.version(moved))
    return result


def full_tensor(x: Any) -> Tensor:
    """The whole tensor, plain, on every rank; differentiable.

    Raises:
        MeshError: this rank is outside the mesh and would get nothing.
    """
    mesh = x.spec.mesh
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"full_tensor: rank {mesh.world.rank} is outside mesh {mesh.describe()}, whose ranks hold {x.spec!r}; "
            "redistribute it to a mesh of all ranks that need it"
        )
    return to_local(redistribute(x))


def replicate_like(x: Tensor, reference: Any) -> Any:
    """`x` as a DTensor replicated on the mesh of `reference`, or unchanged where `reference` is plain.

    For constants in model code (masks, rotary tables, targets), which must be equal on all ranks.
    """
    if not isinstance(reference, DTensor) or isinstance(x, DTensor):
        return x
    return from_local(x, reference.device_mesh, _replicated(reference.device_mesh), shape=tuple(x.shape))


def vary(x: Any, axes: tuple[int, ...]) -> Tensor:
    """The varying view of `x` on `axes` as a plain local tensor: its gradient is summed over those axes.

    One view serves all users of `x`, until `x` is written in place; the view of something just gathered reduces
    straight to its source.
    """
    platform = x._spec.mesh.platform
    local = platform.unwrap(x)
    if not (platform.is_grad_enabled() and platform.requires_grad(local)):
        return local
    return recorded_view(x, local, axes)


def recorded_view(x: Any, local: Tensor, axes: tuple[int, ...]) -> Tensor:
    """`vary` where operations on `x`, whose local data is `local`, are recorded."""
    platform = x._spec.mesh.platform
    if platform.is_leaf(x):
        return _varying_view(x, local, axes)
    version = platform.version(local)
    views = x.__dict__.setdefault("_varying_views", {})
    made_at, view = views.get(axes, (None, None))
    if made_at != version:
        view = _varying_view(x, local, axes)
        views[axes] = version, view
    return view


def forget_source(x: Any) -> None:
    """From now on gradients of `x` come through `x` itself, not past it to what it was gathered from.

    For whoever replaces the data of `x`; see `observe_gradient`.
    """
    x.__dict__.pop("_redistributed_from", None)
    x.__dict__.pop("_varying_views", None)


def observe_gradient(x: Any) -> None:
    """`forget_source` for whoever wants to see or change the gradient of `x`: hooks, `retain_grad`.

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
    """(axes, view) of the varying views of `x` as it is now whose gradients go past it, and are partial there."""
    source: _Source | None = x.__dict__.get("_redistributed_from")
    if source is None:
        return []
    version = x._spec.mesh.platform.version(x)
    views = x.__dict__.get("_varying_views", {})
    return [
        (axes, view) for axes, (made_at, view) in views.items() if made_at == version and _has_shortcut(x, source, axes)
    ]


def with_shortcuts(x: Any, grad: Tensor | None, past: Sequence[tuple[tuple[int, ...], Tensor | None]]) -> Tensor | None:
    """The gradient (plain) of `x` from that which came through it and those of its `shortcut_views`."""
    mesh = x._spec.mesh
    for axes, part in past:
        if part is not None:
            summed = collectives.all_reduce(part, mesh.group_over(axes))
            grad = summed if grad is None else mesh.platform.ops.add(grad, summed)
    return grad


@dataclass(frozen=True, slots=True)
class _Source:
    """What a DTensor was redistributed from, by which plan, and the versions of both when that happened."""

    local: Tensor
    plan: RedistributePlan
    version: int
    result_version: int


def _varying_view(x: Any, local: Tensor, axes: tuple[int, ...]) -> Tensor:
    mesh = x._spec.mesh
    source: _Source | None = x.__dict__.get("_redistributed_from")
    if source is not None and _has_shortcut(x, source, axes):
        return source.plan.run_varying(source.local, local, axes)
    return collectives.vary(local, [mesh.group_over(axes)])


def _has_shortcut(x: Any, source: _Source, axes: tuple[int, ...]) -> bool:
    version = x._spec.mesh.platform.version
    return (
        source.plan.varies_cheaply(axes)
        and source.result_version == version(x)
        and source.version == version(source.local)
    )


def check_hook(x: Any) -> None:
    """`observe_gradient` for a hook that is to be called with the gradient of `x`.

    Raises:
        GradientPathError: also where autograd does not have that gradient.
    """
    if x._gradient_from:
        raise GradientPathError(
            f"register_hook of {x.spec!r}: {x._gradient_from} sets its gradient at the end of backward, and autograd "
            "has none. Read or change grad after it; torch calls what register_post_accumulate_grad_hook is given then"
        )
    observe_gradient(x)


def lost_hooks(platform: Platform, name: str, parameter: Tensor) -> str | None:
    """Why another parameter cannot take the place of this one: its hooks would be lost. None: it has none."""
    if not platform.has_gradient_hooks(parameter):
        return None
    return f"{name} has hooks for its gradient, which the DTensor in its place would not call; register them afterwards"


def check_reached(what: str, weights: Sequence[Any]) -> None:
    """Every one of these gets its gradient from autograd itself.

    Raises:
        GradientPathError: some do not: those of `fully_shard`, which are not what the forward computes with.
    """
    sources = [x._gradient_from for x in weights if isinstance(x, DTensor) and x._gradient_from]
    if sources:
        raise GradientPathError(
            f"{what}: {len(sources)} of {len(weights)} weights get their gradients from {sources[0]} in a backward; "
            "autograd finds none. Run the backward of the loss (platform.backward(loss)), then read weight.grad"
        )


def as_replicated(spec: TensorSpec, grad: Tensor) -> Tensor:
    """The gradient (plain) of a value of `spec` as that of the whole, through which a second derivative goes once.

    Every rank has that of its own contribution to a sum, and what goes back through it is added up over the ranks.
    """
    axes = _summed_axes(spec, grad)
    if not axes:
        return grad
    platform = spec.mesh.platform
    is_first = spec.mesh.group_over(axes).rank == 0
    return platform.linear_map(grad, lambda t: t, lambda g: g if is_first else platform.ops.zeros_like(g))


def as_contributed(spec: TensorSpec, grad: Tensor) -> Tensor:
    """A gradient (plain) of the whole as that of every rank's contribution to it: the dual of `as_replicated`."""
    axes = _summed_axes(spec, grad)
    return collectives.vary(grad, [spec.mesh.group_over(axes)]) if axes else grad


def _summed_axes(spec: TensorSpec, grad: Tensor) -> tuple[int, ...]:
    """The axes over which a value of `spec` is a sum of several, if its gradient is recorded."""
    mesh = spec.mesh
    if mesh.get_coordinate() is None or not mesh.platform.requires_grad(grad):
        return ()
    return tuple(axis for axis, p in enumerate(spec.placements) if p == Partial() and mesh.shape[axis] > 1)


def _gradient_placed(what: str, spec: TensorSpec, grad_placements: Sequence[Placement]) -> TensorSpec:
    """The spec of a gradient of local shards of `spec`, which must have their shape on every rank."""
    wanted = spec.with_placements(placements_on(what, spec.mesh, grad_placements))
    for size, placement, value in zip(spec.mesh.shape, wanted.placements, spec.placements, strict=True):
        if size > 1 and placement != value and (placement.is_shard() or value.is_shard()):
            raise PlacementError(
                f"{what}: grad_placements {wanted.describe_placements()} of shards {spec.describe_placements()}: a "
                "gradient is cut where its shard is, and in the same way; elsewhere it is Replicate() or Partial()"
            )
    return wanted


def differentiated(output: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """An output and its gradient, either of which may be a DTensor, as the plain local tensors that drive a backward.

    Raises:
        PlacementError: a gradient of another shape, or a plain one that is not the local part of the output's.
    """
    if not isinstance(output, DTensor):
        return output, gradient.spec.mesh.platform.unwrap(gradient) if isinstance(gradient, DTensor) else gradient
    spec, platform = output.spec, output.spec.mesh.platform
    wanted = grad_spec(spec)
    if gradient is not None and gradient.shape != (
        wanted.shape if isinstance(gradient, DTensor) else wanted.local_shape
    ):
        raise PlacementError(
            f"backward from {spec!r}: expected a gradient {list(wanted.shape)}, or as a plain tensor this rank's part "
            f"of it, {list(wanted.local_shape)}; got {list(gradient.shape)}"
        )
    if isinstance(gradient, DTensor):
        check_explicit("backward", ("gradient",), gradient.spec, wanted)
        gradient = platform.unwrap(redistribute(gradient, wanted.mesh, wanted.placements))
    with platform.enable_grad():  # reentrant checkpoints drive a backward from within a backward
        if not has_gradient(spec):
            # Only of a sum every contribution has the gradient of the whole.
            check_explicit("backward", (), spec, wanted)
            output = redistribute(output, wanted.mesh, wanted.placements)
        elif gradient is not None:
            gradient = as_contributed(spec, gradient)
        return platform.unwrap(output), gradient


def _with_grad_plan(platform: Any, local: Tensor, comes: TensorSpec, wanted: TensorSpec) -> Tensor:
    """`local` whose gradient, arriving as `comes`, is redistributed to `wanted`."""
    if comes is wanted:
        return local
    plan = plan_between(comes, wanted, platform.itemsize(comes.dtype))
    return platform.linear_map(local, lambda t: t, plan.run)


def _where(
    what: str, tensor: Any, mesh: DeviceMesh | None, placements: Sequence[Placement] | None
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The mesh and placements that are meant, after checking that mesh and tensor are such."""
    mesh = mesh if mesh is not None else get_current_mesh()
    require_mesh(what, mesh)
    if not isinstance(tensor, mesh.platform.Tensor):
        raise MixedOperandsError(
            f"{what}: expected a tensor of platform {mesh.platform.name!r}, got {type(tensor).__name__}"
        )
    mesh.platform.check_dense(tensor)
    return mesh, placements_on(what, mesh, placements)


def placements_on(what: str, mesh: DeviceMesh, placements: Sequence[Placement] | None) -> tuple[Placement, ...]:
    """The placements given, by default replicated ones.

    Raises:
        PlacementError: a single placement, or something else that is no sequence.
    """
    if placements is None:
        return _replicated(mesh)
    return require_placements(what, mesh, placements)


def _replicated(mesh: DeviceMesh) -> tuple[Placement, ...]:
    return (Replicate(),) * mesh.ndim


def _agreed(tensor: Tensor, mesh: DeviceMesh, source: int | None) -> Tensor:
    """The values of `source`, or those that all ranks have already."""
    if source is None:
        if rank_checks.is_checking():
            rank_checks.check_replicated("distribute_tensor without source_rank", tensor, mesh)
        return tensor
    if mesh.get_coordinate() is None:
        return tensor
    platform = mesh.platform
    with platform.no_grad():
        tensor = platform.contiguous(platform.ops.clone(tensor))
        for axis in range(mesh.ndim):
            mesh.get_group(axis).broadcast(tensor, source)
    return tensor


def even_global_shape(local: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """The global shape where every rank's shard is `local`."""
    shape = list(local)
    for axis, placement in reversed(list(enumerate(placements))):
        if isinstance(placement, RaggedShard):
            shape[placement.dim] = sum(placement.units)
        elif isinstance(placement, (Shard, StridedShard)):
            shape[placement.dim] *= mesh.shape[axis]
    return tuple(shape)
