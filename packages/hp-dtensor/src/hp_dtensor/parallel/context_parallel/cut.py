"""Cutting a sequence over context parallel ranks: which rank holds which tokens, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_dtensor.exceptions import AttentionError
from hp_dtensor.parallel.context_parallel.balance import (
    Documents,
    balanced_places,
    document_lengths,
    head_tail_places,
    work_of_places,
)
from hp_dtensor.platform.interface import Platform

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class SequenceCut:
    """The tokens of each rank that shares a sequence.

    Ranks `r * ulysses_degree + u` with the same r exchange heads, so they hold neighbouring tokens; the others are
    the ring. Under a causal mask a token costs as much as its place, so a ring of R ranks is balanced when rank r has
    the chunks r and 2R-1-r of 2R (head and tail). Chunks need not be equally long.

    In rows of packed documents a token costs as much as its place in its document. Given their lengths, ranks have
    equally many tokens (those that do not divide apart) and equal work, within what single tokens are: heads and tails
    of documents, in parts of any size, and whole ones. All rows of a batch are cut at the same places, by the sum of
    their work; attention without a causal mask is balanced too where the batch is one row.

    Attributes:
        length: tokens of the whole sequence.
        ranks: ranks that share it.
        ulysses_degree: how many of them exchange heads.
        balanced: head and tail chunks; False: each rank has one stretch, in order.
        documents: the lengths of the documents of each row of the batch, of which attention sees no other; None: every
            row is one document.
        even_hops: for a ring, in which ranks go along together: documents that are heavy for one rank are spread over
            all, so that each hop is equal work too; False: fewer documents are cut, whose keys are gathered.

    Raises:
        AttentionError: `ulysses_degree` does not divide `ranks`, or a number is below 1 (a length: below 0); documents
            of a row that are not as long as the row, or that are not to be balanced.

    Example:
        >>> cut = SequenceCut(length=10, ranks=2)
        >>> [cut.places(rank).tolist() for rank in range(2)]
        [[0, 1, 7, 8, 9], [2, 3, 4, 5, 6]]
        >>> SequenceCut(length=10, ranks=2, ulysses_degree=2).places(1).tolist()
        [5, 6, 7, 8, 9]
        >>> packed = SequenceCut(length=10, ranks=2, documents=((8, 2),))
        >>> [packed.places(rank).tolist() for rank in range(2)]
        [[0, 1, 6, 7, 8], [2, 3, 4, 5, 9]]
    """

    length: int
    ranks: int
    ulysses_degree: int = 1
    balanced: bool = True
    documents: Documents | None = None
    even_hops: bool = True

    def __post_init__(self) -> None:
        if min(self.ranks, self.ulysses_degree) < 1 or self.length < 0 or self.ranks % self.ulysses_degree:
            raise AttentionError(
                f"SequenceCut: length {self.length} over {self.ranks} ranks of which {self.ulysses_degree} exchange "
                "heads; expected a ulysses_degree that divides the ranks, and no negative number"
            )
        if self.documents is not None:
            object.__setattr__(self, "documents", self._checked(self.documents))

    def __str__(self) -> str:
        """Return the cut as Python would show it, without most of many documents."""
        text = repr(self)
        return text if len(text) <= 300 else f"{text[:300]}..."

    @classmethod
    def of_positions(
        cls, positions: Array, *, ranks: int, ulysses_degree: int = 1, even_hops: bool = True
    ) -> SequenceCut:
        """Return the cut of rows of packed documents.

        Args:
            positions: int64 `[batch, length]`, of each token in its document, which begins at 0, as in
                `AttentionMask`; of the whole rows.
            ranks, ulysses_degree, even_hops: as of the class.

        Raises:
            AttentionError: as of the class, or positions that are not whole numbers `[batch, length]`.
        """
        given, positions = positions, np.asarray(positions)
        if positions.ndim != 2 or positions.dtype.kind not in "iu":
            raise AttentionError(
                f"SequenceCut.of_positions: expected whole numbers [batch, length], got {type(given).__name__} of "
                f"shape {list(positions.shape)} and {positions.dtype}"
            )
        # With rows that are one document too: shapes stay the same from batch to batch.
        return cls(
            length=positions.shape[1],
            ranks=ranks,
            ulysses_degree=ulysses_degree,
            documents=document_lengths(positions),
            even_hops=even_hops,
        )

    @property
    def ring_size(self) -> int:
        """Ranks that share the sequence once heads are exchanged."""
        return self.ranks // self.ulysses_degree

    def places(self, rank: int) -> Array:
        """Return the places in the whole sequence of a rank's tokens, in the order in which it holds them.

        Raises:
            AttentionError: there is no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise AttentionError(f"SequenceCut: rank {rank} of {self.ranks}; expected one from 0 to {self.ranks - 1}")
        ring, within = divmod(rank, self.ulysses_degree)
        return np.array_split(self.ring_places(ring), self.ulysses_degree)[within]

    def ring_places(self, ring: int) -> Array:
        """Return the places of the tokens that the ranks of one Ulysses group hold together."""
        size = self.ring_size
        if not self.balanced or size == 1:
            return _chunk(self.length, size, ring)
        if self.documents:
            return balanced_places(self.documents, size, self.even_hops)[ring]
        return head_tail_places(self.length, size)[ring]

    def lengths(self) -> list[int]:
        """Return the number of tokens of each rank."""
        return [int(self.places(rank).size) for rank in range(self.ranks)]

    def work(self) -> tuple[int, ...]:
        """Return for each ring rank the scores that its queries have in rows of `documents` under a causal mask.

        The busiest one over the mean is how much longer attention takes than if it were equally shared.
        """
        documents = self.documents or ((self.length,),)
        return work_of_places(documents, [self.ring_places(ring) for ring in range(self.ring_size)])

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

    def _checked(self, documents: Any) -> Documents:
        """Return documents as tuples, which can be compared and hashed."""
        if not self.balanced:
            raise AttentionError(
                "SequenceCut: documents with balanced=False; expected balanced=True, or documents=None where each rank "
                "has one stretch"
            )
        try:
            found = tuple(tuple(int(length) for length in row) for row in documents)
        except (TypeError, ValueError):
            raise AttentionError(
                f"SequenceCut: documents must be the lengths of each row's documents, such as ((8, 2), (10,)), "
                f"got {documents!r}"
            ) from None
        for row, lengths in enumerate(found):
            if sum(lengths) != self.length or min(lengths, default=1) < 1:
                raise AttentionError(
                    f"SequenceCut: documents of {list(lengths[:8])} tokens in row {row} of {len(documents)}; expected "
                    f"lengths of at least 1 that make up the row's {self.length}"
                )
        return found

    def _check_length(self, x: Any, dim: int) -> None:
        if x.shape[dim] != self.length:
            raise AttentionError(
                f"SequenceCut of {self.length} tokens: dimension {dim} of a tensor {list(x.shape)} is another length"
            )


def _chunk(length: int, count: int, index: int) -> Array:
    return np.arange(index * length // count, (index + 1) * length // count)
