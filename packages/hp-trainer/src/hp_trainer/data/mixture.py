"""Mixture: samples of several sources in fixed proportions, as a pure function of the position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from hp_trainer.data.dataset import Rows, Samples
from hp_trainer.data.order import SampleOrder

_LARGEST = 1 << 20


class MixedSamples(Samples):
    """Samples of several sources, one after the other; read in an order that mixes them.

    Args:
        sources: at least one, none of them empty.
        weights: how often samples of each source come; None: as often as there are samples of it.
    """

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float] | None = None) -> None:
        self.sources = tuple(sources)
        self.lengths = np.array([len(source) for source in sources], np.int64)
        self.weights = whole_weights(self.lengths.tolist() if weights is None else weights)
        self._offsets = np.concatenate([[0], np.cumsum(self.lengths)])

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def read(self, indices: np.ndarray) -> Rows:
        """Return the samples of `indices` (`[n]`), in their order."""
        made: Rows | None = None
        for source, inside, own in self._by_source(indices):
            rows = source.read(own)
            made = Rows.empty(len(indices), rows) if made is None else made
            made.put(inside, rows)
        return made if made is not None else self.sources[0].read(indices)

    def num_targets(self, indices: np.ndarray) -> int:
        """Return the number of targets of these samples."""
        return sum(source.num_targets(own) for source, _, own in self._by_source(indices))

    def order(self, seed: int) -> MixedOrder:
        """Return the order that mixes the sources."""
        return MixedOrder(self.lengths.tolist(), self.weights, seed)

    def _by_source(self, indices: np.ndarray) -> list[tuple[Samples, np.ndarray, np.ndarray]]:
        """Return, for each source that has some of `indices`, which those are and their numbers in the source."""
        of = np.searchsorted(self._offsets, indices, side="right") - 1
        return [(self.sources[n], of == n, indices[of == n] - self._offsets[n]) for n in np.unique(of)]


class MixedOrder:
    """The sample at each global position, where every run of positions holds the sources in their proportions.

    Positions are dealt out by a tree: of the first n positions of a node, round(n * share) go to its first half of the
    sources. Any source's k-th position is then known in O(log(sources)) without what came before, and its k-th sample
    is that of its own `SampleOrder`, so each source goes through its own epochs.

    Args:
        lengths: samples of each source.
        weights: whole numbers, at most about 2**20 in all.
        seed: of the order in each source.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[int], seed: int) -> None:
        self._weights = list(weights)
        self._offsets = np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))])
        self._orders = [SampleOrder(length, seed + number) for number, length in enumerate(lengths)]

    def samples(self, first: int, count: int) -> np.ndarray:
        """Return the samples at global positions `first` to `first + count - 1`: int64 of shape `[count]`."""
        result = np.empty(count, np.int64)
        positions = np.arange(first, first + count, dtype=np.int64)
        self._deal(positions, np.arange(count), 0, len(self._weights), result)
        return result

    def _deal(self, positions: np.ndarray, places: np.ndarray, begin: int, end: int, result: np.ndarray) -> None:
        """Fill `places` of `result` with the samples at `positions` of the node of sources `begin` to `end - 1`."""
        if not len(positions):
            return
        if end - begin == 1:
            result[places] = self._orders[begin].at(positions) + self._offsets[begin]
            return
        middle = (begin + end) // 2
        share, whole = sum(self._weights[begin:middle]), sum(self._weights[begin:end])
        # Whole numbers alone: round(n * share / whole) at n and n + 1 differ where the position goes to the first half.
        before, after = ((n * share + whole // 2) // whole for n in (positions, positions + 1))
        mine = after > before
        self._deal(before[mine], places[mine], begin, middle, result)
        self._deal((positions - before)[~mine], places[~mine], middle, end, result)


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return positive whole numbers in the proportions of `weights`; exact where these are small whole numbers.

    Products with positions then stay within 64 bits: the sum is at most about 2**20.
    """
    total = sum(map(Fraction, weights))
    shares = [(Fraction(weight) / total).limit_denominator(10**6) for weight in weights]
    common = math.lcm(*(share.denominator for share in shares))
    scale = min(common, _LARGEST)
    return [max(1, round(share * scale)) for share in shares]
