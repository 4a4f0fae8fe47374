"""Views of uneven shards keep their data where it is: chunks of one dimension are ragged parts of a merged one."""

from __future__ import annotations

from typing import Any

import numpy as np

from hp_dtensor import RaggedShard, Replicate, Shard, distribute_tensor, explicit_redistribution, init_device_mesh
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks

ROWS = np.arange(30.0, dtype=np.float32).reshape(5, 6)


def _views(platform: Platform) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",), platform=platform)
    x = distribute_tensor(platform.from_numpy(ROWS), mesh, (Shard(0),))  # 2, 2, 1 and 0 rows
    ops = platform.ops
    with explicit_redistribution():
        flat = ops.reshape(x, (30,))
        results = [flat, ops.reshape(flat, (5, 6)), ops.reshape(flat * 2, (5, 2, 3)), ops.reshape(x, (5, 3, 2))]
    return [r.placements for r in results], [platform.to_numpy(r.full_tensor()) for r in results]


def test_uneven_rows_are_merged_and_split_without_redistribution(hp_platform: Platform) -> None:
    for placements, values in run_ranks(_views, 4, hp_platform, hp_platform):
        assert placements == [(RaggedShard(0, (12, 12, 6, 0)),), (Shard(0),), (Shard(0),), (Shard(0),)]
        expected = [ROWS.reshape(30), ROWS, 2 * ROWS.reshape(5, 2, 3), ROWS.reshape(5, 3, 2)]
        for value, right in zip(values, expected, strict=True):
            np.testing.assert_array_equal(value, right)


def _ragged(platform: Platform) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), platform=platform)
    flat = distribute_tensor(platform.from_numpy(ROWS.reshape(30)), mesh, (RaggedShard(0, (12, 18)), Replicate()))
    rows = platform.ops.reshape(flat, (5, 6))
    chunks = distribute_tensor(platform.from_numpy(ROWS), mesh, (RaggedShard(0, (3, 2)), Replicate()))
    return rows.placements, (chunks * 2).placements, platform.to_numpy(rows.full_tensor())


def test_ragged_parts_of_whole_rows_are_split_into_rows(hp_platform: Platform) -> None:
    for rows, doubled, values in run_ranks(_ragged, 4, hp_platform, hp_platform):
        assert rows == (RaggedShard(0, (2, 3)), Replicate())
        assert doubled == (RaggedShard(0, (3, 2)), Replicate()), "outside of views placements are not renamed"
        np.testing.assert_array_equal(values, ROWS)
