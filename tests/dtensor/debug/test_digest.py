"""Digests of sharded, partial and replicated tensors, against projections of the full tensor by NumPy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DeviceMesh, Partial, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.debug.digest import (
    BUCKETED_DIMS,
    BUCKETS,
    LENGTH,
    PROJECTIONS,
    SQUARES,
    SUM,
    Digester,
    Part,
    Region,
    combine,
    factors,
    norm_of,
    region_of_spec,
    summand_of_spec,
)
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import from_local, local_of
from hp_dtensor.testing import run_ranks
from hp_dtensor.testing.rule_proof import local_values

SHAPE = (5, 3, 7)


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    # Of few digits, so that summands of a partial tensor add up to it without rounding.
    return (np.random.default_rng(seed).standard_normal(shape) * 64).round().astype(np.float32) / 64


def expected(x: np.ndarray) -> np.ndarray:
    """The digest of a full tensor by its definition: one factor per dimension for every element."""
    shape = x.shape or (1,)
    x = x.reshape(shape).astype(np.float64)
    weights = np.ones((*shape, PROJECTIONS + 1))
    for dim, size in enumerate(shape):
        weights = weights * factors(dim, size).reshape(
            [size if d == dim else 1 for d in range(len(shape))] + [PROJECTIONS + 1]
        )
    products = weights * x[..., None]
    result = np.zeros(LENGTH)
    result[: PROJECTIONS + 1] = products.reshape(-1, PROJECTIONS + 1).sum(0)
    result[SQUARES] = (x**2).sum()
    dims = [*range(min(len(shape) - 1, BUCKETED_DIMS - 1)), len(shape) - 1]
    for number, dim in enumerate(dims):
        for index in range(shape[dim]):
            at = SQUARES + 1 + number * BUCKETS + index * BUCKETS // shape[dim]
            result[at] += products[..., 0].take(index, dim).sum()
    return result


def digest_on_ranks(platform: Platform, x: np.ndarray, mesh_shape: tuple[int, ...], placements: Any) -> Any:
    """Combine the digests of the local tensors of all ranks."""

    def program() -> Part:
        mesh = DeviceMesh("cpu", mesh_shape, platform=platform)
        local = platform.from_numpy(local_values(x, mesh, placements))
        placed = from_local(local, mesh, placements, shape=x.shape)
        region = region_of_spec(placed.spec)
        found = platform.to_numpy(Digester(platform).local(local_of(platform, placed), region))
        return Part(mesh.get_rank(), region.key, region.numel, summand_of_spec(placed.spec), found)

    return combine(x.shape, run_ranks(program, math.prod(mesh_shape), platform))


CHOICES = [Replicate(), Partial(), Shard(0), Shard(1), Shard(2), RaggedShard(0, (0, 5))]
PLACED = [
    *(((4,), (p,)) for p in CHOICES[:-1]),
    *(((2, 2), pair) for pair in itertools.product(CHOICES[:-1], CHOICES[:-1])),
    ((2, 2), (RaggedShard(0, (0, 5)), Shard(2))),
    ((2, 2), (StridedShard(0, split_factor=2), Shard(0))),
]


def test_every_placement_has_the_digest_of_the_full_tensor(platform: Platform) -> None:
    x = values(SHAPE)
    want = expected(x)
    for mesh_shape, placements in PLACED:
        found = digest_on_ranks(platform, x, mesh_shape, placements)
        got = found.values.copy()
        if any(p.is_partial() for p in placements):
            assert math.isnan(got[SQUARES])
            got[SQUARES] = want[SQUARES]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10, err_msg=str(placements))
        assert found.count == 1
        assert not found.replicas


@pytest.mark.parametrize("shape", [(), (1,), (9,), (4, 6), (2, 3, 4, 5), (0, 3)])
def test_every_shape(platform: Platform, shape: tuple[int, ...]) -> None:
    x = values(shape)
    found = digest_on_ranks(platform, x, (2,), (Shard(0) if shape else Replicate(),))
    np.testing.assert_allclose(found.values, expected(x), rtol=0, atol=1e-10)


@pytest.fixture(params=[True, False], ids=["NumPy", "platform"])
def digester(request: pytest.FixtureRequest, platform: Platform) -> Digester:
    return Digester(platform, on_host=request.param)


def test_half_precision_is_accumulated_in_a_wide_dtype(platform: Platform, digester: Digester) -> None:
    x = values((300, 40)).astype(np.float16)
    region = Region.of(x.shape, [np.arange(300), np.arange(40)])
    found = platform.to_numpy(digester.local(platform.from_numpy(x), region))
    np.testing.assert_allclose(found, expected(x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(), (9,), (0, 3), (5, 4, 7)])
def test_chunks_add_up(
    platform: Platform, digester: Digester, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(digester, "_chunk", 16)
    x = values(shape)
    region = Region.of(x.shape, [np.arange(n) for n in x.shape])
    found = platform.to_numpy(digester.local(platform.from_numpy(x), region))
    np.testing.assert_allclose(found, expected(x), rtol=0, atol=1e-10)


def test_rows_in_any_order_and_micro_batches_add_up(platform: Platform, digester: Digester) -> None:
    x = values((6, 8, 3))
    total = np.zeros(LENGTH)
    for rows in ([4, 0], [5, 1, 2, 3]):
        for positions in ([0, 1, 6, 7], [2, 3, 4, 5]):
            local = np.ascontiguousarray(x[rows][:, positions])
            region = Region.of(x.shape, [np.array(rows), np.array(positions), np.arange(3)])
            total += platform.to_numpy(digester.local(platform.from_numpy(local), region))
    np.testing.assert_allclose(total, expected(x), rtol=0, atol=1e-10)


def test_exchanged_rows_scaled_rows_and_one_changed_element_are_seen() -> None:
    x = values((16, 12))
    want = expected(x)
    swapped = x.copy()
    swapped[[3, 9]] = swapped[[9, 3]]
    found = expected(swapped)
    assert abs(found[SUM] - want[SUM]) < 1e-10
    assert abs(found[SQUARES] - want[SQUARES]) < 1e-10
    assert np.abs(found - want)[:PROJECTIONS].min() > 1e-3
    changed = x.copy()
    changed[5, 5] += 1e-3
    differing = np.abs(expected(changed) - want)[SQUARES + 1 :].reshape(BUCKETED_DIMS, BUCKETS) > 1e-5
    assert differing[0].nonzero()[0].tolist() == [5 * BUCKETS // 16]
    assert differing[1].nonzero()[0].tolist() == [5 * BUCKETS // 12]


def test_a_replica_that_differs_is_named_and_the_others_are_used() -> None:
    right, wrong = np.ones(LENGTH), np.full(LENGTH, 2.0)
    parts = [Part(rank, 1, 4, 0, wrong if rank == 2 else right) for rank in range(4)]
    found = combine((4,), parts)
    assert [part.rank for part in found.replicas] == [2]
    assert found.values[0] == 1


def test_the_norm_is_estimated_without_the_sum_of_squares() -> None:
    ratios = []
    for seed in range(40):
        x = values((24, 40), seed)
        ratios.append(norm_of(expected(x), 2) / float(np.linalg.norm(x)))
    assert 0.85 < np.mean(ratios) < 1.15
    assert min(ratios) > 0.3
    assert max(ratios) < 2
