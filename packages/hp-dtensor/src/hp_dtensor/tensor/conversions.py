"""Making DTensors from plain tensors, and plain tensors from DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.comm.current_mesh import get_current_mesh
from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.exceptions import MeshError, MixedOperandsError, ShardShapeError
from hp_dtensor.redistribute import plan_between
from hp_dtensor.spec import rank_checks
from hp_dtensor.spec.placements import Placement, RaggedShard, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec, grad_spec, normalize_placements
from hp_dtensor.tensor.base import DTensorBase
from hp_dtensor.tensor.gradients import gradient_placed, with_grad_plan
from hp_dtensor.tensor.redistribution import placements_on, redistribute, replicated_on

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
        RankMismatchError: ranks give tensors of other shapes, dtypes or placements. Checked unless `source_rank` is
            None; then in `check_mode` only.
    """
    if isinstance(tensor, DTensorBase):
        raise MixedOperandsError("distribute_tensor takes a plain tensor, got a DTensor; use its redistribute()")
    device_mesh, chosen = _where("distribute_tensor", tensor, device_mesh, placements)
    platform = device_mesh.platform
    target = TensorSpec(device_mesh, chosen, tuple(tensor.shape), tensor.dtype)
    if platform.is_meta(tensor) or source_rank is None:
        rank_checks.check_created("distribute_tensor", target)
    else:
        # A broadcast of other sizes would hang, or give some ranks numbers that nobody has.
        rank_checks.require_same("distribute_tensor", target)
    if not platform.is_meta(tensor):
        tensor = _agreed(tensor, device_mesh, source_rank)
    whole = target.with_placements(replicated_on(device_mesh))
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
    if isinstance(local, DTensorBase):
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
        wanted = gradient_placed("from_local", spec, grad_placements)
        local = with_grad_plan(platform, local, grad_spec(spec), wanted)
    return platform.wrap(local, spec)


def to_local(x: Any, grad_placements: Sequence[Placement] | None = None) -> Tensor:
    """The local shard of a DTensor as a plain tensor; see `DTensor.to_local`."""
    spec: TensorSpec = x.spec
    platform = spec.mesh.platform
    local = platform.unwrap(x)
    if grad_placements is None:
        return local
    comes = gradient_placed("to_local", spec, grad_placements)
    return with_grad_plan(platform, local, comes, grad_spec(spec))


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
    if not isinstance(reference, DTensorBase) or isinstance(x, DTensorBase):
        return x
    return from_local(x, reference.device_mesh, replicated_on(reference.device_mesh), shape=tuple(x.shape))


def _where(
    what: str, tensor: Any, mesh: DeviceMesh | None, placements: Sequence[Placement] | None
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The mesh and placements that are meant, after checking that mesh and tensor are such."""
    mesh = require_mesh(what, mesh if mesh is not None else get_current_mesh())
    if not isinstance(tensor, mesh.platform.Tensor):
        raise MixedOperandsError(
            f"{what}: expected a tensor of platform {mesh.platform.name!r}, got {type(tensor).__name__}"
        )
    mesh.platform.check_dense(tensor)
    return mesh, placements_on(what, mesh, placements)


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
