"""Operands cut by several axes, the later one first: what works element by element stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DeviceMesh, Shard, StridedShard, distribute_tensor, record_collectives
from hp_dtensor.platform import Platform
from hp_dtensor.testing import run_ranks

WHOLE = np.arange(-9, 12, dtype=np.float32).reshape(7, 3)
STRIDED = (StridedShard(0, 2), Shard(0))
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "negative": lambda ops, x: ops.neg(x),
    "sum of two": lambda ops, x: ops.add(x, x),
    "times a number": lambda ops, x: ops.mul(x, 3.0),
    "chain": lambda ops, x: ops.mul(ops.add(x, 1.0), ops.silu(x)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_is_sent(hp_platform: Platform, call: Callable[[Any, Any], Any]) -> None:
    ops = hp_platform.ops

    def run(x: Any) -> tuple[Any, Any]:
        y = call(ops, x)
        hp_platform.backward(ops.sum(ops.mul(y, y)))
        return y, hp_platform.get_grad(x)

    def rank() -> list[np.ndarray]:
        mesh = DeviceMesh("cpu", (2, 2), platform=hp_platform)
        x = hp_platform.Parameter(distribute_tensor(hp_platform.from_numpy(WHOLE.copy()), mesh, STRIDED))
        with record_collectives() as log:
            y = call(ops, x)
        assert y.placements == STRIDED
        assert log.count() == 0
        return [hp_platform.to_numpy(value.full_tensor()) for value in run(x)]

    expected = [
        hp_platform.to_numpy(value) for value in run(hp_platform.Parameter(hp_platform.from_numpy(WHOLE.copy())))
    ]
    for found in run_ranks(rank, 4, hp_platform):
        for got, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6)
