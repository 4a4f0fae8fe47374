"""Rows of documents: none is lost, none sees another, and each target is counted before it is read."""

from __future__ import annotations

import numpy as np
import pytest

from hp_trainer.data import IGNORED, BatchReader, DocumentWindows, MixedSamples, PackedSamples, Rows, TokenSamples
from hp_trainer.data.dataset import integer_weights
from hp_trainer.data.samples import best_fit

LENGTHS = [5, 1, 9, 2, 14, 3, 3, 7]
TOKENS = np.arange(100, 100 + sum(LENGTHS), dtype=np.uint16)
ENDS = np.cumsum(LENGTHS)
STARTS = ENDS - LENGTHS
# The tokens 2, 5, 8, ... are answers.
PREDICTED = np.arange(len(TOKENS)) % 3 == 2


def pairs_of(rows: Rows) -> list[tuple[int, int]]:
    """Each (token, token to predict after it)."""
    counted = rows.targets != IGNORED
    return sorted(zip(rows.ids[counted].tolist(), rows.targets[counted].tolist(), strict=True))


def pairs_in_documents(taken: np.ndarray | None = None) -> list[tuple[int, int]]:
    return [
        (int(TOKENS[i]), int(TOKENS[i + 1]))
        for start, end in zip(STARTS, ENDS, strict=True)
        for i in range(start, end - 1)
        if taken is None or taken[i + 1]
    ]


def packed(length: int, **options: object) -> PackedSamples:
    return PackedSamples(TOKENS, STARTS, ENDS, length, pad=7, **options)


@pytest.mark.parametrize("length", [4, 6, 14, 50])
@pytest.mark.parametrize("together", [True, False])
def test_whole_documents_predict_each_token_once(length: int, together: bool) -> None:
    samples = packed(length, together=together)
    rows = samples.read(np.arange(len(samples)))
    assert pairs_of(rows) == pairs_in_documents()
    assert rows.ids.shape == (len(samples), length)
    assert samples.num_targets(np.arange(len(samples))) == len(pairs_in_documents())
    for row in range(len(samples)):
        assert samples.num_targets(np.array([row])) == np.sum(rows.targets[row] != IGNORED)


@pytest.mark.parametrize("make", [packed, lambda length: DocumentWindows(TOKENS, ENDS, length)])
def test_positions_count_within_documents(make) -> None:
    samples = make(6)
    rows = samples.read(np.arange(len(samples)))
    for ids, positions in zip(rows.ids, rows.positions, strict=True):
        assert positions[0] == 0
        for i in range(1, 6):
            document = np.searchsorted(ENDS, np.array([ids[i - 1], ids[i]]) - 100, side="right")
            goes_on = document[0] == document[1] and ids[i] == ids[i - 1] + 1
            if ids[i] != 7:
                assert positions[i] == (positions[i - 1] + 1 if goes_on else 0)
            else:
                assert positions[i] == (positions[i - 1] + 1 if ids[i - 1] == 7 else 0)


def test_windows_of_documents_predict_what_lies_in_a_document() -> None:
    samples, plain = DocumentWindows(TOKENS, ENDS, 6), TokenSamples(TOKENS, 6)
    everything = np.arange(len(samples))
    rows, before = samples.read(everything), plain.read(everything)
    assert np.array_equal(rows.ids, before.ids)
    assert pairs_of(rows) == [pair for pair in pairs_in_documents() if pair in pairs_of(before)]
    for one in everything:
        assert samples.num_targets(np.array([one])) == np.sum(rows.targets[one] != IGNORED)


def test_answers_alone_are_predicted_and_what_is_too_long_is_truncated() -> None:
    samples = packed(50, predicted=PREDICTED)
    rows = samples.read(np.arange(len(samples)))
    assert pairs_of(rows) == pairs_in_documents(PREDICTED)
    assert samples.num_targets(np.arange(len(samples))) == len(pairs_in_documents(PREDICTED))
    short = packed(4, predicted=PREDICTED, keep_rest=False, together=False)
    rows = short.read(np.arange(len(short)))
    assert pairs_of(rows) == [
        pair for pair in pairs_in_documents(PREDICTED) if any(start < pair[1] - 100 <= start + 4 for start in STARTS)
    ]
    assert (rows.targets != IGNORED).any(1).all(), "a row without a target is left out"


def test_rows_are_filled_well_and_within_their_length() -> None:
    sizes = np.random.default_rng(0).integers(1, 101, 5000)
    pieces, ends = best_fit(sizes, 100)
    assert sorted(pieces.tolist()) == list(range(5000))
    filled = np.add.reduceat(sizes[pieces], np.concatenate([[0], ends[:-1]]))
    assert filled.max() <= 100
    assert filled.mean() > 99


# Mixtures ----------------------------------------------------------------------------------------------------


def mixture(weights: list[float] | None = None) -> MixedSamples:
    sources = [TokenSamples(np.arange(n * 1000, n * 1000 + 4 * count + 1), 4) for n, count in enumerate((30, 7, 50))]
    return MixedSamples(sources, weights)


def sources_of(samples: MixedSamples, first: int, count: int) -> np.ndarray:
    return samples.read(samples.order(3).samples(first, count)).ids[:, 0] // 1000


def test_sources_come_as_often_as_their_weights_say_in_every_span() -> None:
    found = sources_of(mixture([2, 1, 1]), 0, 4000)
    assert np.bincount(found).tolist() == [2000, 1000, 1000]
    for begin in range(0, 4000, 40):
        assert abs(np.bincount(found[begin : begin + 40], minlength=3) - [20, 10, 10]).max() <= 2


def test_without_weights_an_epoch_holds_every_sample_once() -> None:
    samples = mixture()
    assert sorted(samples.order(3).samples(0, 87).tolist()) == list(range(87))
    assert sorted(samples.order(3).samples(87, 87).tolist()) == list(range(87))


def test_each_source_goes_through_its_own_epochs() -> None:
    samples = mixture([1, 2, 1])
    found = samples.order(3).samples(0, 14 * 2)
    second = found[(found >= 30) & (found < 37)]
    assert sorted(second.tolist()) == sorted(list(range(30, 37)) * 2)


def test_any_position_of_a_mixture_is_computed_alone() -> None:
    order = mixture([0.7, 0.2, 0.1]).order(3)
    far = order.samples(10**12, 50)
    assert np.array_equal(far[20:30], order.samples(10**12 + 20, 10))
    assert len(set(far.tolist())) > 20


def test_a_mixture_reads_and_counts_what_its_sources_do() -> None:
    samples = MixedSamples([packed(6), DocumentWindows(TOKENS, ENDS, 6)])
    everything = np.arange(len(samples))[::-1]
    rows, parts = samples.read(everything), [source.read(np.arange(len(source))) for source in samples.sources]
    for name in ("ids", "targets", "positions"):
        assert np.array_equal(getattr(rows, name)[::-1], np.concatenate([getattr(part, name) for part in parts]))
    assert samples.num_targets(everything) == sum(np.sum(part.targets != IGNORED) for part in parts)
    assert [len(one.ids) for one in (samples.read(everything[:0]),)] == [0]


@pytest.mark.parametrize("num_shares", [2, 3])
def test_ranks_share_a_mixture_of_packed_rows(num_shares: int) -> None:
    samples = MixedSamples([packed(6), DocumentWindows(TOKENS, ENDS, 6)], [3, 1])
    one = BatchReader(samples, global_batch_size=5, seed=1)
    shares = [
        BatchReader(samples, global_batch_size=5, seed=1, num_shares=num_shares, share=n) for n in range(num_shares)
    ]
    for position in (0, 5, 500):
        full, parts = one.read(position), [share.read(position) for share in shares]
        assert {part.global_targets for part in parts} == {np.sum(full.targets != IGNORED)}
        for name in ("ids", "targets", "positions", "samples"):
            assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(full, name))


def test_weights_become_whole_numbers_in_their_proportions() -> None:
    assert integer_weights([0.7, 0.3]) == [7, 3]
    assert integer_weights([3, 1, 4]) == [3, 1, 4]
    assert integer_weights([1e-9, 1.0]) == [1, 1]
    huge = integer_weights([10**12, 3 * 10**12 + 1, 1])
    assert huge[1] / huge[0] == pytest.approx(3, rel=1e-5)
    assert sum(huge) <= 2**20 + 3
