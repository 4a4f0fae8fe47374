"""Making DTensors from plain tensors, and plain tensors from DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, get_current_mesh, require_mesh
from hp_dtensor.exceptions import (
    GradientPathError,
    MeshError,
    MixedOperandsError,
    PlacementError,
    ShardShapeError,
)
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute import plan_between
from hp_dtensor.spec import rank_checks
from hp_dtensor.spec.placements import Placement, RaggedShard, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec, grad_spec, normalize_placements
from hp_dtensor.tensor.base import DTensorBase
from hp_dtensor.tensor.gradients import gradient_placed, with_grad_plan
from hp_dtensor.tensor.redistribution import Placements, placements_on, redistribute, replicated_on

Tensor = Any


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Return a DTensor of a whole tensor. Follows torch's `distribute_tensor`.

    A leaf that requires a gradient gives a leaf that requires one, with a gradient of its own. With
    `src_data_rank=None` the result of another tensor passes its gradient on to that tensor.

    Args:
        tensor: the whole tensor, plain, on every rank. A DTensor that lies so already is returned as it is.
        device_mesh: default: the current one (`with mesh:`).
        placements: one per mesh axis, or alias names, one per tensor dimension; default: replicated on every axis.
        src_data_rank: mesh coordinate (on every axis) of the rank whose data counts; it is broadcast. None: every rank
            already has the same data, and nothing is communicated.

    Raises:
        PlacementError: placements that do not fit, or others than those of a DTensor (use `redistribute`).
        MeshError: another mesh than that of a DTensor.
        GradientPathError: a tensor computed from others, whose gradient a broadcast would cut off.
        RankMismatchError: ranks give tensors of other shapes, dtypes or placements, some of them leaves that require
            a gradient, or one of them has raised. Checked unless `src_data_rank` is None; then in `check_mode` only,
            and without gradients.

    Example:
        >>> def program():
        ...     whole = platform.ops.arange(5, platform.dtype("int64"))
        ...     x = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
        ...     return platform.to_numpy(x.to_local()).tolist()
        >>> run_ranks(program, 2)
        [[0, 1, 2], [3, 4]]
    """
    if isinstance(tensor, DTensorBase):
        return _distributed_already(tensor, device_mesh, placements)
    what = "distribute_tensor"
    mesh = require_mesh(what, device_mesh if device_mesh is not None else get_current_mesh())
    platform = mesh.platform
    is_sent = src_data_rank is not None and not (isinstance(tensor, platform.Tensor) and platform.is_meta(tensor))
    with rank_checks.telling_failure(mesh, what, exchanges=is_sent):
        device_mesh, chosen = _where(what, tensor, mesh, placements)
        target = TensorSpec(device_mesh, chosen, tuple(tensor.shape), tensor.dtype)
    if is_sent:
        # A broadcast of other sizes would hang, or give some ranks numbers that nobody has. Where gradients differ,
        # so would later backwards.
        rank_checks.require_same(what, target, f"{_gradient_kind(platform, tensor)}, {src_data_rank=}")
    else:
        rank_checks.check_created(what, target)
    if not platform.requires_grad(tensor):
        return _distributed(tensor, target, src_data_rank)
    if platform.is_leaf(tensor):
        with platform.no_grad():
            result = _distributed(platform.detach(tensor), target, src_data_rank)
        platform.set_requires_grad(result, True)
        return result
    if src_data_rank is not None and platform.is_grad_enabled():
        raise GradientPathError(
            f"distribute_tensor broadcasts the data of rank {src_data_rank}, and the gradient of a tensor that was "
            "computed from others would not come back through that; give x.detach(), or src_data_rank=None if every "
            "rank has computed the same"
        )
    return _distributed(tensor, target, src_data_rank)


def _gradient_kind(platform: Platform, tensor: Tensor) -> str:
    if not platform.requires_grad(tensor):
        return ""
    return ", a leaf that requires a gradient" if platform.is_leaf(tensor) else ", computed, requires a gradient"


def _distributed(tensor: Tensor, target: TensorSpec, src_data_rank: int | None) -> Any:
    """Return a plain tensor as `target`, with the data of one rank or of each."""
    mesh = target.mesh
    platform = mesh.platform
    if not platform.is_meta(tensor):
        tensor = _agreed(tensor, mesh, src_data_rank)
    whole = target.with_placements(replicated_on(mesh))
    if mesh.get_coordinate() is None:
        return platform.wrap(platform.empty((0,) * target.ndim, tensor.dtype), target)
    return platform.wrap(plan_between(whole, target, platform.itemsize(target.dtype)).run(tensor), target)


def _distributed_already(x: Any, device_mesh: DeviceMesh | None, placements: Placements | None) -> Any:
    """Return a DTensor given to `distribute_tensor`, which must lie as it is wanted."""
    spec: TensorSpec = x.spec
    if device_mesh is not None and require_mesh("distribute_tensor", device_mesh) != spec.mesh:
        raise MeshError(
            f"distribute_tensor: the tensor is a DTensor on mesh {spec.mesh.describe()} already, and another mesh "
            "was given; use its redistribute(device_mesh, placements)"
        )
    if placements is not None:
        wanted = spec.with_placements(placements_on("distribute_tensor", spec.mesh, placements, spec.ndim))
        if wanted is not spec:
            raise PlacementError(
                f"distribute_tensor: the tensor is a DTensor placed {spec.describe_placements()} already, not "
                f"{wanted.describe_placements()}; use its redistribute(placements=...)"
            )
    return x


def from_local(
    local: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: Placements | None = None,
) -> Any:
    """Return a DTensor whose shard on this rank is `local`; no tensor is communicated. Follows `DTensor.from_local`.

    Args:
        local: a plain tensor, which the result shares its memory and its graph with.
        device_mesh: default: the current one (`with mesh:`).
        placements: one per mesh axis, or alias names, one per tensor dimension; default: replicated.
        shape: the global shape; default: every rank's shard is as large as this one. Of uneven shards, ranks then
            believe in different shapes, and operations go wrong; `run_check` and `check_mode` find the true one.
        stride: the global strides (in elements), which must be those of `local`'s order in memory.
        grad_placements: placements to which the gradient is brought before it reaches `local`; default:
            what follows from `placements` (R -> R, S -> S, P -> R). Where `placements` cut, they cut alike.
        run_check: exchange shapes and fingerprints of values between all ranks of the mesh: without `shape` the
            global one is what all shards, also uneven ones, sum to, and replicas must be equal. Every rank
            must say the same. Always done in `check_mode`.

    Raises:
        PlacementError: placements that do not fit.
        ShardShapeError: `local` is not the shard that `placements` give for `shape`; with `run_check`, on every
            rank, naming those whose shards do not fit. Also `stride` without `shape`, or of another order in memory.
        RankMismatchError: with `run_check`: replicas or dtypes differ; names the ranks.

    Example:
        >>> def program():
        ...     mine = platform.from_numpy(np.full((2, 3), current_world(platform).rank, "float32"))
        ...     return tuple(from_local(mine, init_device_mesh("cpu", (2,)), [Shard(0)]).shape)
        >>> run_ranks(program, 2)[0]
        (4, 3)
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
    if stride is not None:
        _check_stride(spec, local, shape is not None, tuple(stride))
    if grad_placements is not None:
        wanted = gradient_placed("from_local", spec, grad_placements)
        local = with_grad_plan(platform, local, grad_spec(spec), wanted)
    return platform.wrap(local, spec)


def _check_stride(spec: TensorSpec, local: Tensor, has_shape: bool, stride: tuple[int, ...]) -> None:
    """Refuse global strides that are not those of the shard's order in memory, or that come without a shape."""
    if not has_shape:
        raise ShardShapeError(f"from_local: stride {list(stride)} goes with the global shape; pass shape= too")
    own = spec.strides(spec.mesh.platform.strides(local))
    counted = [i for i, size in enumerate(spec.shape) if size > 1]  # of one element, any stride will do
    if len(stride) != spec.ndim or (0 not in spec.shape and any(stride[i] != own[i] for i in counted)):
        raise ShardShapeError(
            f"from_local: a shard {list(local.shape)} of a tensor {list(spec.shape)} lies in memory with global "
            f"strides {list(own)}, got stride {list(stride)}; permute the shard, or leave stride out"
        )


def to_local(x: Any, grad_placements: Placements | None = None) -> Tensor:
    """Return the local shard of a DTensor as a plain tensor; see `DTensor.to_local`."""
    spec: TensorSpec = x.spec
    platform = spec.mesh.platform
    local = platform.unwrap(x)
    if grad_placements is None:
        return local
    comes = gradient_placed("to_local", spec, grad_placements)
    return with_grad_plan(platform, local, comes, grad_spec(spec))


def full_tensor(x: Any, grad_placements: Placements | None = None) -> Tensor:
    """Return the whole tensor, plain, on every rank; differentiable.

    Args:
        grad_placements: how the gradient that comes back is placed, as in `to_local`; default: replicated.

    Raises:
        MeshError: this rank is outside the mesh and would get nothing.

    Example:
        >>> def program():
        ...     x = ones(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     return tuple(full_tensor(x).shape)
        >>> run_ranks(program, 2)
        [(4,), (4,)]
    """
    mesh = x.spec.mesh
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"full_tensor: rank {mesh.world.rank} is outside mesh {mesh.describe()}, whose ranks hold {x.spec!r}; "
            "redistribute it to a mesh of all ranks that need it"
        )
    return to_local(redistribute(x), grad_placements)


def replicate_like(x: Tensor, reference: Any) -> Any:
    """Return `x` as a DTensor replicated on the mesh of `reference`, or unchanged where `reference` is plain.

    For constants in model code (masks, rotary tables, targets), which must be equal on all ranks.

    Example:
        >>> def program():
        ...     x = ones(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     scale = replicate_like(platform.from_numpy(np.arange(4, dtype="float32")), x)
        ...     return platform.ops.mul(x, scale).placements
        >>> run_ranks(program, 2)[0]
        (Shard(0),)
    """
    if not isinstance(reference, DTensorBase) or isinstance(x, DTensorBase):
        return x
    return from_local(x, reference.device_mesh, replicated_on(reference.device_mesh), shape=tuple(x.shape))


def local_of(platform: Platform, x: Tensor) -> Tensor:
    """Return the shard of a DTensor, which shares its memory, or a plain tensor as it is."""
    return platform.unwrap(x) if isinstance(x, DTensorBase) else x


def whole_of(x: Tensor) -> Tensor:
    """Return the whole tensor of a DTensor as `full_tensor` does, or a plain tensor as it is."""
    return full_tensor(x) if isinstance(x, DTensorBase) else x


def zeros_laid_out_as(platform: Platform, x: Tensor, dtype: Any = None) -> Tensor:
    """Return zeros of the shape and layout of `x`, such as an optimizer's state begins with.

    Args:
        dtype: the platform's; None: that of `x`.
    """
    dtype = x.dtype if dtype is None else dtype
    zeros = platform.zeros(platform.local_shape(x), dtype)
    return platform.wrap(zeros, x.spec.with_dtype(dtype)) if isinstance(x, DTensorBase) else zeros


def _where(
    what: str, tensor: Any, mesh: DeviceMesh | None, placements: Placements | None
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the mesh and placements that are meant, after checking that mesh and tensor are such."""
    mesh = require_mesh(what, mesh if mesh is not None else get_current_mesh())
    if not isinstance(tensor, mesh.platform.Tensor):
        raise MixedOperandsError(
            f"{what}: expected a tensor of platform {mesh.platform.name!r}, got {type(tensor).__name__}"
        )
    mesh.platform.check_dense(tensor)
    return mesh, placements_on(what, mesh, placements, len(tensor.shape))


def _agreed(tensor: Tensor, mesh: DeviceMesh, source: int | None) -> Tensor:
    """Return the values of `source`, or those that all ranks have already."""
    if source is None:
        if rank_checks.is_checking():
            rank_checks.check_replicated("distribute_tensor without src_data_rank", tensor, mesh)
        return tensor
    if mesh.get_coordinate() is None:
        return tensor
    platform = mesh.platform
    with platform.no_grad():
        tensor = platform.contiguous(platform.ops.clone(tensor))
        for axis in range(mesh.ndim):
            mesh.group_along(axis).broadcast(tensor, source)
    return tensor


def even_global_shape(local: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return the global shape where every rank's shard is `local`."""
    shape = list(local)
    for axis, placement in reversed(list(enumerate(placements))):
        if isinstance(placement, RaggedShard):
            shape[placement.dim] = sum(placement.units)
        elif isinstance(placement, (Shard, StridedShard)):
            shape[placement.dim] *= mesh.shape[axis]
    return tuple(shape)
