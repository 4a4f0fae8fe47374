"""The part of each sample that a rank computes, where context parallel ranks share a sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hp_dtensor.parallel.attention import ContextParallel
from hp_trainer.data import Batch


class SequenceShares:
    """Cuts batches, which all ranks of a sequence read whole, to this rank's tokens.

    Ids, targets and positions are cut alike, so that every token keeps its target, which was shifted before, and its
    position in its document. The numbers of tokens and targets stay those of the whole global batch. Rows of packed
    documents are cut so that attention within documents is as much work for every rank; the part says by which cut.

    Args:
        style: how the model's attention shares sequences.
        ranks: that share one.
        rank: this one among them.
    """

    def __init__(self, style: ContextParallel, ranks: int, rank: int) -> None:
        self.style, self.ranks, self.rank = style, ranks, rank

    def own(self, batch: Batch) -> Batch:
        """Return this rank's part of each sample, always with positions and the cut."""
        length = batch.ids.shape[1]
        cut = self.style.cut(length, self.ranks, positions=batch.positions)
        positions = batch.positions
        if positions is None:
            positions = np.broadcast_to(np.arange(length, dtype=np.int64), batch.ids.shape)
        ids, targets, positions = (cut.take(x, self.rank) for x in (batch.ids, batch.targets, positions))
        return replace(batch, ids=ids, targets=targets, positions=positions, cut=cut)
