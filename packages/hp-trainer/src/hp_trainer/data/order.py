"""The order of samples: a pseudo-random permutation per epoch that is computed, never stored.

A sample of the run has a global position 0, 1, 2, ...; position p is in epoch p // n and is sample
`permutation(p % n)` of that epoch. Nothing depends on the number of ranks, so neither does the data order.
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 8


class SampleOrder:
    """The sample at each global position, computed in O(1) memory and O(1) time per position.

    Each epoch's permutation is a balanced Feistel network over the smallest even-bit domain that holds all
    samples, walked until it falls inside (Black and Rogaway, 2002, "Ciphers with arbitrary finite domains");
    on average fewer than four steps.

    Args:
        num_samples: samples of an epoch, at least 1.
        seed: another seed gives another order.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self._half_bits = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))

    def samples(self, first: int, count: int) -> np.ndarray:
        """Return the samples at global positions `first` to `first + count - 1`: int64 of shape `[count]`."""
        return self.at(np.arange(first, first + count, dtype=np.int64))

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at these global positions (int64 `[n]`): int64 of shape `[n]`."""
        epochs, indices = np.divmod(positions, self.num_samples)
        result = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            result[inside] = self._permute(indices[inside].astype(np.uint64), int(epoch))
        return result

    def _permute(self, values: np.ndarray, epoch: int) -> np.ndarray:
        keys = _round_keys(self.seed, epoch)
        values = self._feistel(values, keys)
        outside = values >= self.num_samples
        # Cycle walking (Black and Rogaway, 2002): a number beyond the samples is permuted until it is one of them. The
        # whole stays a permutation, of a range less than four times as large.
        while outside.any():
            values[outside] = self._feistel(values[outside], keys)
            outside = values >= self.num_samples
        return values.astype(np.int64)

    def _feistel(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        bits = self._half_bits
        mask = (np.uint64(1) << bits) - np.uint64(1)
        left, right = values >> bits, values & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        joined: np.ndarray = (left << bits) | right
        return joined


def _round_keys(seed: int, epoch: int) -> np.ndarray:
    start = _mix(np.array([seed % 2**64], dtype=np.uint64)) ^ np.uint64(epoch)
    return _mix(_mix(start) + np.arange(1, _ROUNDS + 1, dtype=np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """Mix bits by the splitmix64 finalizer, modulo 2**64 as unsigned arithmetic is (Steele, Lea and Flood, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
