"""Thousands of steps whose shapes change leave nothing behind: caches are bounded, and nothing else grows."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor, local_map
from hp_dtensor.dispatch import operation
from hp_dtensor.muon import at_owners
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute import planner
from hp_dtensor.spec import tensor_spec as spec
from hp_dtensor.tensor.conversions import spec_of_shard
from hp_dtensor.testing import run_ranks

LIMIT = 16


def _caches() -> list[Any]:
    return [cached for cached in vars(planner).values() if hasattr(cached, "cache_info")]


def _steps(platform: Platform, weight: Any, mesh: DeviceMesh, first: int, count: int) -> None:
    ops = platform.ops
    for step in range(first, first + count):
        x = distribute_tensor(
            platform.from_numpy(np.ones((2 + step, 4), np.float32)), mesh, (Shard(0),), src_data_rank=None
        )
        y = ops.relu(ops.matmul(x, weight))
        platform.backward(ops.mean(y.redistribute(placements=(Replicate(),))).full_tensor())
        platform.set_grad(weight, None)


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Entries of the caches; specs those of this world, since tensors of earlier tests may be alive."""
    gc.collect()
    return {
        "plans of operations": max(map(len, operation._plans.values()), default=0),
        "specs": sum(known.mesh.world is mesh.world for known in list(spec._interned.values())),
        "groups": len(mesh.world._groups),
    }


def _grown(platform: Platform) -> list[dict[str, int]]:
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("dp",), platform=platform)
    full = platform.from_numpy(np.ones((4, 4), np.float32))
    weight = platform.Parameter(distribute_tensor(full, mesh, (Replicate(),), src_data_rank=None))
    sizes = []
    for first in (0, 60, 120):
        _steps(platform, weight, mesh, first, 60)
        sizes.append(_sizes(mesh))
    _forget(platform)
    sizes.append(_sizes(mesh))
    return sizes


@pytest.mark.usefixtures("torch_suffices")
def test_caches_of_changing_shapes_are_bounded(hp_platform: Platform, monkeypatch) -> None:
    """With small limits, so that some hundred shapes pass them many times."""
    monkeypatch.setattr(operation, "CACHE_SIZE", LIMIT)
    _forget(hp_platform)
    for sizes in run_ranks(_grown, 2, hp_platform, hp_platform):
        for size in sizes:
            assert size["plans of operations"] <= LIMIT
            assert size["groups"] == sizes[0]["groups"]
        assert sizes[-1]["specs"] <= 20, "nothing but the bounded caches holds specs of past shapes"
        assert sizes[-1]["specs"] < sizes[0]["specs"] / 2
    _forget(hp_platform)


def _forget(platform: Platform) -> None:
    operation.forget_plans()
    for cached in _caches():
        cached.cache_clear()


def _converted(platform: Platform) -> list[tuple[int, ...]]:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    shards = [platform.from_numpy(np.ones((rows, 4), np.float32)) for rows in (2, 3, 2)]
    return [tuple(DTensor.from_local(shard, mesh, (Shard(0),)).shape) for shard in shards]


@pytest.mark.usefixtures("torch_suffices")
def test_specs_of_converted_shards_are_looked_up_and_forgotten(hp_platform: Platform) -> None:
    operation.forget_plans()
    assert run_ranks(_converted, 2, hp_platform, hp_platform) == [[(4, 4), (6, 4), (4, 4)]] * 2
    found = spec_of_shard.cache_info()
    assert (found.hits, found.misses, found.maxsize is None) == (2, 4, False)  # of both ranks, each with its own mesh
    operation.forget_plans()
    assert spec_of_shard.cache_info().currsize == 0, "a world that was left must not be kept alive"


_unchanged = local_map(lambda x: x, (Shard(0),))


def _used_world(platform: Platform) -> weakref.ref[Any]:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    x = distribute_tensor(platform.from_numpy(np.ones((4, 2), np.float32)), mesh, (Shard(0),))
    x.redistribute(DeviceMesh("cpu", (2, 1), platform=platform), (Shard(1), Replicate()))
    at_owners([platform.unwrap(x)], [x.spec], lambda full: full)
    _unchanged(x)
    return weakref.ref(mesh.world)


@pytest.mark.usefixtures("torch_suffices")
def test_the_caches_of_a_job_do_not_keep_its_world(hp_platform: Platform) -> None:
    worlds = run_ranks(_used_world, 2, hp_platform, hp_platform)
    operation.forget_plans()
    gc.collect()
    assert [world() for world in worlds] == [None, None]


def test_every_cache_of_the_planner_has_a_limit() -> None:
    limits = {cached.__name__: cached.cache_info().maxsize for cached in _caches()}
    assert limits
    assert all(limit is not None for limit in limits.values()), limits


def _same_step(platform: Platform) -> tuple[int, int]:
    """Objects alive after 40 and after 140 equal steps."""
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("dp",), platform=platform)
    full = platform.from_numpy(np.ones((4, 4), np.float32))
    weight = platform.Parameter(distribute_tensor(full, mesh, (Replicate(),), src_data_rank=None))
    ops, alive = platform.ops, []
    for step in range(141):
        x = distribute_tensor(platform.from_numpy(np.ones((5, 4), np.float32)), mesh, (Shard(0),), src_data_rank=None)
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


def _memory_of_changing_shapes(platform: Platform) -> list[int]:
    """Traced bytes after each of six rounds of 30 steps with shapes not seen before, the bounded caches emptied."""
    mesh = DeviceMesh("cpu", (1,), mesh_dim_names=("dp",), platform=platform)
    full = platform.from_numpy(np.ones((4, 4), np.float32))
    weight = platform.Parameter(distribute_tensor(full, mesh, (Replicate(),), src_data_rank=None))
    traced = []
    for first in range(0, 180, 30):
        _steps(platform, weight, mesh, first, 30)
        _forget(platform)
        gc.collect()
        traced.append(tracemalloc.get_traced_memory()[0])
    return traced


@pytest.mark.usefixtures("torch_suffices")
def test_memory_does_not_grow_with_the_number_of_shapes(hp_platform: Platform) -> None:
    """benchmarks/steady_state.py shows the same over ten thousand steps, the caches as they are."""
    tracemalloc.start()
    try:
        (traced,) = run_ranks(_memory_of_changing_shapes, 1, hp_platform, hp_platform)
    finally:
        tracemalloc.stop()
    # A shape has some kilobytes of plans and specs; MindSpore itself keeps about 200 bytes of a step.
    # The first rounds fill what is filled once, for others in this process too; and any round may see what another
    # thread keeps, such as the one that brings a worker of pytest-xdist its tests.
    left = min(after - before for before, after in itertools.pairwise(traced[1:]))
    assert left < 12_000, f"thirty shapes left {left} bytes behind"


# Threads ---------------------------------------------------------------------------------------------------


def _in_a_thread(platform: Platform, mesh: DeviceMesh, seed: int, failures: list[str]) -> None:
    ops = platform.ops
    for step in range(60):
        rows, axis = 2 + (seed + step) % 9, step % 2
        x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) - seed
        try:
            one = distribute_tensor(platform.from_numpy(x.copy()), mesh, (Shard(axis),), src_data_rank=None)
            plan = operation.operation_of(platform, "sum").plan_for(platform, (one, axis), {})
            if plan.placed != (((Partial(),), x.sum(axis).shape),):
                failures.append(f"thread {seed}, step {step}: {plan.placed}")
            if platform.name == "mindspore":
                continue  # its kernels give wrong numbers in threads, with plain tensors too
            got = ops.sum(ops.mul(ops.add(one, one), one), axis)
            got = platform.to_numpy(got.redistribute(placements=(Replicate(),)).to_local())
            if not np.array_equal(got, (2 * x * x).sum(axis)):
                failures.append(f"thread {seed}, step {step}: {got}")
        except Exception as error:
            failures.append(f"thread {seed}, step {step}: {error!r}")


def test_threads_share_the_caches(hp_platform: Platform, monkeypatch) -> None:
    """Each on tensors of its own, with caches so small that they are emptied all the time."""
    monkeypatch.setattr(operation, "CACHE_SIZE", 3)
    _forget(hp_platform)
    mesh = DeviceMesh("cpu", (1,), platform=hp_platform)
    failures: list[str] = []
    threads = [
        threading.Thread(target=_in_a_thread, args=(hp_platform, mesh, seed, failures), daemon=True)
        for seed in range(6)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures, failures[:3]
    _forget(hp_platform)
