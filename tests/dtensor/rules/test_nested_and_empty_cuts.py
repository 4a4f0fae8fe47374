"""Dimensions cut by several mesh axes, unevenly, or so that a rank has nothing."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from placed_arrays import MATRIX, Array, on_ranks, place, whole

from hp_dtensor import DeviceMesh, Shard
from hp_dtensor.platform.interface import Platform


def test_a_flattened_mesh_gives_right_data(hp_platform: Platform) -> None:
    """pytorch/pytorch#194457: nested uneven shards gathered over a flattened mesh."""

    def program(platform: Platform, mesh: DeviceMesh) -> bool:
        mesh.flatten("all")
        return all(
            np.array_equal(whole(platform, place(platform, mesh, array, (Shard(0), Shard(0)))[1]), array)
            for array in (MATRIX, MATRIX[:, :3].copy(), np.ones((6, 4), np.float32))
        )

    assert on_ranks(hp_platform, program, shape=(2, 2))


@pytest.mark.parametrize("dim", [0, 1])
def test_argmax_with_an_empty_shard(hp_platform: Platform, dim: int) -> None:
    """IndexError in torch 2.13 for 6 rows over 4 ranks along the cut dimension."""
    array = np.random.default_rng(1).permutation(18).reshape(6, 3).astype(np.float32)

    def program(platform: Platform, mesh: DeviceMesh) -> Array:
        _, x = place(platform, mesh, array, (Shard(0),))
        return whole(platform, platform.ops.argmax(x, dim))

    np.testing.assert_array_equal(on_ranks(hp_platform, program), array.argmax(dim))


def test_views_of_uneven_shards(hp_platform: Platform) -> None:
    """pytorch/pytorch#143372, #179502: flattening and unflattening of dimensions that ranks share unevenly."""

    def program(platform: Platform, mesh: DeviceMesh) -> list[str]:
        wrong = []
        for placement, target in itertools.product((Shard(0), Shard(1)), ((20,), (2, 10), (5, 2, 2), (4, 5))):
            _, x = place(platform, mesh, MATRIX, (placement,))
            if not np.array_equal(whole(platform, platform.ops.reshape(x, target)), MATRIX.reshape(target)):
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
