"""Views of uneven shards keep their data where it is: chunks of one dimension are ragged parts of a merged one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_dtensor import (
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    explicit_redistribution,
    init_device_mesh,
    record_collectives,
)
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks
from hp_dtensor.testing.pytest_plugin import ALL
from hp_dtensor.testing.rule_proof import prove
from hp_dtensor.testing.rule_samples import Sample

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


def _flattened(platform: Platform) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",), platform=platform)
    x = distribute_tensor(platform.from_numpy(ROWS), mesh, (Shard(1),))  # 2, 2, 2 and 0 columns
    with record_collectives() as log:
        flat = platform.ops.reshape(x, (30,))
        back = platform.ops.reshape(flat * 2, (5, 6))
        total = platform.ops.sum(flat)
    return flat.placements, back.placements, total.placements, len(log.records), platform.to_numpy(flat.full_tensor())


def test_an_inner_dimension_is_flattened_to_a_strided_shard(hp_platform: Platform) -> None:
    """As torch's `_StridedShard`, without communication; here also of uneven and empty shards."""
    for flat, back, total, num_collectives, values in run_ranks(_flattened, 4, hp_platform, hp_platform):
        assert (flat, back) == ((StridedShard(0, 5),), (Shard(1),))
        assert total[0].is_partial()
        assert num_collectives == 0
        np.testing.assert_array_equal(values, ROWS.reshape(30))


def _loss_of_rows(platform: Platform) -> tuple[Any, ...]:
    mesh, ops = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",), platform=platform), platform.ops
    logits = platform.from_numpy(np.sin(np.arange(60.0, dtype=np.float32)).reshape(2, 6, 5))
    targets = platform.from_numpy(np.arange(12).reshape(2, 6) % 5)
    x = distribute_tensor(logits, mesh, (Shard(1),))  # 2, 2, 2 and 0 positions
    whole = platform.from_numpy(platform.to_numpy(logits).copy())
    for leaf in (x, whole):
        platform.set_requires_grad(leaf, True)
    rows = distribute_tensor(targets, mesh, (Replicate(),))
    with record_collectives() as log:
        loss = ops.cross_entropy(ops.reshape(x, (12, 5)), ops.reshape(rows, (12,)))
        (grad,) = platform.grad([loss], [x])
    expected = ops.cross_entropy(ops.reshape(whole, (12, 5)), ops.reshape(targets, (12,)))
    found, full = loss.full_tensor(), grad.full_tensor()
    pairs = [(found, expected), (full, platform.grad([expected], [whole])[0])]
    names = [record.name for record in log.records]
    return names, [tuple(platform.to_numpy(each) for each in pair) for pair in pairs]


def test_the_loss_of_flattened_rows_follows_their_placement(hp_platform: Platform) -> None:
    """Targets are sliced as the rows of the logits are; only the number of rows that count is communicated."""
    for names, pairs in run_ranks(_loss_of_rows, 4, hp_platform, hp_platform):
        assert names == ["all_reduce"]
        for found, expected in pairs:
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def _reshapes(source: tuple[int, ...], *targets: tuple[int, ...]) -> Sample:
    def call(ops: Any, x: Any) -> Any:
        for target in targets:
            x = ops.reshape(x, target)
        return x

    return Sample(f"reshape {source} {targets}", (source,), call)


STRIDED = (
    _reshapes((3, 4, 5), (12, 5), (3, 4, 5)),
    _reshapes((6, 4), (2, 12), (6, 4)),
    _reshapes((2, 5, 3), (30,), (2, 5, 3)),
    Sample(
        "linear of rows",
        ((2, 4, 3), (5, 3)),
        lambda ops, x, w: ops.reshape(ops.linear(ops.reshape(x, (8, 3)), w), (2, 4, 5)),
    ),
    *(
        Sample(
            f"cross_entropy of rows, {reduction}",
            ((2, 4, 3), (2, 4)),
            lambda ops, x, t, reduction=reduction: ops.cross_entropy(
                ops.reshape(x, (8, 3)), ops.reshape(t, (8,)), reduction=reduction
            ),
            integers={1: 3},
        )
        for reduction in ("mean", "none")
    ),
    Sample("mse_loss", ((5, 4), (5, 4)), lambda ops, x, y: ops.mse_loss(x, y)),
    Sample(
        "batch_norm of rows",
        ((2, 4, 3), (3,), (3,)),
        lambda ops, x, w, b: ops.batch_norm(ops.reshape(x, (8, 3)), None, None, w, b, True),
    ),
    Sample("amax of rows", ((2, 4, 3),), lambda ops, x: ops.amax(ops.reshape(x, (8, 3)), 0)),
    Sample("mul of broadcast", ((4, 3), (3,)), lambda ops, x, y: ops.mul(x, y)),
    Sample("mean", ((5, 4),), lambda ops, x: ops.mean(x, 0)),
)


@pytest.mark.parametrize("sample", STRIDED, ids=lambda sample: sample.name)
def test_strided_shards_give_the_values_and_gradients_of_one_device(
    hp_platform: Platform, sample: Sample, torch_or: Callable[[bool], None]
) -> None:
    torch_or(sample.name in ("linear of rows", "cross_entropy of rows, mean", STRIDED[0].name))
    limit = 40 if hp_platform.name == "torch" else 12
    for mesh_shape in ((3,), (2, 2)):
        arguments = (hp_platform, mesh_shape, [sample], limit, ALL, True)
        reports = run_ranks(prove, math.prod(mesh_shape), hp_platform, *arguments)
        assert [problem for report in reports for problem in report.wrong] == []
        assert reports[0].refused == []
