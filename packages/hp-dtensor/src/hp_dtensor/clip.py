"""Gradient clipping over any mix of layouts and meshes, with one reduction."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from hp_dtensor.dtensor import DTensor
from hp_dtensor.exceptions import MeshError
from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.platform import Platform
from hp_dtensor.selection import get_platform
from hp_dtensor.world import World, current_world

Tensor = Any


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    platform: Platform | None = None,
    copies_over: DeviceMesh | None = None,
) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before that.

    Every rank of the world calls it with its own shards. Plain parameters count as equal on all ranks, and a
    DTensor on a smaller mesh, such as `mesh["tp"]`, as one of equal ones that tile the world. One all-reduce of one
    number; no host synchronization.

    Args:
        norm_type: 2 or infinity.
        copies_over: the mesh (seen from this rank) of the ranks that have the same parameters, where others have
            different ones, such as the ranks of one pipeline stage; default: all ranks.

    Returns:
        The total norm, a plain 0-d float32 tensor, the same on every rank.

    Raises:
        MeshError: a parameter whose mesh does not tile those ranks, or that this rank is outside of.
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"clip_grad_norm_: norm_type must be 2 or inf, got {norm_type}")
    found = list(parameters)
    platform = platform if platform is not None else _platform_of(found)
    grads = [grad for parameter in found if (grad := platform.get_grad(parameter)) is not None]
    total = total_norm(grads, norm_type, platform, copies_over)
    factor = platform.ops.clamp(platform.ops.div(max_norm, platform.ops.add(total, 1e-6)), max=1.0)
    with platform.no_grad():
        platform.scale_([_local(platform, grad) for grad in grads], factor)
    return total


def total_norm(
    tensors: Iterable[Tensor], norm_type: float, platform: Platform, copies_over: DeviceMesh | None = None
) -> Tensor:
    """The joint norm of tensors of any layouts; see `clip_grad_norm_`."""
    ops, world = platform.ops, current_world(platform)
    holders = world.size if copies_over is None else copies_over.size()
    tensors = list(tensors)
    _check_tiling(tensors, holders, world)
    with platform.no_grad():
        if norm_type == math.inf:
            return _reduce(world, _largest(platform, tensors), "max")
        total = platform.zeros((), platform.dtype("float32"))
        for distinct, locals_ in _by_distinct_shards(platform, tensors).items():
            total = ops.add(total, ops.mul(platform.sum_of_squares(locals_), distinct / holders))
        return ops.sqrt(_reduce(world, total, "sum"))


def _check_tiling(tensors: Iterable[Tensor], holders: int, world: World) -> None:
    """Refuse meshes of which no number of equal ones makes up the ranks that have the same parameters."""
    meshes = dict.fromkeys(x.spec.mesh for x in tensors if isinstance(x, DTensor))
    problems = [
        f"{mesh.describe()}" + (" does not hold this rank" if mesh.get_coordinate() is None else "")
        for mesh in meshes
        if mesh.get_coordinate() is None or holders % mesh.size()
    ]
    if problems:
        raise MeshError(
            f"clip_grad_norm_ on rank {world.rank}: parameters lie on meshes of which copies cannot make up {holders} "
            f"ranks: {', '.join(problems)}. Pass a rank's own parameters only, and copies_over=, the mesh of the ranks "
            "that have the same ones."
        )


def _by_distinct_shards(platform: Platform, tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """Local shards by the number of different shards that exist: each is held by holders / number ranks."""
    groups: dict[int, list[Tensor]] = defaultdict(list)
    for x in tensors:
        distinct = x.spec.mesh.size() // x.spec.num_replicas() if isinstance(x, DTensor) else 1
        groups[distinct].append(_local(platform, x))
    return dict(groups)


def _largest(platform: Platform, tensors: Iterable[Tensor]) -> Tensor:
    ops = platform.ops
    largest = platform.zeros((), platform.dtype("float32"))
    for x in tensors:
        local = _local(platform, x)
        if math.prod(local.shape):
            peak = ops.amax(ops.reshape(ops.abs(local), (-1,)), 0)
            largest = ops.maximum(largest, ops.cast(peak, largest.dtype))
    return largest


def _reduce(world: World, x: Tensor, op: str) -> Tensor:
    world.all.all_reduce(x, op)
    return x


def _local(platform: Platform, x: Tensor) -> Tensor:
    return platform.unwrap(x) if isinstance(x, DTensor) else x


def _platform_of(parameters: list[Tensor]) -> Platform:
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            return parameter.spec.mesh.platform
    return get_platform()
