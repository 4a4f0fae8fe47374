"""Ranks that share packed samples get equal work, and record how the samples are sharded."""

from __future__ import annotations

import numpy as np

from hp_dtensor.parallel.attention import ContextParallel
from hp_trainer.data import Batch
from hp_trainer.training.pipelined_model import SequenceSharder

STYLE = ContextParallel(balanced=True, length=64, replicated_without_positions=True)


def batch_of(positions):
    ids = np.arange(128).reshape(2, 64)
    return Batch(ids, ids + 1, positions, np.arange(2), 128, 128)


def test_packed_samples_are_sharded_within_their_documents():
    rows = ((40, 4, 10, 10), (44, 20))
    positions = np.array([np.concatenate([np.arange(size) for size in row]) for row in rows])
    parts = [SequenceSharder(STYLE, 4, rank).shard(batch_of(positions)) for rank in range(4)]
    assert {part.sharding for part in parts} == {STYLE.sharding(64, 4, positions=positions)}
    work = [(part.positions + 1).sum() for part in parts]
    assert max(work) < 1.05 * np.mean(work)  # 1.94 by head and tail of rows; a single token is up to 15 %
    np.testing.assert_array_equal(parts[0].sharding.unshard([part.ids for part in parts]), batch_of(None).ids)
    assert all((part.targets == part.ids + 1).all() for part in parts)


def test_samples_of_one_document_are_sharded_by_their_length():
    parts = [SequenceSharder(STYLE, 2, rank).shard(batch_of(None)) for rank in range(2)]
    assert parts[0].sharding == STYLE.sharding(64, 2)
    for part in parts:
        np.testing.assert_array_equal(part.ids % 64, part.positions)
