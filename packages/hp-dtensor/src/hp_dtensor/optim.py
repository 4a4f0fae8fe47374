"""Gradient clipping by the total norm of parameters with any placements, and the public path of the optimizer Muon.

Clipping sums over all shards, each counted once, in one reduction for all meshes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import World, current_world
from hp_dtensor.exceptions import MeshError, RankMismatchError
from hp_dtensor.muon import Muon as Muon
from hp_dtensor.muon import MuonOptions as MuonOptions
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of, platform_of
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
    """Scale all gradients so that their total norm is at most `max_norm`, and return the norm before scaling.

    Every rank of the world makes the call with its own shards. Plain parameters count as equal on all ranks. A DTensor
    on a smaller mesh, such as `mesh["tp"]`, counts as replicated on the other meshes of this size. Communicates three
    numbers in one all-reduce, and does not synchronize the device with the host.

    Args:
        norm_type: 2 or infinity.
        platform: default: that of a DTensor among the parameters, else the selected one.
        copies_over: the mesh of the ranks that hold the same parameters as this rank, such as the ranks of its pipeline
            stage; default: all ranks.
        not_counted: those of `parameters` that other ranks count, such as copies of tied weights. They are scaled too.

    Returns:
        The total norm, a plain 0-d float32 tensor, equal on every rank.

    Raises:
        MeshError: the size of a parameter's mesh does not divide the number of ranks with the same parameters, or this
            rank is outside that mesh.
        RankMismatchError: without `copies_over`, ranks have gradients of different shapes, which would be counted
            wrongly. On an asynchronous device the norm is NaN instead, because reading the result would synchronize.

    Examples:
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
    platform = platform if platform is not None else platform_of(found)
    # By identity: `==` compares the elements of tensors.
    excluded = {id(parameter) for parameter in not_counted}
    pairs = [(id(p), grad) for p in found if (grad := platform.get_grad(p)) is not None]
    grads = [grad for _, grad in pairs]
    total = total_norm([grad for key, grad in pairs if key not in excluded], norm_type, platform, copies_over)
    # Gradients are scaled by 1 too: to skip it, the host would have to wait for the norm. 1e-6 as in torch.
    factor = platform.ops.clamp(platform.ops.div(float(max_norm), platform.ops.add(total, 1e-6)), max=1.0)
    with platform.no_grad():
        platform.scale_([local_of(platform, grad) for grad in grads], factor)
    return total


def total_norm(
    tensors: Iterable[Tensor], norm_type: float, platform: Platform, copies_over: DeviceMesh | None = None
) -> Tensor:
    """Return the total norm of tensors with any placements; see `clip_grad_norm_`."""
    ops, world = platform.ops, current_world(platform)
    holders = world.size if copies_over is None else copies_over.size()
    tensors = list(tensors)
    _check_tiling(tensors, holders, world)
    with platform.no_grad():
        if norm_type == math.inf:
            return _reduce(platform, world, _largest(platform, tensors), "max", tensors, copies_over)
        total = platform.zeros((), platform.dtype("float32"))
        groups: dict[int, list[Tensor]] = defaultdict(list)
        for x in tensors:
            distinct = x.spec.mesh.size() // x.spec.num_replicas() if isinstance(x, DTensor) else 1
            groups[distinct].append(local_of(platform, x))
        for distinct, locals_ in groups.items():
            # The reduction below sums every shard once per replica; this factor makes it count once.
            total = ops.add(total, ops.mul(platform.sum_of_squares(locals_), distinct / holders))
        return ops.sqrt(_reduce(platform, world, total, "sum", tensors, copies_over))


def _check_tiling(tensors: Iterable[Tensor], holders: int, world: World) -> None:
    """Check that the size of each mesh divides `holders`, the number of ranks with the same parameters."""
    meshes = dict.fromkeys(x.spec.mesh for x in tensors if isinstance(x, DTensor))
    problems = [
        f"{mesh.describe()}" + (" does not hold this rank" if mesh.get_coordinate() is None else "")
        for mesh in meshes
        if mesh.get_coordinate() is None or holders % mesh.size()
    ]
    if problems:
        raise MeshError(
            f"clip_grad_norm_ on rank {world.rank}: parameters are on meshes whose sizes do not divide {holders} "
            f"ranks: {', '.join(problems)}. Pass this rank's own parameters only, and the mesh of the ranks with the "
            "same parameters as copies_over."
        )


def _largest(platform: Platform, tensors: Iterable[Tensor]) -> Tensor:
    """Return the largest absolute value of this rank's shards, a 0-d float32 tensor; 0 without elements."""
    ops = platform.ops
    largest = platform.zeros((), platform.dtype("float32"))
    for x in tensors:
        local = local_of(platform, x)
        # An empty shard has no maximum.
        if math.prod(local.shape):
            peak = ops.amax(ops.reshape(ops.abs(local), (-1,)), 0)
            largest = ops.maximum(largest, ops.cast(peak, largest.dtype))
    return largest


def _reduce(
    platform: Platform, world: World, x: Tensor, op: str, tensors: Sequence[Tensor], copies_over: DeviceMesh | None
) -> Tensor:
    """Return the 0-d `x` reduced over all ranks by `op`, after checking that all have `tensors` of the same shapes.

    The check takes two more numbers in the same all-reduce: each rank adds a hash of its shapes. With `copies_over`
    shapes may differ, and are not checked.
    """
    code = 0.0 if copies_over is not None else _shape_code(tensors, world.size)
    # The maximum of codes and that of their negatives, the minimum, are opposite only if all codes are equal.
    codes = (code, -code) if op == "max" else (code, code * code)
    on_device = platform.from_numpy(numpy.array(codes, numpy.float32), platform.device_of(x))
    packed = platform.ops.cat([platform.ops.reshape(x, (1,)), on_device], 0)
    world.all.all_reduce(packed, op)
    total, first, second = (platform.ops.reshape(each, ()) for each in platform.ops.split(packed, [1, 1, 1], 0))
    if op == "max":
        same = platform.ops.eq(first, platform.ops.neg(second))
    else:
        # The mean of the squares equals the square of the mean only if all codes are equal. Both sums are exact, and
        # for equal codes both products round the same integer.
        same = platform.ops.eq(platform.ops.mul(second, float(world.size)), platform.ops.mul(first, first))
    if str(platform.device_of(packed)).startswith("cpu") and not bool(platform.to_numpy(same)):
        raise RankMismatchError(
            f"clip_grad_norm_: rank {world.rank} has {len(tensors)} gradients whose number or shapes differ from "
            "the other ranks. If ranks hold different modules (pipeline stages), pass the mesh of the ranks with the "
            "same ones as copies_over; otherwise pass the same parameters on every rank, with zeros for unused ones"
        )
    return platform.ops.where(same, total, platform.ops.mul(total, math.nan))


def _shape_code(tensors: Sequence[Tensor], size: int) -> float:
    """Return an integer of the tensors' shapes and meshes, small enough that float32 sums its squares exactly."""
    # Unlike those of strings, hashes of tuples of integers are equal in all processes.
    facts = tuple((tuple(x.shape), x.spec.mesh.shape if isinstance(x, DTensor) else ()) for x in tensors)
    return float(hash(facts) % max(2, math.isqrt((1 << 24) // size)))
