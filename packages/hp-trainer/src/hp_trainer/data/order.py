"""Orders of samples: which sample is read at each global position of a run.

Position p of n samples is in epoch p // n and reads sample `permutation(p % n)` of that epoch. The permutation is
computed for each position and never stored. It does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

_ROUNDS = 8
_LARGEST = 1 << 20


class SampleOrder:
    """A pseudo-random permutation per epoch, computed in O(1) memory and O(1) time per position.

    The permutation is a balanced Feistel network over the smallest domain with an even number of bits that contains all
    samples. Cycle walking restricts it to the samples, in fewer than four steps on average (Black and Rogaway, 2002,
    "Ciphers with arbitrary finite domains").

    Args:
        num_samples: number of samples of an epoch, at least 1.
        seed: seed of the permutations.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        # Two halves of equally many bits, so that the network can swap them.
        self._half_bits = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))

    def samples(self, first: int, count: int) -> np.ndarray:
        """Return the samples at global positions `first` to `first + count - 1`: int64 of shape `[count]`."""
        return self.at(np.arange(first, first + count, dtype=np.int64))

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at the given global positions. Both are int64 of shape `[n]`."""
        epochs, indices = np.divmod(positions, self.num_samples)
        result = np.empty(len(positions), dtype=np.int64)
        # A batch spans more than one epoch only at its boundary, or where the samples are few.
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            result[inside] = self._permute(indices[inside].astype(np.uint64), int(epoch))
        return result

    def _permute(self, values: np.ndarray, epoch: int) -> np.ndarray:
        # Seeds and epochs are mixed first: neighbouring ones must not give related keys.
        start = _mix(np.array([self.seed % 2**64], dtype=np.uint64)) ^ np.uint64(epoch)
        keys = _mix(_mix(start) + np.arange(1, _ROUNDS + 1, dtype=np.uint64))
        values = self._feistel(values, keys)
        outside = values >= self.num_samples
        # Cycle walking (Black and Rogaway, 2002): a value outside the samples is permuted again until it is inside. The
        # result is still a permutation. The domain is less than four times as large as the number of samples.
        while outside.any():
            values[outside] = self._feistel(values[outside], keys)
            outside = values >= self.num_samples
        return values.astype(np.int64)

    def _feistel(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        bits = self._half_bits
        mask = (np.uint64(1) << bits) - np.uint64(1)
        left, right = values >> bits, values & mask
        # A round is invertible whatever `_mix` returns, so the whole network is a permutation.
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        joined: np.ndarray = (left << bits) | right
        return joined


def _mix(x: np.ndarray) -> np.ndarray:
    """Mix bits with the finalizer of splitmix64 (Steele, Lea and Flood, 2014). Unsigned arithmetic wraps at 2**64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


class MixedOrder:
    """An order that interleaves several sources in fixed proportions.

    A binary tree distributes positions to sources: of the first n positions of a node, round(n * share) belong to the
    first half of its sources. The source of any position, and the position within that source, are computed in
    O(log(sources)) without looking at earlier positions. Each source has its own `SampleOrder`, so its own epochs.

    Args:
        lengths: number of samples of each source.
        weights: integer weights; their sum is at most about 2**20.
        seed: seed of the first source's order; the others count up from it.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[int], seed: int) -> None:
        self._weights = list(weights)
        self._offsets = np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))])
        self._orders = [SampleOrder(length, seed + number) for number, length in enumerate(lengths)]

    def samples(self, first: int, count: int) -> np.ndarray:
        """Return the samples at global positions `first` to `first + count - 1`: int64 of shape `[count]`."""
        result = np.empty(count, np.int64)
        positions = np.arange(first, first + count, dtype=np.int64)
        self._distribute(positions, np.arange(count), 0, len(self._weights), result)
        return result

    def _distribute(self, positions: np.ndarray, out: np.ndarray, begin: int, end: int, result: np.ndarray) -> None:
        """Write the samples at `positions` of the node with sources `begin` to `end - 1` to `result[out]`."""
        if not len(positions):
            return
        if end - begin == 1:
            result[out] = self._orders[begin].at(positions) + self._offsets[begin]
            return
        middle = (begin + end) // 2
        share, total = sum(self._weights[begin:middle]), sum(self._weights[begin:end])
        # In integers, so that every machine agrees: position n belongs to the first half where round(n * share / total)
        # increases from n to n + 1.
        before, after = ((n * share + total // 2) // total for n in (positions, positions + 1))
        first = after > before
        self._distribute(before[first], out[first], begin, middle, result)
        self._distribute((positions - before)[~first], out[~first], middle, end, result)


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Return positive integers in the proportions of `weights`. Small integers keep their exact proportions.

    The sum is at most about 2**20, so that products with positions fit into 64 bits.
    """
    total = sum(map(Fraction, weights))
    shares = [(Fraction(weight) / total).limit_denominator(10**6) for weight in weights]
    common = math.lcm(*(share.denominator for share in shares))
    # The least common multiple keeps the proportions exact; a larger one is rounded.
    scale = min(common, _LARGEST)
    return [max(1, round(share * scale)) for share in shares]
