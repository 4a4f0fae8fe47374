"""Attention of a sequence that ranks share equals one device's, by every method, for every mask and uneven sizes."""

from __future__ import annotations

import attention_reference as reference
import context_programs
import numpy as np
import pytest
from context_programs import attend_on_ranks, put_together

from hp_dtensor import init_device_mesh
from hp_dtensor.parallel.attention import AttentionMask, SequenceSharding, context_parallel_attention
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.testing import run_ranks

LENGTH = 21
PACKED = reference.positions_of((5, 1, 9, 6), (16, 5))
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 4},
    "full window": {"causal": False, "window": 3},
    "packed": {"positions": PACKED},
    "packed window": {"positions": PACKED, "window": 3},
    "packed full": {"positions": PACKED, "causal": False},
}
CASES = [
    # method, ranks, ulysses degree, mask, query heads, key-value heads, other options
    ("ring", 1, 1, "causal", 4, 2, {}),
    ("ring", 2, 1, "causal", 4, 2, {}),
    ("ring", 2, 1, "full", 4, 4, {}),
    ("ring", 3, 1, "causal", 4, 2, {"sinks": True}),
    ("ring", 3, 1, "packed", 4, 1, {}),
    ("ring", 4, 1, "causal", 4, 2, {"balanced": False}),
    ("ring", 4, 1, "window", 4, 2, {"balanced": False}),
    ("ring", 4, 1, "full window", 4, 2, {"sinks": True}),
    ("ring", 4, 1, "packed window", 6, 3, {"soft_cap": 0.7}),
    ("ring", 8, 1, "causal", 4, 2, {}),
    ("ring", 8, 1, "packed full", 4, 2, {"scale": 0.3}),
    ("all_gather", 2, 1, "causal", 4, 2, {}),
    ("all_gather", 3, 1, "full", 4, 2, {"sinks": True}),
    ("all_gather", 4, 1, "window", 4, 2, {"balanced": False}),
    ("all_gather", 4, 1, "packed", 4, 1, {"soft_cap": 0.7}),
    ("all_gather", 8, 1, "packed window", 4, 2, {}),
    ("ulysses", 2, 2, "causal", 4, 2, {}),
    ("ring", 2, 2, "packed", 5, 1, {"sinks": True}),
    ("ring", 4, 4, "causal", 8, 2, {"sinks": True}),
    ("ulysses", 4, 4, "full", 6, 3, {}),
    ("ring", 3, 3, "packed window", 4, 2, {"sinks": True, "soft_cap": 0.7}),
    ("ring", 8, 8, "causal", 4, 2, {}),
    ("ring", 4, 2, "causal", 4, 2, {"sinks": True}),
    ("ring", 6, 2, "packed", 6, 2, {}),
    ("all_gather", 8, 4, "window", 6, 2, {"sinks": True}),
    ("all_gather", 8, 2, "causal", 4, 4, {"scale": 0.2}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}-{case[3]}-{case[4]}-{case[5]}")
def test_equals_one_device(hp_platform, case):
    method, ranks, degree, mask, heads, kv_heads, options = case
    options = dict(options)
    balanced, has_sinks = options.pop("balanced", True), options.pop("sinks", False)
    arrays = reference.inputs(heads=heads, kv_heads=kv_heads, keys=LENGTH)[: 5 if has_sinks else 4]
    sharding = SequenceSharding(length=LENGTH, ranks=ranks, ulysses_degree=degree, balanced=balanced)
    results = run_ranks(
        attend_on_ranks, ranks, hp_platform, hp_platform, arrays, MASKS[mask], options, degree, method, balanced
    )
    reference.compare(put_together(results, sharding), reference.expected(arrays, MASKS[mask], options))


@pytest.mark.parametrize(("method", "degree"), [("ring", 1), ("all_gather", 1), ("ring", 4), ("ring", 2)])
def test_fewer_tokens_than_ranks(hp_platform, method, degree):
    arrays = reference.inputs(keys=3)[:4]
    sharding = SequenceSharding(length=3, ranks=4, ulysses_degree=degree)
    results = run_ranks(attend_on_ranks, 4, hp_platform, hp_platform, arrays, {}, {}, degree, method)
    reference.compare(put_together(results, sharding), reference.expected(arrays, {}, {}))


@pytest.mark.parametrize(("method", "degree"), [("ring", 1), ("all_gather", 1), ("ring", 2)])
def test_rows_whose_documents_differ_on_one_rank_alone(hp_platform, method, degree):
    """Rank 0 has the same documents in both rows, other ranks do not."""
    packed = {"positions": reference.positions_of((2, 10), (2, 4, 6))}
    arrays = reference.inputs(keys=12)[:4]
    sharding = SequenceSharding(length=12, ranks=4, ulysses_degree=degree, balanced=False)
    results = run_ranks(attend_on_ranks, 4, hp_platform, hp_platform, arrays, packed, {}, degree, method, False)
    reference.compare(put_together(results, sharding), reference.expected(arrays, packed, {}))


def test_a_batch_without_rows_has_positions(hp_platform):
    def program():
        q = hp_platform.from_numpy(np.zeros((0, 2, 3, 4), np.float32))
        mask = AttentionMask(positions=np.zeros((0, 3), np.int64))
        return tuple(context_parallel_attention(q, q, q, init_device_mesh("cpu", (2,)), mask=mask).shape)

    assert run_ranks(program, 2, hp_platform) == [(0, 2, 3, 4)] * 2


def test_all_ranks_exchange_heads_by_the_method_alone(hp_platform):
    """Without a sharding, as with one in which all of them do."""
    arrays = reference.inputs(heads=4, kv_heads=2, keys=8)[:3]

    def program(method):
        mesh = init_device_mesh("cpu", (2,), platform=hp_platform)
        sharding = SequenceSharding(length=8, ranks=2, ulysses_degree=2)
        q, k, v = (hp_platform.from_numpy(sharding.shard(x, mesh.get_local_rank(), 2)) for x in arrays)
        given = {"method": "ulysses"} if method else {"sharding": sharding}
        return hp_platform.to_numpy(context_parallel_attention(q, k, v, mesh, mask=AttentionMask(), **given))

    for one, other in zip(*(run_ranks(program, 2, hp_platform, method) for method in (True, False)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_repeats_itself_to_the_bit(hp_platform):
    arrays = reference.inputs(keys=LENGTH)[:4]
    runs = [run_ranks(attend_on_ranks, 4, hp_platform, hp_platform, arrays, {}, {}, 2) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        for x, y in zip(one, other, strict=True):
            np.testing.assert_array_equal(x, y)


DOCUMENTS = ((15, 1, 17, 8), (30, 11))
PACKED_ON_REAL_RANKS = reference.positions_of(*DOCUMENTS)
REAL_CASES = {
    2: [("ring", 1, {}), ("all_gather", 1, {"positions": PACKED_ON_REAL_RANKS}), ("ring", 2, {"window": 7})],
    4: [
        ("ring", 1, {"positions": PACKED_ON_REAL_RANKS}),
        ("ring", 2, {}),
        ("all_gather", 2, {"window": 7}),
        ("ring", 4, {}),
    ],
}


def attend_by_name(name, *args):
    return attend_on_ranks(get_platform(name), *args)


@pytest.mark.real_ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_device_on_real_ranks(hp_platform, rank_pool, ranks):
    arrays = reference.inputs(heads=4, kv_heads=2, keys=41)
    pool = rank_pool(ranks)
    for method, degree, mask in REAL_CASES[ranks]:
        documents = DOCUMENTS if "positions" in mask else None
        sharding = SequenceSharding(length=41, ranks=ranks, ulysses_degree=degree, documents=documents)
        for _ in range(2):
            results = pool.run(attend_by_name, hp_platform.name, arrays, mask, {}, degree, method, True, None, sharding)
            reference.compare(put_together(results, sharding), reference.expected(arrays, mask, {}))


@pytest.mark.real_ranks
@pytest.mark.parametrize("case", ["causal", "full", "window", "packed"])
def test_large_blocks_equal_one_device_on_real_ranks(hp_platform, rank_pool, case):
    """Ranks of torch read these blocks in shared memory."""
    documents = ((600, 1, 290, 10),) if case == "packed" else None
    mask: dict = {"full": {"causal": False}, "window": {"window": 350}}.get(case, {})
    if documents:
        mask = {"positions": reference.positions_of(*documents)}
    arrays = reference.inputs(batch=1, heads=8, kv_heads=4, keys=901, width=64)
    sharding = SequenceSharding(length=901, ranks=3, documents=documents, balanced=case != "window")
    pool, wanted = rank_pool(3), reference.expected(arrays, mask, {})
    for _ in range(2):
        results = pool.run(attend_by_name, hp_platform.name, arrays, mask, {}, 1, "ring", True, None, sharding)
        reference.compare(put_together(results, sharding), wanted)


def run_by_name(name, program, *args):
    return getattr(context_programs, program)(get_platform(name), *args)


@pytest.mark.real_ranks
@pytest.mark.parametrize("width", [4, 64])
def test_after_an_error_in_a_ring_the_group_works(hp_platform, rank_pool, width):
    arrays = reference.inputs(batch=1, heads=8, kv_heads=4, keys=901, width=width)[:4]
    sharding = SequenceSharding(length=901, ranks=3)
    results = rank_pool(3).run(run_by_name, hp_platform.name, "attend_after_an_error", arrays, sharding)
    reference.compare(put_together(results, sharding), reference.expected(arrays, {}, {}))


@pytest.mark.real_ranks
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_ranks_that_share_no_document_do_not_delay_others(hp_platform, rank_pool, method):
    arrays = reference.inputs(keys=12)[:4]
    pool, documents = rank_pool(3), {"positions": reference.positions_of((8, 4), (8, 4))}
    # Backwards: the mesh has the ranks in this order.
    found = pool.run(run_by_name, hp_platform.name, "attend_alone", arrays, method, timeout_seconds=60)[::-1]
    reference.compare([np.concatenate(found, 2)], reference.expected(arrays, documents, {})[:1])


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_a_rank_without_tokens_of_packed_documents_takes_part(hp_platform, method):
    """Three tokens on four ranks: one has none, and the others need it in their exchanges."""

    def program():
        mesh = init_device_mesh("cpu", (4,), platform=hp_platform.name)
        sharding = SequenceSharding(length=3, ranks=4)
        tokens = len(sharding.indices(mesh.get_coordinate()[0]))
        x = hp_platform.from_numpy(np.ones((1, 2, tokens, 4), np.float32))
        positions = hp_platform.from_numpy(np.zeros((1, tokens), np.int64))
        mask = AttentionMask(positions=positions)
        out = context_parallel_attention(x, x, x, mask=mask, sharding=sharding, method=method, device_mesh=mesh)
        return hp_platform.to_numpy(out).tolist()

    shares = run_ranks(program, 4, hp_platform)
    lengths = [len(share[0][0]) for share in shares]
    assert (min(lengths), sum(lengths)) == (0, 3)
    # Every token is a document of its own, so it sees only its own value of one.
    assert all(value == 1.0 for share in shares for head in share[0] for token in head for value in token)
