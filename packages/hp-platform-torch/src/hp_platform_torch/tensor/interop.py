"""Conversions to and from torch's own DTensor and DeviceMesh, without copies, over the same process groups.

With them torch's tools work on our tensors. `torch.distributed.checkpoint` needs them for `async_save` only: `save` and
`load` take DTensors directly (`distributed_checkpoint.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import World
from hp_dtensor.exceptions import MeshError, PlacementError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec, has_gradient
from hp_dtensor.tensor import conversions
from hp_dtensor.tensor.dtensor import DTensor
from hp_platform_torch.comm.groups import FACTS, TorchGroup
from hp_platform_torch.comm.world import TorchWorld, torch_group
from hp_platform_torch.tensor.dtensor import unwrap

_torch_meshes: WeakKeyDictionary[World, dict[DeviceMesh, TorchMesh]] = WeakKeyDictionary()


# Tensors -------------------------------------------------------------------------------------------------


def to_torch_dtensor(x: Any) -> TorchDTensor:
    """Return `x` as torch's DTensor: the same memory, differentiable.

    Raises:
        PlacementError: ragged shards, which torch does not have; a partial avg, max, min or product with a gradient.
        MeshError: see `to_torch_mesh`.
    """
    if not isinstance(x, DTensor):
        raise TypeError(f"to_torch_dtensor takes a DTensor of hp_dtensor, got {type(x).__name__}")
    spec = x.spec
    _check_gradient("to_torch_dtensor", x, spec)
    placements = to_torch_placements(spec.placements)
    # Of a contiguous global tensor; those of the local shard say nothing about it.
    strides = list(itertools.accumulate(reversed(spec.shape[1:]), lambda a, b: a * b, initial=1))[::-1]
    return TorchDTensor.from_local(
        unwrap(x),  # type: ignore[arg-type]
        to_torch_mesh(spec.mesh),
        placements,
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=tuple(strides[: spec.ndim]),
    )


def from_torch_dtensor(x: TorchDTensor, platform: Platform | None = None) -> Any:
    """Return torch's DTensor as ours: the same memory, differentiable.

    Raises:
        PlacementError: placements of torch's that have no counterpart; a partial avg, max, min or product with a
            gradient.
        MeshError: see `from_torch_mesh`.
    """
    if not isinstance(x, TorchDTensor):
        raise TypeError(f"from_torch_dtensor takes a torch.distributed.tensor.DTensor, got {type(x).__name__}")
    placements = from_torch_placements(x.placements)
    mesh = from_torch_mesh(x.device_mesh, platform)
    _check_gradient("from_torch_dtensor", x, TensorSpec(mesh, placements, tuple(x.shape), x.dtype))
    return conversions.from_local(x.to_local(), mesh, placements, shape=tuple(x.shape))


def _check_gradient(what: str, x: torch.Tensor, spec: TensorSpec) -> None:
    """Raise for a gradient through a partial value with another reduction than a sum.

    Torch's gradient of a partial value is that of the reduced value, ours that of this rank's contribution. Only for
    sums they are equal.
    """
    if x.requires_grad and torch.is_grad_enabled() and not has_gradient(spec):
        placement = next(p for p in spec.placements if p.is_partial() and p != Partial())
        raise PlacementError(
            f"{what}: gradients of {placement!r} mean another thing in torch's DTensor; redistribute to "
            "Replicate() or Shard(dim) first, or convert x.detach()"
        )


def to_torch_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a (nested) state dict with its DTensors as torch's, over the same memory, and other values unchanged.

    Raises:
        PlacementError: ragged shards, which torch does not have.
    """
    return {name: _converted(value) for name, value in state.items()}


def _converted(value: Any) -> Any:
    if isinstance(value, DTensor):
        # Detached: a state dict must not refer to the autograd graph.
        return to_torch_dtensor(value.detach())
    if isinstance(value, Mapping):
        return to_torch_state_dict(value)
    return [_converted(item) for item in value] if type(value) is list else value


# Placements ----------------------------------------------------------------------------------------------


def to_torch_placements(placements: tuple[Placement, ...]) -> tuple[TorchPlacement, ...]:
    """Return our placements as torch's; a ragged shard with the lengths of even chunks is torch's `Shard`.

    Raises:
        PlacementError: other ragged shards.
    """
    return tuple(_to_torch(placement) for placement in placements)


def _to_torch(placement: Placement) -> TorchPlacement:
    match placement:
        case Replicate():
            return TorchReplicate()
        case Shard(dim):
            return TorchShard(dim)
        case Partial(op):
            return TorchPartial(op)
        case StridedShard(dim, split_factor):
            return TorchStridedShard(dim, split_factor=split_factor)
        case RaggedShard(dim, units) if placement.shard_ranges(sum(units), len(units)) == Shard(dim).shard_ranges(
            sum(units), len(units)
        ):
            return TorchShard(dim)
    raise PlacementError(
        f"torch's DTensor has no placement like {placement!r}; redistribute to Shard({getattr(placement, 'dim', 0)}) "
        "or Replicate() first"
    )


def from_torch_placements(placements: tuple[TorchPlacement, ...]) -> tuple[Placement, ...]:
    """Return torch's placements as ours.

    Raises:
        PlacementError: placements without a counterpart, such as those inside torch's own embedding.
    """
    return tuple(_from_torch(placement) for placement in placements)


def _from_torch(placement: TorchPlacement) -> Placement:
    # By exact class, since a subclass may mean another placement.
    kind = type(placement)
    if kind is TorchReplicate:
        return Replicate()
    if kind is TorchStridedShard:
        return StridedShard(placement.dim, placement.split_factor)  # type: ignore[attr-defined]
    if kind is TorchShard:
        return Shard(placement.dim)  # type: ignore[attr-defined]
    if kind is TorchPartial:
        return Partial(placement.reduce_op)  # type: ignore[attr-defined]
    raise PlacementError(f"hp_dtensor has no placement like torch's {placement!r}; redistribute it in torch first")


# Meshes --------------------------------------------------------------------------------------------------


def to_torch_mesh(mesh: DeviceMesh) -> TorchMesh:
    """Return `mesh` as torch's, over the same process groups; the same object each time.

    Raises:
        MeshError: the ranks are simulated or a single one, or this rank is outside the mesh.
    """
    world = mesh.world
    # A single rank that has not connected has no process group of torch either.
    if not isinstance(world, TorchWorld) or not dist.is_initialized():
        raise MeshError(
            f"torch's meshes need real ranks of torch.distributed, got {mesh.describe()} on {type(world).__name__}; "
            "connect first (hp_dtensor.init_process_group, torchrun)"
        )
    if mesh.get_coordinate() is None:
        raise MeshError(f"rank {world.rank} is outside mesh {mesh.describe()}; only its members can convert it")
    known = _torch_meshes.setdefault(world, {})
    if mesh not in known:
        groups = [torch_group(mesh.group_along(axis), mesh.device_type) for axis in range(mesh.ndim)]
        ranks = torch.tensor(mesh.ranks(), dtype=torch.int).view(mesh.shape)
        single = mesh.ndim == 1
        known[mesh] = TorchMesh.from_group(
            groups[0] if single else groups,
            mesh.device_type,
            ranks,
            mesh_dim_names=mesh.mesh_dim_names,
        )
    return known[mesh]


def from_torch_mesh(mesh: TorchMesh, platform: Platform | None = None) -> DeviceMesh:
    """Return torch's mesh as ours, over the same process groups.

    If the program has initialized torch.distributed itself, the platform joins that job first.

    Raises:
        MeshError: its ranks are in another order than those of its process groups, which torch sorts.
    """
    world = _joined(platform)
    ranks = mesh.mesh.flatten().tolist()
    ours = DeviceMesh(
        mesh.device_type, tuple(mesh.mesh.shape), mesh_dim_names=mesh.mesh_dim_names, ranks=ranks, world=world
    )
    for axis in range(ours.ndim):
        # Groups of one rank need no connection.
        if ours.get_coordinate() is not None and ours.shape[axis] > 1:
            _share(world, ours.ranks_along(axis), mesh.get_group(axis))
    return ours


def from_torch_group(group: dist.ProcessGroup, platform: Platform | None = None) -> ProcessGroup:
    """Return torch's process group as ours, with the same ranks and communicating through it.

    If the program has initialized torch.distributed itself, the platform joins that job first.

    Raises:
        MeshError: this rank is outside the group.
    """
    world = _joined(platform)
    ranks = tuple(dist.get_process_group_ranks(group))
    if world.rank not in ranks:
        raise MeshError(f"rank {world.rank} is outside torch's process group of ranks {list(ranks)}")
    if len(ranks) > 1:
        _share(world, ranks, group)
    return world.group(ranks)


def _joined(platform: Platform | None) -> World:
    """Return the platform's world, after joining the job if the program initialized torch.distributed itself."""
    platform = platform if platform is not None else get_platform("torch")
    world: World | None = platform.world
    return world if world is not None else platform.connect(dist.get_rank(), dist.get_world_size(), "")


def _share(world: World, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
    """Make `world` use torch's group for `ranks`, unless it has a group for them.

    Raises:
        MeshError: the group has the ranks in another order.
    """
    theirs = tuple(dist.get_process_group_ranks(group))
    if theirs != ranks:
        raise MeshError(
            f"torch's mesh has ranks {list(ranks)} along an axis and communicates in the order {list(theirs)}, which "
            "puts its shards in that order; make it with ascending ranks"
        )
    # A world has one group for each tuple of ranks.
    if ranks in world._groups:
        return
    assert isinstance(world, TorchWorld)

    def connect(device_type: str) -> Any:
        # Torch's group has no connection for host data, so this world opens one.
        return world.connect(ranks, FACTS) if device_type == FACTS else group._get_backend(torch.device(device_type))

    world._groups[ranks] = TorchGroup(ranks, ranks.index(world.rank), world.platform, connect, world.memory)
