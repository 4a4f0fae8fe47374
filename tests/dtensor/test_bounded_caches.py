"""Thousands of steps whose shapes change leave nothing behind: caches are bounded, and nothing else grows."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

from hp_dtensor import DeviceMesh, Partial, Replicate, Shard, distribute_tensor, spec
from hp_dtensor import dispatch as dispatching
from hp_dtensor.platform import Platform
from hp_dtensor.redistribute import planner
from hp_dtensor.testing import run_ranks

LIMIT = 16


def _caches() -> list[Any]:
    return [cached for cached in vars(planner).values() if hasattr(cached, "cache_info")]


def _steps(platform: Platform, weight: Any, mesh: DeviceMesh, first: int, count: int) -> None:
    ops = platform.ops
    for step in range(first, first + count):
        x = distribute_tensor(
            platform.from_numpy(np.ones((2 + step, 4), np.float32)), mesh, (Shard(0),), source_rank=None
        )
        y = ops.relu(ops.matmul(x, weight))
        platform.backward(ops.mean(y.redistribute(placements=(Replicate(),))).full_tensor())
        platform.set_grad(weight, None)


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    gc.collect()
    return {
        "plans of operations": len(dispatching._plans),
        "specs": len(spec._interned),
        "groups": len(mesh.world._groups),
    }


def _grown(platform: Platform) -> list[dict[str, int]]:
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("dp",), platform=platform)
    whole = platform.from_numpy(np.ones((4, 4), np.float32))
    weight = platform.Parameter(distribute_tensor(whole, mesh, (Replicate(),), source_rank=None))
    sizes = []
    for first in (0, 60, 120):
        _steps(platform, weight, mesh, first, 60)
        sizes.append(_sizes(mesh))
    _forget(platform)
    sizes.append(_sizes(mesh))
    return sizes


def test_caches_of_changing_shapes_are_bounded(hp_platform: Platform, monkeypatch) -> None:
    """With small limits, so that some hundred shapes pass them many times."""
    monkeypatch.setattr(dispatching, "CACHE_SIZE", LIMIT)
    _limit_platform(hp_platform, monkeypatch)
    _forget(hp_platform)
    for sizes in run_ranks(_grown, 2, hp_platform, hp_platform):
        for size in sizes:
            assert size["plans of operations"] <= LIMIT
            assert size["groups"] == sizes[0]["groups"]
        assert sizes[-1]["specs"] <= 40, "nothing but the bounded caches holds specs of past shapes"
        assert sizes[-1]["specs"] < sizes[0]["specs"] / 2
    _forget(hp_platform)


def _limit_platform(platform: Platform, monkeypatch) -> None:
    if platform.name == "torch":
        from hp_platform_torch import dtensor

        monkeypatch.setattr(dtensor, "CACHE_SIZE", LIMIT)


def _forget(platform: Platform) -> None:
    dispatching._plans.clear()
    for cached in _caches():
        cached.cache_clear()
    if platform.name == "torch":
        from hp_platform_torch import dtensor

        dtensor.forget_plans()


def test_every_cache_of_the_planner_has_a_limit() -> None:
    limits = {cached.__name__: cached.cache_info().maxsize for cached in _caches()}
    assert limits
    assert all(limit is not None for limit in limits.values()), limits


def _same_step(platform: Platform) -> tuple[int, int]:
    """Objects alive after 40 and after 140 equal steps."""
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("dp",), platform=platform)
    whole = platform.from_numpy(np.ones((4, 4), np.float32))
    weight = platform.Parameter(distribute_tensor(whole, mesh, (Replicate(),), source_rank=None))
    ops, alive = platform.ops, []
    for step in range(141):
        x = distribute_tensor(platform.from_numpy(np.ones((5, 4), np.float32)), mesh, (Shard(0),), source_rank=None)
        y = ops.sum(ops.matmul(ops.relu(ops.matmul(x, weight)), weight))
        assert y.placements == (Partial(),)
        platform.backward(y.full_tensor())
        platform.set_grad(weight, None)
        del x, y
        if step in (40, 140):
            gc.collect()
            alive.append(len(gc.get_objects()))
    return alive[0], alive[1]


def test_equal_steps_leave_no_objects_behind(hp_platform: Platform) -> None:
    for before, after in run_ranks(_same_step, 2, hp_platform, hp_platform):
        assert after - before < 20, "less than one object in five steps"
