"""Gradient clipping over any mix of layouts and meshes, with one reduction."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import World, current_world
from hp_dtensor.exceptions import MeshError, RankMismatchError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    platform: Platform | None = None,
    copies_over: DeviceMesh | None = None,
    not_counted: Iterable[Tensor] = (),
) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`, and return the norm before that.

    Every rank of the world calls it with its own shards. Plain parameters count as equal on all ranks, and a
    DTensor on a smaller mesh, such as `mesh["tp"]`, as one of equal ones that tile the world. One all-reduce of
    three numbers; no host synchronization on devices that have a queue.

    Args:
        norm_type: 2 or infinity.
        copies_over: the mesh (seen from this rank) of the ranks that have the same parameters, where others have
            different ones, such as the ranks of one pipeline stage; default: all ranks.
        not_counted: those of `parameters` that other ranks count, such as copies of tied weights; they are scaled too.

    Returns:
        The total norm, a plain 0-d float32 tensor, the same on every rank.

    Raises:
        MeshError: a parameter whose mesh does not tile those ranks, or that this rank is outside of.
        RankMismatchError: without `copies_over`, ranks have gradients of different shapes, so that each would
            count as copied to ranks that have it not. On devices with a queue the norm is NaN instead.

    Example:
        >>> def program():
        ...     weight = platform.Parameter(ones(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)]))
        ...     platform.backward(platform.ops.sum(weight))
        ...     return round(float(platform.to_numpy(clip_grad_norm_([weight], 1.0))), 4)
        >>> run_ranks(program, 2)  # of all four elements
        [2.0, 2.0]
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"clip_grad_norm_: norm_type must be 2 or inf, got {norm_type}")
    found = list(parameters)
    platform = platform if platform is not None else _platform_of(found)
    elsewhere = {id(parameter) for parameter in not_counted}
    pairs = [(id(p), grad) for p in found if (grad := platform.get_grad(p)) is not None]
    grads = [grad for _, grad in pairs]
    total = total_norm([grad for key, grad in pairs if key not in elsewhere], norm_type, platform, copies_over)
    factor = platform.ops.clamp(platform.ops.div(float(max_norm), platform.ops.add(total, 1e-6)), max=1.0)
    with platform.no_grad():
        platform.scale_([local_of(platform, grad) for grad in grads], factor)
    return total


def total_norm(
    tensors: Iterable[Tensor], norm_type: float, platform: Platform, copies_over: DeviceMesh | None = None
) -> Tensor:
    """Return the joint norm of tensors of any layouts; see `clip_grad_norm_`."""
    ops, world = platform.ops, current_world(platform)
    holders = world.size if copies_over is None else copies_over.size()
    tensors = list(tensors)
    _check_tiling(tensors, holders, world)
    with platform.no_grad():
        if norm_type == math.inf:
            return _reduce(platform, world, _largest(platform, tensors), "max", tensors, copies_over)
        total = platform.zeros((), platform.dtype("float32"))
        for distinct, locals_ in _by_distinct_shards(platform, tensors).items():
            total = ops.add(total, ops.mul(platform.sum_of_squares(locals_), distinct / holders))
        return ops.sqrt(_reduce(platform, world, total, "sum", tensors, copies_over))


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
    """Group local shards by the number of different shards that exist: each is held by holders / number ranks."""
    groups: dict[int, list[Tensor]] = defaultdict(list)
    for x in tensors:
        distinct = x.spec.mesh.size() // x.spec.num_replicas() if isinstance(x, DTensor) else 1
        groups[distinct].append(local_of(platform, x))
    return dict(groups)


def _largest(platform: Platform, tensors: Iterable[Tensor]) -> Tensor:
    ops = platform.ops
    largest = platform.zeros((), platform.dtype("float32"))
    for x in tensors:
        local = local_of(platform, x)
        if math.prod(local.shape):
            peak = ops.amax(ops.reshape(ops.abs(local), (-1,)), 0)
            largest = ops.maximum(largest, ops.cast(peak, largest.dtype))
    return largest


def _reduce(
    platform: Platform, world: World, x: Tensor, op: str, tensors: Sequence[Tensor], copies_over: DeviceMesh | None
) -> Tensor:
    """Return `x` reduced over all ranks, together with two numbers by which ranks know that they reduce the same."""
    mark = 0.0 if copies_over is not None else _mark(tensors, world.size)
    marks = (mark, -mark) if op == "max" else (mark, mark * mark)
    both = platform.ops.cat([platform.ops.reshape(x, (1,)), _on_device(platform, x, marks)], 0)
    world.all.all_reduce(both, op)
    total, first, second = (platform.ops.reshape(part, ()) for part in platform.ops.split(both, [1, 1, 1], 0))
    if op == "max":
        same = platform.ops.eq(first, platform.ops.neg(second))
    else:
        # The mean of the squares is the square of the mean where all are equal; whole numbers, so exact.
        same = platform.ops.eq(platform.ops.mul(second, float(world.size)), platform.ops.mul(first, first))
    if str(platform.device_of(both)).startswith("cpu") and not bool(platform.to_numpy(same)):
        raise RankMismatchError(
            f"clip_grad_norm_: rank {world.rank} has {len(tensors)} gradients whose number or shapes are not those of "
            "the other ranks. Where ranks hold different modules (pipeline stages), pass the mesh of those that hold "
            "the same ones as copies_over; otherwise give every rank the same parameters, and unused ones zeros"
        )
    return platform.ops.where(same, total, platform.ops.mul(total, math.nan))


def _on_device(platform: Platform, like: Tensor, values: Sequence[float]) -> Tensor:
    return platform.from_numpy(numpy.array(values, numpy.float32), platform.device_of(like))


def _mark(tensors: Sequence[Tensor], size: int) -> float:
    """Return a small whole number that depends on the tensors' global shapes and the sizes of their meshes.

    Sums of `size` of its squares are exact in float32.
    """
    # Hashes of tuples of integers are the same in every process.
    facts = tuple((tuple(x.shape), x.spec.mesh.shape if isinstance(x, DTensor) else ()) for x in tensors)
    return float(hash(facts) % max(2, math.isqrt((1 << 24) // size)))


def _platform_of(parameters: list[Tensor]) -> Platform:
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            return parameter.spec.mesh.platform
    return get_platform()
