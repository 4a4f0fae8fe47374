"""Dimensions sharded by several mesh axes, unevenly, or so that a rank has nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from placed_arrays import MATRIX, Array, full_array, on_ranks, place

from hp_dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    record_collectives,
)
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks


def test_a_flattened_mesh_gives_right_data(hp_platform: Platform) -> None:
    """pytorch/pytorch#194457: nested uneven shards gathered over a flattened mesh."""

    def program(platform: Platform, mesh: DeviceMesh) -> bool:
        mesh.flatten("all")
        return all(
            np.array_equal(full_array(platform, place(platform, mesh, array, (Shard(0), Shard(0)))[1]), array)
            for array in (MATRIX, MATRIX[:, :3].copy(), np.ones((6, 4), np.float32))
        )

    assert on_ranks(hp_platform, program, shape=(2, 2))


@pytest.mark.parametrize("dim", [0, 1])
def test_argmax_with_an_empty_shard(hp_platform: Platform, dim: int) -> None:
    """IndexError in torch 2.13 for 6 rows over 4 ranks along the sharded dimension."""
    array = np.random.default_rng(1).permutation(18).reshape(6, 3).astype(np.float32)

    def program(platform: Platform, mesh: DeviceMesh) -> Array:
        _, x = place(platform, mesh, array, (Shard(0),))
        return full_array(platform, platform.ops.argmax(x, dim))

    np.testing.assert_array_equal(on_ranks(hp_platform, program), array.argmax(dim))


def test_views_of_uneven_shards(hp_platform: Platform) -> None:
    """pytorch/pytorch#143372, #179502: flattening and unflattening of dimensions that ranks share unevenly."""

    def program(platform: Platform, mesh: DeviceMesh) -> list[str]:
        wrong = []
        for placement, target in itertools.product((Shard(0), Shard(1)), ((20,), (2, 10), (5, 2, 2), (4, 5))):
            _, x = place(platform, mesh, MATRIX, (placement,))
            if not np.array_equal(full_array(platform, platform.ops.reshape(x, target)), MATRIX.reshape(target)):
                wrong.append(f"{placement} {target}")
        return wrong

    assert on_ranks(hp_platform, program) == []


def test_stack_of_many_keeps_placements(hp_platform: Platform) -> None:
    """pytorch/pytorch#168255: operations on lists of tensors are planned as any other, once."""
    from hp_dtensor.dispatch.operation import count_plans

    def program(platform: Platform, mesh: DeviceMesh) -> tuple[Any, int, int]:
        _, x = place(platform, mesh, MATRIX, (Shard(0),))
        first = platform.ops.stack([x] * 8, 0)
        known = count_plans()
        platform.ops.stack([x] * 8, 0)
        return first.placements, known, count_plans()

    placements, known, after = on_ranks(hp_platform, program)
    assert placements == (Shard(1),)
    assert known == after


FULL = np.arange(-9, 12, dtype=np.float32).reshape(7, 3)
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
        x = hp_platform.Parameter(distribute_tensor(hp_platform.from_numpy(FULL.copy()), mesh, STRIDED))
        with record_collectives() as log:
            y = call(ops, x)
        assert y.placements == STRIDED
        assert log.count() == 0
        return [hp_platform.to_numpy(value.full_tensor()) for value in run(x)]

    expected = [
        hp_platform.to_numpy(value) for value in run(hp_platform.Parameter(hp_platform.from_numpy(FULL.copy())))
    ]
    for found in run_ranks(rank, 4, hp_platform):
        for got, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("scalar_first", [False, True])
def test_scalars_go_with_strided_shards(hp_platform: Platform, scalar_first: bool) -> None:
    """The gradient of the scalar is summed over all ranks."""
    ops = hp_platform.ops

    def run(x: Any, scale: Any) -> tuple[Any, ...]:
        y = ops.mul(scale, x) if scalar_first else ops.mul(x, scale)
        hp_platform.backward(ops.sum(ops.mul(y, y)))
        return y, hp_platform.get_grad(x), hp_platform.get_grad(scale)

    def values(found: tuple[Any, ...]) -> list[np.ndarray]:
        return [hp_platform.to_numpy(y.full_tensor() if isinstance(y, DTensor) else y) for y in found]

    def rank() -> list[np.ndarray]:
        mesh = DeviceMesh("cpu", (2, 2), platform=hp_platform)
        x = hp_platform.Parameter(distribute_tensor(hp_platform.from_numpy(FULL.copy()), mesh, STRIDED))
        scale = distribute_tensor(hp_platform.from_numpy(np.array(3, np.float32)), mesh)
        found = run(x, hp_platform.Parameter(scale))
        assert found[0].placements == STRIDED
        with hp_platform.no_grad():
            written = ops.mul(x, 1.0)
            written *= scale
        np.testing.assert_array_equal(hp_platform.to_numpy(written.full_tensor()), 3 * FULL)
        return values(found)

    plain = (FULL.copy(), np.array(3, np.float32))
    expected = values(run(*(hp_platform.Parameter(hp_platform.from_numpy(value)) for value in plain)))
    for found in run_ranks(rank, 4, hp_platform):
        for got, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("placements", [(Replicate(), Replicate()), (Shard(1), Partial()), (Shard(0), Shard(0))])
def test_what_is_written_into_strided_shards_is_brought_to_them(hp_platform: Platform, placements: Any) -> None:
    def rank() -> list[np.ndarray]:
        mesh = DeviceMesh("cpu", (2, 2), platform=hp_platform)
        x, y = (
            distribute_tensor(hp_platform.from_numpy(value.copy()), mesh, placed)
            for value, placed in ((FULL, STRIDED), (FULL**2, placements))
        )
        x += y
        added = hp_platform.to_numpy(x.full_tensor())
        x *= y
        assert x.placements == STRIDED
        return [added, hp_platform.to_numpy(x.full_tensor())]

    for added, multiplied in run_ranks(rank, 4, hp_platform):
        np.testing.assert_array_equal(added, FULL + FULL**2)
        np.testing.assert_array_equal(multiplied, (FULL + FULL**2) * FULL**2)
