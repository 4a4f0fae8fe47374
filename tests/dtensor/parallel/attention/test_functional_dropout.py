"""Dropout of attention drops the same entries on one device and any ranks, in forward, backward and recomputation."""

from __future__ import annotations

import attention_reference as reference
import numpy as np
import pytest
from context_programs import attend_on_ranks, put_together

from hp_dtensor import DeviceMesh, Shard, distribute_tensor
from hp_dtensor.exceptions import AttentionError
from hp_dtensor.parallel.attention import AttentionDropout, AttentionMask, SequenceSharding, attention, functional
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.platform.attention import dropout_mask
from hp_dtensor.testing import run_ranks

LENGTH = 11
SEEDS = np.array([5, -(2**62)])
P = 0.4
PACKED = {"positions": reference.positions_of((5, 6), (11,))}
CASES = [
    # method, ranks, ulysses degree, mask
    ("ring", 1, 1, {}),
    ("ring", 2, 1, {"causal": False}),
    ("ring", 4, 1, {"window": 3}),
    ("all_gather", 3, 1, PACKED),
    ("ring", 3, 3, {}),
    ("ring", 4, 2, PACKED),
]


def dropped(p=P, seed=SEEDS, **others):
    return AttentionDropout(p, seed, **others)


def one_device(arrays, mask, rows=SEEDS.tolist()):
    factors = reference.dropout_factors(P, rows, arrays[0].shape[1], arrays[0].shape[2], LENGTH)
    return reference.expected(arrays, mask, {"factors": factors})


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_every_method_drops_what_one_device_drops(hp_platform, case):
    method, ranks, degree, mask = case
    arrays = reference.inputs(heads=4, kv_heads=2, keys=LENGTH)[:4]
    sharding = SequenceSharding(length=LENGTH, ranks=ranks, ulysses_degree=degree)
    options = {"dropout": dropped()}
    results = run_ranks(attend_on_ranks, ranks, hp_platform, hp_platform, arrays, mask, options, degree, method)
    found = put_together(results, sharding)
    reference.compare(found, one_device(arrays, mask))
    again = run_ranks(attend_on_ranks, ranks, hp_platform, hp_platform, arrays, mask, options, degree, method)
    for x, y in zip(found, put_together(again, sharding), strict=True):
        np.testing.assert_array_equal(x, y)


def computed(platform, arrays, options, call=attention):
    inputs = [platform.from_numpy(x.copy()) for x in arrays[:3]]
    for x in inputs:
        platform.set_requires_grad(x, True)
    out = call(*inputs, mask=AttentionMask(), **options)
    platform.backward(out, platform.from_numpy(arrays[3].copy()))
    return [platform.to_numpy(x) for x in (out, *(platform.get_grad(x) for x in inputs))]


@pytest.mark.parametrize("tile", [512, 4])
def test_one_rank_and_its_recomputation(hp_platform, tile, monkeypatch):
    """Entries do not depend on the blocks that are computed, on fewer queries than keys, nor on the second forward."""
    monkeypatch.setattr(functional, "TILE", tile)
    arrays = reference.inputs(queries=6, keys=LENGTH)[:4]
    found = computed(hp_platform, arrays, {"dropout": dropped()})
    reference.compare(found, one_device(arrays, {}))

    def again(*tensors, mask, dropout):
        return checkpoint(lambda *x: attention(*x, mask=mask, dropout=dropout), *tensors, platform=hp_platform)

    for x, y in zip(computed(hp_platform, arrays, {"dropout": dropped()}, again), found, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dim", [0, 1])
def test_sharded_batches_and_heads(hp_platform, dim):
    """Ranks with other rows or heads of DTensors drop what one device would, also with one seed for all rows."""
    arrays = reference.inputs(keys=LENGTH)[:4]

    def program():
        mesh = DeviceMesh("cpu", [0, 1], platform=hp_platform)
        q, k, v = (distribute_tensor(hp_platform.from_numpy(x), mesh, [Shard(dim)]) for x in arrays[:3])
        out = attention(q, k, v, mask=AttentionMask(), dropout=dropped(seed=3))
        assert tuple(out.placements) == (Shard(dim),)
        return hp_platform.to_numpy(out.full_tensor())

    rows = dropped(seed=3).rows(hp_platform, 2).tolist()
    assert rows[0] != rows[1]
    for found in run_ranks(program, 2, hp_platform):
        reference.compare([found], one_device(arrays, {}, rows)[:1])


def test_plain_heads_are_told_their_numbers(hp_platform):
    arrays = reference.inputs(keys=LENGTH)[:4]
    of_second = [x[:, x.shape[1] // 2 :] for x in arrays]
    found = computed(hp_platform, of_second, {"dropout": dropped(heads=np.array([2, 3]))})
    wanted = one_device(arrays, {})
    reference.compare(found, [x[:, x.shape[1] // 2 :] for x in wanted])


def test_the_platform_draws_the_entries_of_the_reference(hp_platform):
    vectors = (SEEDS, np.array([3, 0]), np.arange(-2, 6), np.arange(2**40, 2**40 + 70))
    retained = dropout_mask(P, *vectors)
    factors = hp_platform.to_numpy(hp_platform.dropout_factors(P, *vectors))
    np.testing.assert_array_equal(factors, np.where(retained, np.float32(1) / np.float32(1 - P), np.float32(0)))
    assert not hp_platform.to_numpy(hp_platform.dropout_factors(1.0, *vectors)).any()


def test_as_many_are_dropped_as_asked():
    """The share of 2^18 entries is within five standard deviations: in all, by head, by row, by query and by key."""
    retained = dropout_mask(0.1, np.arange(4), np.arange(16), np.arange(64), np.arange(64))
    for axes in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        count = np.prod([retained.shape[axis] for axis in axes])
        assert np.abs(retained.mean(axes) - 0.9).max() < 5 * np.sqrt(0.09 / count)


def test_what_cannot_be_is_refused(hp_platform):
    q = hp_platform.from_numpy(np.ones((2, 2, 3, 4), "float32"))
    for p in (-0.1, 1.5, True, "much"):
        with pytest.raises(AttentionError, match="p must be a number from 0 to 1"):
            AttentionDropout(p, 0)
    with pytest.raises(AttentionError, match="dropout must be None or an AttentionDropout"):
        attention(q, q, q, mask=AttentionMask(), dropout=0.1)
    with pytest.raises(AttentionError, match=r"seed \[3\] must be one for each of 2 rows"):
        attention(q, q, q, mask=AttentionMask(), dropout=dropped(seed=np.arange(3)))
    with pytest.raises(AttentionError, match=r"heads \[1\] must be one for each of 2 query heads"):
        attention(q, q, q, mask=AttentionMask(), dropout=dropped(heads=np.arange(1)))
