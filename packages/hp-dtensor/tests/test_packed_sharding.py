"""Packed rows over ranks: as many tokens for each, and equal work, whatever the lengths."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from hp_dtensor.exceptions import AttentionError
from hp_dtensor.parallel.attention import ContextParallel, SequenceSharding
from hp_dtensor.parallel.attention.all_gather import plan_gather
from hp_dtensor.parallel.attention.masks import Tokens, count_scores, plan_blocks
from hp_dtensor.parallel.attention.ring import needed_spans, plan_member


def packing(random, length, documents):
    ends = np.sort(random.choice(np.arange(1, length), min(documents, length) - 1, replace=False))
    return tuple(np.diff([0, *ends, length]).tolist())


def packings(count, length, documents, rows=1):
    random = np.random.default_rng(0)
    return [tuple(packing(random, length, documents) for _ in range(rows)) for _ in range(count)]


def sharding_of(documents, ranks, even_hops=True, **options):
    return SequenceSharding(length=sum(documents[0]), ranks=ranks, documents=documents, even_hops=even_hops, **options)


def positions_of(documents):
    return np.array([np.concatenate([np.arange(size) for size in row]) for row in documents])


def tokens_of(sharding, documents):
    numbers = np.array([np.repeat(np.arange(len(row)), row) for row in documents])
    return [Tokens(sharding.indices(rank), numbers[:, sharding.indices(rank)]) for rank in range(sharding.ranks)]


def imbalance(work):
    return max(work) * len(work) / sum(work)


@pytest.mark.parametrize("even_hops", [True, False])
@pytest.mark.parametrize(("ranks", "documents", "rows"), [(8, 8, 1), (8, 8, 4), (4, 40, 2), (3, 2, 1)])
def test_work_is_equal(ranks, documents, rows, even_hops):
    of_rows = []
    for packed in packings(20, 4096, documents, rows):
        sharding = sharding_of(packed, ranks, even_hops)
        of_tokens = (positions_of(packed) + 1).sum(0)
        work = [of_tokens[sharding.indices(rank)].sum() for rank in range(ranks)]
        assert list(sharding.work()) == work
        assert imbalance(work) <= 1.02
        plain = SequenceSharding(length=4096, ranks=ranks)
        of_rows.append(imbalance([of_tokens[plain.indices(rank)].sum() for rank in range(ranks)]))
    assert np.mean(of_rows) > 1.15  # what head and tail of the row leave


def test_every_token_has_one_rank_and_ranks_have_equally_many():
    random = np.random.default_rng(1)
    for _ in range(400):
        length, ranks = (int(random.integers(1, high)) for high in (60, 10))
        packed = tuple(packing(random, length, int(random.integers(1, 12))) for _ in range(random.integers(1, 4)))
        degree = int(random.choice([each for each in range(1, ranks + 1) if ranks % each == 0]))
        sharding = sharding_of(packed, ranks, bool(random.integers(2)), ulysses_degree=degree)
        indices = [sharding.indices(rank) for rank in range(ranks)]
        rings = [sharding.ring_indices(ring).size for ring in range(sharding.ring_size)]
        assert rings == np.diff(length * np.arange(sharding.ring_size + 1) // sharding.ring_size).tolist()
        assert sorted(np.concatenate(indices).tolist()) == list(range(length))
        assert all((np.diff(each) > 0).all() for each in indices)
        ids = random.integers(0, 99, (2, length))
        np.testing.assert_array_equal(sharding.unshard([sharding.shard(ids, rank) for rank in range(ranks)]), ids)


@pytest.mark.parametrize(
    ("documents", "wanted"),
    [
        (((10,),), [[0, 1, 2, 8, 9], [3, 4, 5, 6, 7]]),
        (((8, 2),), [[0, 1, 6, 7, 8], [2, 3, 4, 5, 9]]),
        (((5, 5),), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),  # equal documents are not divided
        (((5, 5), (5, 5)), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
        (((1,) * 10,), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
        (((10,), (5, 5)), [[0, 4, 5, 6, 9], [1, 2, 3, 7, 8]]),
    ],
)
def test_places_of_two_ranks(documents, wanted):
    sharding = sharding_of(documents, 2)
    assert [sharding.indices(rank).tolist() for rank in range(2)] == wanted


def hops_and_gathered(sharding, documents):
    """Return the time at which the last rank of a ring is done, over the mean work, and the keys that are gathered."""
    tokens = tokens_of(sharding, documents)
    needed, ranks = needed_spans(tokens, True, None), sharding.ranks
    plans = [plan_member(tokens, rank, needed, True, None, None).plans for rank in range(ranks)]
    work = np.array([[count_scores(plan) for plan in each] for each in plans], float)
    started, done = np.zeros(ranks), work[:, 0].copy()
    for hop in range(1, ranks):
        # A block comes from its owner, which sends it as it starts to compute with the one before.
        started = np.maximum(done, np.roll(started, hop))
        done = started + work[:, hop]
    gathered = [plan_gather(tokens, rank, True, None, None).received for rank in range(ranks)]
    count = sum(
        b - a
        for rank, taken in enumerate(gathered)
        for source, each in enumerate(taken)
        if source != rank
        for a, b in each
    )
    return max(done) / work.sum() * ranks, count


def test_hops_of_a_ring_are_even_or_fewer_keys_are_gathered():
    found = {True: [], False: []}
    for packed in packings(6, 2048, 8):
        for even_hops in found:
            found[even_hops].append(hops_and_gathered(sharding_of(packed, 4, even_hops), packed))
    even, gathered = (np.array(found[each]) for each in (True, False))
    assert (even[:, 0] <= 1.05).all()
    assert gathered[:, 0].mean() > 1.1
    assert gathered[:, 1].sum() < 0.7 * even[:, 1].sum()


def test_a_style_cuts_within_documents_as_its_method_asks():
    packed = ((37, 3, 20, 4), (64,))
    positions = positions_of(packed)
    for method in ("ring", "all_gather"):
        sharding = ContextParallel(method=method, ulysses_degree=2).sharding(64, 4, positions=positions)
        assert (sharding.documents, sharding.ulysses_degree, sharding.even_hops) == (packed, 2, method == "ring")
    assert ContextParallel(balanced=False).sharding(64, 4, positions=positions).documents is None
    plain, one_document = (
        ContextParallel().sharding(64, 4, positions=each) for each in (None, positions_of([(64,), (64,)]))
    )
    for rank in range(4):  # rows of one document each are sharded as rows that are not packed
        np.testing.assert_array_equal(one_document.indices(rank), plain.indices(rank))


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_the_spans_of_keys_that_are_sent_are_those_of_the_blocks_to_compute(causal, window):
    """For indices and documents of any kind, also ranks without tokens and rows of different documents."""
    random = np.random.default_rng(5)
    found = set()
    for _ in range(60):
        length, ranks = int(random.integers(1, 14)), int(random.integers(1, 5))
        owner = random.integers(0, ranks, length)
        numbers = np.cumsum(random.random((2, length)) < 0.4, axis=1)
        indices = [random.permutation(np.flatnonzero(owner == rank)) for rank in range(ranks)]
        tokens = [Tokens(each, numbers[:, each]) for each in indices]
        needed = needed_spans(tokens, causal, window)
        for rank, hop in itertools.product(range(ranks), range(1, ranks)):
            plan = plan_blocks(tokens[(rank + hop) % ranks], tokens[rank], causal, window, None)
            keys = [keys for rows in plan for segment in rows.segments for keys in segment.keys]
            seen = min((x.start for x in keys), default=0), max((x.stop for x in keys), default=0)
            assert needed[rank][hop] == seen, (tokens, rank, hop)
            found.add(seen[1] - seen[0] == tokens[rank].count if seen[1] else None)
    # Under a window of 1 no query sees another rank's keys.
    assert found == ({None} if window == 1 else {False, True, None})


def test_documents_may_be_lists_and_are_not_all_shown():
    sharding = SequenceSharding(length=400, ranks=2, documents=[[1] * 400])
    assert sharding == SequenceSharding(length=400, ranks=2, documents=((1,) * 400,))
    assert sharding.indices(0).size == 200
    assert len(str(sharding)) < 400


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"documents": ((4, 5),)}, "documents of [4, 5] tokens in row 0 of 1; expected lengths of at least 1"),
        ({"documents": ((10,), (0, 10))}, "documents of [0, 10] tokens in row 1 of 2"),
        ({"documents": (4, 6)}, "must be the lengths of each row's documents, such as ((8, 2), (10,)), got (4, 6)"),
        ({"documents": ((4, 6),), "balanced": False}, "documents with balanced=False; expected balanced=True"),
    ],
)
def test_refuses_documents_that_do_not_fit(options, message):
    with pytest.raises(AttentionError, match=re.escape(message)):
        SequenceSharding(length=10, ranks=2, **options)


@pytest.mark.parametrize("positions", [np.arange(8), np.zeros((1, 8)), [["a"] * 8], [[[0] * 8]]])
def test_refuses_positions_that_are_no_rows_of_integers(positions):
    with pytest.raises(AttentionError, match=r"expected integers \[batch, length\], got (ndarray|list) of shape"):
        SequenceSharding.of_positions(positions, ranks=2)


def test_refuses_positions_of_another_length():
    with pytest.raises(
        AttentionError, match=re.escape("expected positions [batch, 9] of the full rows, got shape [1, 8]")
    ):
        ContextParallel(method="ring").sharding(9, 2, positions=np.zeros((1, 8), np.int64))
    assert ContextParallel(method="ring").sharding(4, 2, positions=[[0, 1, 2, 0]]).documents == ((3, 1),)
