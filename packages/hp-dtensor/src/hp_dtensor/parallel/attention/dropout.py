"""Dropout of attention by place: which entries of the softmax are dropped does not depend on who computes them.

An entry is dropped or kept by a number that is hashed from the seed of its row of the batch, its head, its query's and
its key's place in the whole sequence (`hp_dtensor.platform.attention.kept_entries`). So one device and any ranks that
share rows, heads or the sequence drop the same entries, in forward, in backward and when a forward is repeated, and no
mask is ever kept.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_dtensor.exceptions import AttentionError
from hp_dtensor.parallel.attention.mask import host_integers
from hp_dtensor.platform.attention import mixed, steps_of
from hp_dtensor.platform.interface import Platform

Tensor = Any
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class AttentionDropout:
    """Entries of the softmax that become zero; the others are divided by `1 - p`.

    Give each layer and each step a seed of its own; a forward that is repeated has the same.

    Attributes:
        p: the probability with which an entry is dropped, from 0 to 1.
        seed: an integer, of which each row of the batch makes its own; or int64 `[batch]`, one for each row, such as a
            hash of the sample's number, so that ranks with other rows drop what one device would.
        heads: int64 `[heads]`, the number of each query head in the whole layer, where the tensors are plain and have
            some of its heads; None: 0, 1, ... (heads of DTensors know their numbers).

    Raises:
        AttentionError: `p` is no probability.

    Example:
        >>> q = k = v = platform.from_numpy(np.ones((1, 2, 3, 4), "float32"))
        >>> halves = AttentionDropout(0.5, seed=1)
        >>> one, again = (attention(q, k, v, mask=AttentionMask(), dropout=halves) for _ in range(2))
        >>> np.array_equal(platform.to_numpy(one), platform.to_numpy(again))
        True
    """

    p: float
    seed: Any
    heads: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.p, bool) or not isinstance(self.p, (int, float)) or not 0 <= self.p <= 1:
            raise AttentionError(f"AttentionDropout: p must be a number from 0 to 1, got {self.p!r}")

    @classmethod
    def of_rows(cls, p: float, rows: Array, *keys: int) -> AttentionDropout:
        """Return the dropout of rows with these numbers.

        Args:
            rows: int64 `[batch]`, the number of each row in the whole run, on whichever rank it is.
            keys: the seed of the run, the layer: what else tells seeds apart.

        Example:
            >>> one, other = (AttentionDropout.of_rows(0.1, np.array([7, 8]), layer) for layer in (0, 1))
            >>> len({*one.seed.tolist(), *other.seed.tolist()})
            4
        """
        seeds = np.array(rows, np.int64).view(np.uint64)
        for key in keys:
            seeds = mixed(seeds + steps_of(np.array([key])))
        return cls(p, seeds.view(np.int64))

    def rows(self, platform: Platform, batch: int) -> Array:
        """Return the seed of each row, int64 `[batch]`."""
        if isinstance(self.seed, (int, np.integer)):
            return np.array([_seed_of_row(int(self.seed), row) for row in range(batch)], np.uint64).view(np.int64)
        return self._checked("seed", host_integers(platform, self.seed), batch, "rows of the batch")

    def numbers(self, platform: Platform, heads: int) -> Array:
        """Return the number of each head in the whole layer, int64 `[heads]`."""
        if self.heads is None:
            return np.arange(heads)
        return self._checked("heads", host_integers(platform, self.heads), heads, "query heads")

    def _checked(self, name: str, found: Array, size: int, what: str) -> Array:
        if found.shape != (size,):
            raise AttentionError(f"AttentionDropout: {name} {list(found.shape)} must be one for each of {size} {what}")
        return found


@dataclass(frozen=True, eq=False)
class PlacedDropout:
    """The dropout of a call on this rank: whose rows and heads it has, and the places of its queries and keys.

    Attributes:
        rows, heads, queries, keys: int64 vectors.
    """

    p: float
    rows: Array
    heads: Array
    queries: Array
    keys: Array

    def of(self, **parts: Array | slice) -> PlacedDropout:
        """Return it for other rows, heads, queries or keys, given as vectors or as slices of these."""
        cut: dict[str, Any] = {name: getattr(self, name)[x] if isinstance(x, slice) else x for name, x in parts.items()}
        return dataclasses.replace(self, **cut)

    def factors(self, platform: Platform) -> Tensor:
        """Return what the entries are multiplied by, float32 `[rows, heads, queries, keys]`."""
        return platform.dropout_factors(self.p, self.rows, self.heads, self.queries, self.keys)


def placed(
    platform: Platform, dropout: AttentionDropout | None, query: Tensor, queries: Array, keys: Array
) -> PlacedDropout | None:
    """Return the dropout of a call with plain `query` and the places of its queries and keys; None: nothing drops."""
    if dropout is None or dropout.p == 0:
        return None
    rows, heads = dropout.rows(platform, query.shape[0]), dropout.numbers(platform, query.shape[1])
    return PlacedDropout(float(dropout.p), rows, heads, queries, keys)


def _seed_of_row(seed: int, row: int) -> int:
    """Return the seed of a row of the batch: seeds that follow each other share no rows."""
    return (seed * 0xD1342543DE82EF95 + row * 0x9E3779B97F4A7C15 + 1) % 2**64
