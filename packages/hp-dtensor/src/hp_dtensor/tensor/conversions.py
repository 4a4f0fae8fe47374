"""Conversions: DTensors from plain tensors, and plain tensors from DTensors."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
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
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.redistribute import plan_between
from hp_dtensor.spec import rank_checks
from hp_dtensor.spec.placements import Placement, RaggedShard, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec, cached_by_spec, grad_spec, normalize_placements
from hp_dtensor.tensor.base import DTensorBase
from hp_dtensor.tensor.gradients import checked_grad_spec, with_redistributed_grad
from hp_dtensor.tensor.redistribution import Placements, placements_on, redistribute, replicated_on

Tensor = Any


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Return a DTensor with the values of a full tensor. Follows torch's `distribute_tensor`.

    The result for a leaf that requires a gradient is another leaf that requires one. With `src_data_rank=None` a tensor
    that is not a leaf gets its gradient through the result.

    Args:
        tensor: the full tensor, plain, on every rank. A DTensor that already has the placements is returned unchanged.
        device_mesh: default: the current one (`with mesh:`).
        placements: one per mesh axis, or alias names, one per tensor dimension; default: replicated on every axis.
        src_data_rank: mesh coordinate (on every axis) of the rank whose data is broadcast. None: every rank already has
            the same data, and nothing is communicated.

    Raises:
        PlacementError: placements that do not fit, or that differ from those of a DTensor (use `redistribute`).
        MeshError: another mesh than that of a DTensor.
        GradientPathError: a broadcast would detach a tensor that was computed from others.
        RankMismatchError: ranks pass different shapes, dtypes or placements, or require different gradients, or one of
            them has raised. Checked unless `src_data_rank` is None; then in `check_mode` only, and without gradients.

    Examples:
        >>> def program():
        ...     full = platform.ops.arange(5, platform.dtype("int64"))
        ...     x = distribute_tensor(full, init_device_mesh("cpu", (2,)), [Shard(0)])
        ...     return platform.to_numpy(x.to_local()).tolist()
        >>> run_ranks(program, 2)
        [[0, 1, 2], [3, 4]]
    """
    if isinstance(tensor, DTensorBase):
        return _check_distributed(tensor, device_mesh, placements)
    what = "distribute_tensor"
    mesh = require_mesh(what, device_mesh if device_mesh is not None else get_current_mesh())
    platform = mesh.platform
    is_broadcast = src_data_rank is not None and not (isinstance(tensor, platform.Tensor) and platform.is_meta(tensor))
    with rank_checks.reporting_failure(mesh, what, exchanges=is_broadcast or rank_checks.is_checking()):
        device_mesh, chosen = _mesh_and_placements(what, tensor, mesh, placements)
        target = TensorSpec(device_mesh, chosen, tuple(tensor.shape), tensor.dtype)
    if is_broadcast:
        # A broadcast between different sizes would hang, or return values that no rank has. If only some ranks required
        # a gradient, later backwards would communicate on some ranks only.
        kind = "a leaf that requires" if platform.is_leaf(tensor) else "computed, requires"
        gradient = f", {kind} a gradient" if platform.requires_grad(tensor) else ""
        rank_checks.require_same(what, target, f"{gradient}, {src_data_rank=}")
    else:
        rank_checks.check_created(what, target)
    if not platform.requires_grad(tensor):
        return _distributed(tensor, target, src_data_rank)
    if platform.is_leaf(tensor):
        # Another leaf and not a function of the tensor: an optimizer updates leaves.
        with platform.no_grad():
            result = _distributed(platform.detach(tensor), target, src_data_rank)
        platform.set_requires_grad(result, True)
        return result
    if src_data_rank is not None and platform.is_grad_enabled():
        raise GradientPathError(
            f"distribute_tensor broadcasts the data of rank {src_data_rank}, and the gradient of a tensor that was "
            "computed from others would not flow back through that; pass x.detach(), or src_data_rank=None if every "
            "rank has computed the same"
        )
    return _distributed(tensor, target, src_data_rank)


def _distributed(tensor: Tensor, target: TensorSpec, src_data_rank: int | None) -> Any:
    """Return a plain full tensor as `target`, after broadcasting the data of `src_data_rank`."""
    mesh = target.mesh
    platform = mesh.platform
    if not platform.is_meta(tensor):
        tensor = _broadcast(tensor, mesh, src_data_rank)
    replicated = target.with_placements(replicated_on(mesh))
    # A rank outside the mesh holds an empty tensor of the same number of dimensions. It has no data if none has any:
    # otherwise this rank alone would communicate in redistributions to other meshes.
    if mesh.get_coordinate() is None:
        device = platform.device_of(tensor) if platform.is_meta(tensor) else None
        return platform.wrap(platform.empty((0,) * target.ndim, tensor.dtype, device), target)
    # Every rank has the full tensor by now, so sharding it is a local slice.
    return platform.wrap(plan_between(replicated, target, platform.itemsize(target.dtype)).run(tensor), target)


def _check_distributed(x: Any, device_mesh: DeviceMesh | None, placements: Placements | None) -> Any:
    """Return a DTensor passed to `distribute_tensor`, after checking that it has the mesh and the placements."""
    spec: TensorSpec = x.spec
    if device_mesh is not None and require_mesh("distribute_tensor", device_mesh) != spec.mesh:
        raise MeshError(
            f"distribute_tensor: the tensor is a DTensor on mesh {spec.mesh.describe()} already, and another mesh "
            "was given; use its redistribute(device_mesh, placements)"
        )
    if placements is not None:
        wanted = spec.with_placements(placements_on("distribute_tensor", spec.mesh, placements, spec.ndim))
        # Specs are interned, so equal ones are the same object.
        if wanted is not spec:
            raise PlacementError(
                f"distribute_tensor: the tensor is a DTensor placed {spec.describe_placements()} already, not "
                f"{wanted.describe_placements()}; use its redistribute(placements=...)"
            )
    return x


def from_local(
    local_tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: Placements | None = None,
) -> Any:
    """Return a DTensor whose shard on this rank is `local_tensor`, without communication. Follows `DTensor.from_local`.

    Args:
        local_tensor: a plain tensor. The result shares its memory and its graph. A rank outside the mesh holds nothing
            of the result, whatever it passes, and a tensor with elements gets no gradient there, as in torch.
        device_mesh: default: the current one (`with mesh:`).
        placements: one per mesh axis, or alias names, one per tensor dimension; default: replicated.
        shape: the global shape. Default: computed as if every rank's shard had the shape of this one. With uneven
            shards ranks then assume different global shapes, and operations go wrong; pass `shape` or `run_check`.
        stride: the global strides (in elements). They must match the memory order of `local_tensor`.
        grad_placements: placements to which the gradient is redistributed before it reaches `local_tensor`. Default:
            those that follow from `placements` (R -> R, S -> S, P -> R). Sharded axes must be sharded alike. An axis
            with a replicated gradient and `Partial()` here is left as it is, as in torch: each rank gets its own copy.
        run_check: exchange shapes and fingerprints of values between all ranks of the mesh. Replicas must be equal and,
            without `shape`, the global shape is that of all shards, which may be uneven. Every rank must pass the same
            value. Always done in `check_mode`.

    Raises:
        PlacementError: placements that do not fit.
        ShardShapeError: `local_tensor` does not have the shape of this rank's shard; with `run_check` raised on every
            rank, naming those whose shards do not fit. Also `stride` without `shape`, or of another memory order.
        RankMismatchError: with `run_check`, if replicas or dtypes differ. Names the ranks.

    Examples:
        >>> def program():
        ...     mine = platform.from_numpy(np.full((2, 3), current_world(platform).rank, "float32"))
        ...     return tuple(from_local(mine, init_device_mesh("cpu", (2,)), [Shard(0)]).shape)
        >>> run_ranks(program, 2)[0]
        (4, 3)
    """
    local = local_tensor
    if not isinstance(device_mesh, DeviceMesh):
        device_mesh = require_mesh("from_local", device_mesh if device_mesh is not None else get_current_mesh())
    platform = device_mesh.platform
    if type(local) is not platform.Tensor:
        if isinstance(local, DTensorBase):
            raise MixedOperandsError("from_local takes a plain local tensor, got a DTensor")
        if not isinstance(local, platform.Tensor):
            raise _no_tensor("from_local", local, platform)
    platform.check_dense(local)
    # The shape of some frameworks' tensors is a list.
    local_shape = tuple(local.shape)
    # `spec_of_shard` reads and checks a tuple, once.
    if type(placements) is list or type(placements) is tuple:
        given: tuple[Any, ...] = tuple(placements)
    else:
        given = placements_on("from_local", device_mesh, placements, len(local_shape))
    global_shape = None if shape is None else integers("from_local", shape)
    # A collective: all ranks of the mesh make it or none. A rank outside the mesh has no shard to check.
    if (run_check or rank_checks.is_checking()) and device_mesh.get_coordinate() is not None:
        listed = placements_on("from_local", device_mesh, given, len(local_shape))
        placements = normalize_placements(device_mesh, listed, len(local_shape))
        global_shape = rank_checks.global_shape(local, device_mesh, placements, global_shape)
    try:
        spec = spec_of_shard(device_mesh, given, local_shape, local.dtype, global_shape)
    except TypeError:
        # What cannot be hashed is no placement; this names it.
        normalize_placements(device_mesh, placements_on("from_local", device_mesh, given), len(local_shape))
        raise
    if local_shape != spec.local_shape:  # only on a rank outside the mesh
        return platform.wrap(_nothing_like(platform, local), spec)
    if stride is not None:
        _check_stride(spec, local, global_shape is not None, tuple(stride))
    if grad_placements is not None:
        arriving, wanted = grad_spec(spec), checked_grad_spec("from_local", spec, grad_placements)
        # A replicated gradient is not turned into a partial one: code that asks for a partial gradient sums over the
        # ranks itself, and gets each rank's own gradient, as in torch.
        placed = [
            a if a.is_replicate() and w.is_partial() else w
            for a, w in zip(arriving.placements, wanted.placements, strict=True)
        ]
        local = with_redistributed_grad(platform, local, arriving, wanted.with_placements(placed))
    return platform.wrap(local, spec)


@cached_by_spec(maxsize=4096)
def spec_of_shard(
    mesh: DeviceMesh,
    placements: tuple[Any, ...],
    local_shape: tuple[int, ...],
    dtype: Any,
    shape: tuple[int, ...] | None,
) -> TensorSpec:
    """Return the spec of a tensor from its shard on this rank. Cached: programs convert the same shapes in each step.

    Args:
        placements: placements or alias names.
        shape: the global shape; None: that of equal shards.

    Raises:
        PlacementError: placements that do not fit.
        ShardShapeError: this rank's shard of such a tensor has another shape.
    """
    ndim = len(local_shape)
    placements = normalize_placements(mesh, placements_on("from_local", mesh, placements, ndim), ndim)
    global_shape = even_global_shape(local_shape, mesh, placements) if shape is None else shape
    spec = TensorSpec(mesh, placements, global_shape, dtype)
    if mesh.get_coordinate() is not None and local_shape != spec.local_shape:
        raise ShardShapeError(
            f"from_local: the shard on rank {mesh.world.rank} of a tensor {list(spec.shape)} placed "
            f"{spec.describe_placements()} must be {list(spec.local_shape)}, got {list(local_shape)}"
        )
    return spec


def integers(what: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape of Python's own integers: specs are cached by equality, and 2.0 equals 2.

    Raises:
        ShardShapeError: it is not a sequence of integers. The message starts with `what`.
    """
    try:
        return tuple(map(operator.index, shape))
    except TypeError as error:
        raise ShardShapeError(f"{what}: shape must be a sequence of integers, got {shape!r}") from error


def _nothing_like(platform: Platform, local: Tensor) -> Tensor:
    """Return the shard of a rank outside the mesh: no elements, and a gradient where `local` has one."""
    nothing = platform.empty((0,) * len(local.shape), local.dtype)
    if platform.requires_grad(local) and platform.is_grad_enabled():
        platform.set_requires_grad(nothing, True)
    return nothing


def _check_stride(spec: TensorSpec, local: Tensor, has_shape: bool, stride: tuple[int, ...]) -> None:
    """Check that global strides match the memory order of the shard, and that the global shape was passed too."""
    if not has_shape:
        raise ShardShapeError(f"from_local: stride {list(stride)} goes with the global shape; pass shape= too")
    own = spec.strides(spec.mesh.platform.strides(local))
    counted = [i for i, size in enumerate(spec.shape) if size > 1]  # the stride of one element is arbitrary
    if len(stride) != spec.ndim or (0 not in spec.shape and any(stride[i] != own[i] for i in counted)):
        raise ShardShapeError(
            f"from_local: a shard {list(local.shape)} of a tensor {list(spec.shape)} is stored with global "
            f"strides {list(own)}, got stride {list(stride)}; permute the shard, or leave stride out"
        )


def to_local(x: Any, grad_placements: Placements | None = None) -> Tensor:
    """Return the local shard of a DTensor as a plain tensor; differentiable.

    Args:
        grad_placements: the placements of the incoming gradient. Default: those that follow from the placements of the
            value (R -> R, S -> S, P -> R). Pass `Partial()` for a replicated tensor that each rank uses differently.

    Raises:
        PlacementError: the gradient would be sharded unlike the value.
    """
    spec: TensorSpec = x._spec
    platform = spec.mesh.platform
    local = platform.unwrap(x)
    if grad_placements is None:
        return local
    arriving = checked_grad_spec("to_local", spec, grad_placements)
    return with_redistributed_grad(platform, local, arriving, grad_spec(spec))


def full_tensor(x: Any, grad_placements: Placements | None = None) -> Tensor:
    """Return the full tensor, plain, on every rank; differentiable.

    Args:
        grad_placements: the placements of the incoming gradient, as in `to_local`; default: replicated.

    Raises:
        MeshError: this rank is outside the mesh.

    Examples:
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
    """Return `x` as a DTensor replicated on the mesh of `reference`, or unchanged if `reference` is plain.

    For constants in model code (masks, rotary tables, targets), which must be equal on all ranks.

    Examples:
        >>> def program():
        ...     x = ones(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     scale = replicate_like(platform.from_numpy(np.arange(4, dtype="float32")), x)
        ...     return platform.ops.mul(x, scale).placements
        >>> run_ranks(program, 2)[0]
        (Shard(0),)
    """
    # Model code runs on plain tensors too, and its constants then stay plain.
    if not isinstance(reference, DTensorBase) or isinstance(x, DTensorBase):
        return x
    return from_local(x, reference.device_mesh, replicated_on(reference.device_mesh), shape=tuple(x.shape))


def local_of(platform: Platform, x: Tensor) -> Tensor:
    """Return the local shard of a DTensor (sharing its memory), or a plain tensor unchanged."""
    return platform.unwrap(x) if isinstance(x, DTensorBase) else x


def to_full(x: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, or a plain tensor unchanged."""
    return full_tensor(x) if isinstance(x, DTensorBase) else x


def zeros_placed_like(platform: Platform, x: Tensor, dtype: Any = None) -> Tensor:
    """Return zeros with the shape and placements of `x`, such as the initial state of an optimizer.

    Args:
        dtype: a dtype of the platform; None: that of `x`.
    """
    dtype = x.dtype if dtype is None else dtype
    zeros = platform.zeros(platform.local_shape(x), dtype)
    return platform.wrap(zeros, x.spec.with_dtype(dtype)) if isinstance(x, DTensorBase) else zeros


def _mesh_and_placements(
    what: str, tensor: Any, mesh: DeviceMesh | None, placements: Placements | None
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return mesh and placements with defaults filled in, after checking mesh, tensor and placements."""
    mesh = require_mesh(what, mesh if mesh is not None else get_current_mesh())
    platform = mesh.platform
    if not isinstance(tensor, platform.Tensor):
        raise _no_tensor(what, tensor, platform)
    platform.check_dense(tensor)
    return mesh, placements_on(what, mesh, placements, tensor.ndim)


def _no_tensor(what: str, value: Any, platform: Platform) -> MixedOperandsError:
    kind = type(value).__name__
    return MixedOperandsError(f"{what}: expected a tensor of platform {platform.name!r}, got {kind}")


def _broadcast(tensor: Tensor, mesh: DeviceMesh, source: int | None) -> Tensor:
    """Return the values of rank `source`, or `tensor` if that is None and all ranks already have the same."""
    if source is None:
        if rank_checks.is_checking():
            rank_checks.check_replicated("distribute_tensor without src_data_rank", tensor, mesh)
        return tensor
    if mesh.get_coordinate() is None:
        return tensor
    platform = mesh.platform
    with platform.no_grad():
        # A broadcast writes its buffer, which must not be the tensor of the caller.
        tensor = platform.contiguous(platform.ops.clone(tensor))
        # Axis by axis: after the last one every rank has the data of the rank with coordinate `source` on all axes.
        for axis in range(mesh.ndim):
            mesh.group_along(axis).broadcast(tensor, source)
    return tensor


def even_global_shape(local: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return the global shape if every rank's shard has shape `local`."""
    shape = list(local)
    # From the innermost axis outwards: each axis multiplies what the ranks along it hold together.
    for axis, placement in reversed(list(enumerate(placements))):
        if isinstance(placement, RaggedShard):
            shape[placement.dim] = sum(placement.units)
        elif isinstance(placement, (Shard, StridedShard)):
            shape[placement.dim] *= mesh.shape[axis]
    return tuple(shape)


def platform_of(tensors: Iterable[Tensor]) -> Platform:
    """Return the platform of the first DTensor among the tensors, else the selected one."""
    for x in tensors:
        if isinstance(x, DTensorBase):
            return x.spec.mesh.platform
    return get_platform()
