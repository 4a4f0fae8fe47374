"""Two platforms in one process: the one under test and the NumPy one, each with meshes and ranks of its own."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DeviceMesh, Partial, Replicate, Shard, distribute_tensor
from hp_dtensor.dispatch import operation
from hp_dtensor.exceptions import MixedOperandsError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks

SOURCES = Path(__file__).parents[2] / "numpy_platform" / "src"
STEPS = 40


@pytest.fixture
def numpy_platform(monkeypatch) -> Platform:
    monkeypatch.syspath_prepend(str(SOURCES))
    from hp_platform_numpy import plugin

    return plugin.hp_platform()


def _train(platform: Platform) -> list[str]:
    """Return the differences from one device in `STEPS` losses and gradients of sharded rows, whose number changes."""
    ops, wrong = platform.ops, []
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    w = np.arange(12, dtype=np.float32).reshape(4, 3) % 5 - 2
    for step in range(STEPS):
        x = np.arange((2 + step % 7) * 4, dtype=np.float32).reshape(-1, 4) % 3 - 1
        weight = platform.Parameter(_placed(platform, mesh, w, Replicate()))
        y = ops.relu(ops.matmul(_placed(platform, mesh, x, Shard(0)), weight))
        loss = ops.sum(y)
        if not isinstance(loss.placements[0], Partial):
            wrong.append(f"{platform.name}, step {step}: {loss.placements}")
        platform.backward(loss.full_tensor())
        got = platform.to_numpy(platform.get_grad(weight).full_tensor())
        if not np.array_equal(got, x.T @ (x @ w > 0).astype(np.float32)):
            wrong.append(f"{platform.name}, step {step}: {got.tolist()}")
    return wrong


def _placed(platform: Platform, mesh: DeviceMesh, array: np.ndarray, placement: Any) -> Any:
    return distribute_tensor(platform.from_numpy(array.copy()), mesh, (placement,), src_data_rank=None)


def test_their_jobs_run_at_the_same_time(hp_platform: Platform, numpy_platform: Platform, monkeypatch) -> None:
    """Two ranks each, the NumPy ones beside the main thread; the caches that they share are emptied all the time."""
    monkeypatch.setattr(operation, "CACHE_SIZE", 3)
    found: dict[str, Any] = {}

    def job(platform: Platform) -> None:
        try:
            found[platform.name] = run_ranks(_train, 2, platform, platform)
        except Exception as error:
            found[platform.name] = error

    beside = threading.Thread(target=job, args=(numpy_platform,), daemon=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        beside.start()
        job(hp_platform)
        beside.join()
    finally:
        sys.setswitchinterval(interval)
        operation.forget_plans()
    assert found == {hp_platform.name: [[], []], "numpy": [[], []]}


def test_their_tensors_live_side_by_side_but_do_not_mix(hp_platform: Platform, numpy_platform: Platform) -> None:
    """Within ranks of one, meshes of the other are in a world of their own."""
    platforms = (hp_platform, numpy_platform)

    def program() -> None:
        meshes = [DeviceMesh("cpu", (1,), platform=platform) for platform in platforms]
        assert [mesh.platform for mesh in meshes] == list(platforms)
        placed = [
            _placed(p, mesh, np.ones((3, 4), np.float32), Shard(0)) for p, mesh in zip(platforms, meshes, strict=True)
        ]
        for platform, x in zip(platforms, placed, strict=True):
            assert platform.to_numpy(platform.ops.sum(platform.ops.add(x, x)).full_tensor()) == 24
        for platform in platforms:
            with pytest.raises((MixedOperandsError, TypeError)):
                platform.ops.add(*placed)

    run_ranks(program, 1, hp_platform)
