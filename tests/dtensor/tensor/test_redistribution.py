"""`redistribute(async_op=True)` gives a DTensor at once, which waits at the first look at its data, as torch's does."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import pytest

from hp_dtensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.base import PendingDTensor, set_pending
from hp_dtensor.testing import run_ranks


def _leaf(platform: Platform) -> Any:
    numbers = np.arange(12, dtype=np.float32).reshape(4, 3)
    return platform.Parameter(platform.from_numpy(numbers), requires_grad=True)


def _values(platform: Platform, x: Any) -> Any:
    return platform.to_numpy(x.full_tensor() if isinstance(x, DTensor) else x)


LOOKS_AT_DATA = {
    "sum": lambda platform, x: x + 1,
    "sum from the right": lambda platform, x: 1 + x,
    "among others": lambda platform, x: platform.ops.cat([platform.ops.mul(x, 2.0), x], 0),
    "part": lambda platform, x: x[0],
    "local": lambda platform, x: x.to_local(),
    "full": lambda platform, x: x.full_tensor(),
    "moved on": lambda platform, x: x.redistribute(placements=[Shard(0)], async_op=True),
    "data": lambda platform, x: x.data,
}


def _under_way(platform: Platform) -> None:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    for name, look in LOOKS_AT_DATA.items():
        results = []
        for async_op in (True, False):
            leaf = _leaf(platform)
            x = distribute_tensor(leaf, mesh, [Shard(1)])
            y = x.redistribute(placements=[Replicate()], async_op=async_op)
            facts = (y.spec, y.device_mesh, y.placements, y.shape, y.ndim, y.dtype, y.local_shape)
            assert isinstance(y, PendingDTensor) == async_op, name
            seen = look(platform, y)
            assert not isinstance(y, PendingDTensor), name
            used = seen if platform.requires_grad(seen) else y
            platform.backward(platform.ops.sum(platform.ops.mul(used, used)))
            results.append((facts, _values(platform, seen).tolist(), _values(platform, platform.get_grad(x)).tolist()))
        assert results[0] == results[1], name


def test_an_asynchronous_redistribution_waits_at_the_first_look_at_its_data(hp_platform: Platform) -> None:
    run_ranks(_under_way, 2, hp_platform, hp_platform)


def _attributes_set_under_way(platform: Platform) -> None:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    start = [distribute_tensor(platform.ops.full((4, 3), 2.0, dtype=platform.dtype("float32")), mesh, [Shard(1)])] * 2
    y, other = [x.redistribute(placements=[Replicate()], async_op=True) for x in start]
    y.note = "mine"
    assert (y.note, _values(platform, y).sum()) == ("mine", 24.0)
    platform.copy_(other.to_local(), platform.zeros((4, 3), other.dtype))
    assert _values(platform, other).sum() == 0.0


def test_what_is_written_to_a_redistribution_under_way_stays(hp_platform: Platform) -> None:
    run_ranks(_attributes_set_under_way, 2, hp_platform, hp_platform)


def _taken_over_under_way(platform: Platform) -> None:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    x = distribute_tensor(_leaf(platform), mesh, [Replicate()])
    numbers = np.arange(12, dtype=np.float32).reshape(4, 3) + 5

    def under_way() -> Any:
        return distribute_tensor(platform.from_numpy(numbers), mesh, [Shard(1)]).redistribute(
            placements=[Replicate()], async_op=True
        )

    platform.set_grad(x, under_way())
    platform.backward(platform.ops.sum(platform.ops.mul(x, 2.0)))
    assert (_values(platform, platform.get_grad(x)) == numbers + 2).all()
    if platform.name == "torch":  # MindSpore's data cannot be set
        x.data = under_way()
        assert (_values(platform, x) == numbers).all()


def test_a_redistribution_under_way_becomes_a_gradient_or_data_with_its_numbers(hp_platform: Platform) -> None:
    run_ranks(_taken_over_under_way, 2, hp_platform, hp_platform)


def _failing(platform: Platform) -> None:
    x = distribute_tensor(_leaf(platform), DeviceMesh("cpu", (2,), platform=platform), [Shard(1)])
    y = x.redistribute(placements=[Replicate()], async_op=True)

    def fail(x: Any) -> NoReturn:
        raise RuntimeError("lost rank 1")

    set_pending(y, fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost rank 1"):
            y.to_local()


def test_a_redistribution_that_failed_under_way_is_never_used(hp_platform: Platform) -> None:
    run_ranks(_failing, 2, hp_platform, hp_platform)
