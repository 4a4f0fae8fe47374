"""Cutting a sequence over context parallel ranks: which rank holds which tokens, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_dtensor.exceptions import AttentionError
from hp_dtensor.platform.interface import Platform

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class SequenceCut:
    """The tokens of each rank that shares a sequence.

    Ranks `r * ulysses_degree + u` with the same r exchange heads, so they hold neighbouring tokens; the others are
    the ring. Under a causal mask a token costs as much as its place, so a ring of R ranks is balanced when rank r has
    the chunks r and 2R-1-r of 2R (head and tail). Chunks need not be equally long.

    Attributes:
        length: tokens of the whole sequence.
        ranks: ranks that share it.
        ulysses_degree: how many of them exchange heads.
        balanced: head and tail chunks; False: each rank has one stretch, in order.

    Raises:
        AttentionError: `ulysses_degree` does not divide `ranks`, or a number is below 1 (a length: below 0).

    Example:
        >>> cut = SequenceCut(length=10, ranks=2)
        >>> [cut.places(rank).tolist() for rank in range(2)]
        [[0, 1, 7, 8, 9], [2, 3, 4, 5, 6]]
        >>> SequenceCut(length=10, ranks=2, ulysses_degree=2).places(1).tolist()
        [5, 6, 7, 8, 9]
    """

    length: int
    ranks: int
    ulysses_degree: int = 1
    balanced: bool = True

    def __post_init__(self) -> None:
        if min(self.ranks, self.ulysses_degree) < 1 or self.length < 0 or self.ranks % self.ulysses_degree:
            raise AttentionError(
                f"SequenceCut: length {self.length} over {self.ranks} ranks of which {self.ulysses_degree} exchange "
                "heads; expected a ulysses_degree that divides the ranks, and no negative number"
            )

    @property
    def ring_size(self) -> int:
        """Ranks that share the sequence once heads are exchanged."""
        return self.ranks // self.ulysses_degree

    def places(self, rank: int) -> Array:
        """Return the places in the whole sequence of a rank's tokens, in the order in which it holds them."""
        ring, within = divmod(rank, self.ulysses_degree)
        return np.array_split(self.ring_places(ring), self.ulysses_degree)[within]

    def ring_places(self, ring: int) -> Array:
        """Return the places of the tokens that the ranks of one Ulysses group hold together."""
        size = self.ring_size
        if not self.balanced or size == 1:
            return _chunk(self.length, size, ring)
        return np.concatenate([_chunk(self.length, 2 * size, ring), _chunk(self.length, 2 * size, 2 * size - 1 - ring)])

    def lengths(self) -> list[int]:
        """Return the number of tokens of each rank."""
        return [int(self.places(rank).size) for rank in range(self.ranks)]

    def take(self, x: Any, rank: int, dim: int = 1, platform: Platform | None = None) -> Any:
        """Return a rank's part of `x`, an array or (with `platform`) a tensor, which is whole along `dim`."""
        self._check_length(x, dim)
        places = self.places(rank)
        if platform is None or isinstance(x, np.ndarray):
            return np.ascontiguousarray(np.take(x, places, dim))
        return platform.ops.index_select(x, dim, platform.from_numpy(places))

    def restore(self, parts: Sequence[Any], dim: int = 1, platform: Platform | None = None) -> Any:
        """Return the whole of which `parts` are the ranks' parts along `dim`, in rank order: the inverse of `take`."""
        order = np.argsort(np.concatenate([self.places(rank) for rank in range(self.ranks)]), kind="stable")
        if platform is None or isinstance(parts[0], np.ndarray):
            return np.ascontiguousarray(np.take(np.concatenate(list(parts), dim), order, dim))
        return platform.ops.index_select(platform.ops.cat(list(parts), dim), dim, platform.from_numpy(order))

    def _check_length(self, x: Any, dim: int) -> None:
        if x.shape[dim] != self.length:
            raise AttentionError(
                f"SequenceCut of {self.length} tokens: dimension {dim} of a tensor {list(x.shape)} is another length"
            )


def _chunk(length: int, count: int, index: int) -> Array:
    return np.arange(index * length // count, (index + 1) * length // count)
