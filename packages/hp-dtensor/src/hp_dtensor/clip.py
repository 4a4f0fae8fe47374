"""Gradient clipping over any mix of layouts and meshes, with one reduction."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from hp_dtensor.dtensor import DTensor
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
) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before that.

    Every rank of the world calls it with its own shards. Plain parameters count as replicated on all ranks,
    DTensors as replicated on the ranks outside their mesh. One all-reduce of one number; no host
    synchronization.

    Args:
        norm_type: 2 or infinity.

    Returns:
        The total norm, a plain 0-d float32 tensor, the same on every rank.
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"clip_grad_norm_: norm_type must be 2 or inf, got {norm_type}")
    found = list(parameters)
    platform = platform if platform is not None else _platform_of(found)
    grads = [grad for parameter in found if (grad := platform.get_grad(parameter)) is not None]
    total = total_norm(grads, norm_type, platform)
    factor = platform.ops.clamp(platform.ops.div(max_norm, platform.ops.add(total, 1e-6)), max=1.0)
    with platform.no_grad():
        platform.scale_([_local(platform, grad) for grad in grads], factor)
    return total


def total_norm(tensors: Iterable[Tensor], norm_type: float, platform: Platform) -> Tensor:
    """The joint norm of tensors of any layouts; see `clip_grad_norm_`."""
    ops, world = platform.ops, current_world(platform)
    with platform.no_grad():
        if norm_type == math.inf:
            return _reduce(world, _largest(platform, tensors), "max")
        total = platform.zeros((), platform.dtype("float32"))
        for distinct, locals_ in _by_distinct_shards(platform, tensors).items():
            total = ops.add(total, ops.mul(platform.sum_of_squares(locals_), distinct / world.size))
        return ops.sqrt(_reduce(world, total, "sum"))


def _by_distinct_shards(platform: Platform, tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """Local shards by the number of different shards that exist: each is held by world size / number ranks."""
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
