"""`AttentionMask`, the rule for the keys that a query sees, and the tokens of one rank as the mask needs them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hp_dtensor.exceptions import AttentionError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any
Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """The keys that each query sees; make one per forward pass and hand it to every layer.

    Token i of a sequence sees token j where all of these hold. Where there are fewer queries than keys, the queries
    are the last ones of the sequence, as with a cache of keys.

    Attributes:
        causal: j is not after i.
        window: j is less than this many tokens away (`window=1`: a token sees itself alone), as the sliding window of
            Mistral (arXiv 2310.06825); None: any number.
        positions: int64 `[batch, keys]`, a tensor or an array: the position of each token in its document, which
            begins at 0 in each of the documents that follow each other in a row; i and j are of one document. None:
            each row is one document. Under context parallelism it has the positions of this rank's tokens.

    Raises:
        AttentionError: a window below 1.

    Example:
        >>> mask = AttentionMask(window=2, positions=np.array([[0, 1, 2, 0, 1]]))
        >>> mask.documents(platform).tolist()
        [[0, 0, 0, 1, 1]]
    """

    causal: bool = True
    window: int | None = None
    positions: Any = None
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.window is not None and (not isinstance(self.window, int) or self.window < 1):
            raise AttentionError(f"AttentionMask: window must be None or an integer of at least 1, got {self.window!r}")

    def documents(self, platform: Platform) -> Array | None:
        """Return the number of each token's document in its row `[batch, keys]`; None where every row is one."""
        if self.positions is None:
            return None
        found: Array | None = self.remembered(
            "documents", lambda: documents_of(host_integers(platform, self.positions))
        )
        return found

    def remembered(self, key: Any, find: Any) -> Any:
        """Return `find()`, which is called once per mask and key: layers that share a mask share what it takes."""
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    def of_rows(self, positions: Tensor) -> AttentionMask:
        """Return the same mask for other rows of the batch."""
        return AttentionMask(self.causal, self.window, positions)


def documents_of(positions: Array) -> Array | None:
    """Return the number of each token's document `[batch, length]`; None where every row is one document."""
    documents = np.cumsum(positions == 0, axis=1)
    documents = documents - documents[:, :1]
    return documents if documents.any() else None


def host_integers(platform: Platform, x: Any) -> Array:
    """Return a tensor or array of integers on the host."""
    if isinstance(x, np.ndarray):
        return x.astype(np.int64, copy=False)
    if isinstance(x, DTensor):
        x = x.full_tensor()
    return np.asarray(platform.to_numpy(x)).astype(np.int64, copy=False)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens that a rank holds queries or keys of, in the order in which it holds them.

    Attributes:
        places: `[tokens]`, the place of each in the whole sequence.
        documents: `[batch, tokens]`, the number of each one's document; None: every row is one document.
    """

    places: Array
    documents: Array | None = None

    @property
    def count(self) -> int:
        return int(self.places.size)

    def runs(self, row: int) -> list[Run]:
        """Return the stretches of tokens that follow each other in one document of a row."""
        if not self.count:
            return []
        breaks = np.diff(self.places) != 1
        if self.documents is not None:
            breaks |= np.diff(self.documents[row]) != 0
        bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), self.count]
        return [
            Run(start, int(self.places[start]), stop - start, self._document(row, start))
            for start, stop in itertools.pairwise(bounds)
        ]

    def _document(self, row: int, token: int) -> int:
        return 0 if self.documents is None else int(self.documents[row, token])


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens that follow each other in one document.

    Attributes:
        start: the first one's index among the tokens that the rank holds.
        place: its place in the whole sequence.
        length: their number.
        document: the number of their document.
    """

    start: int
    place: int
    length: int
    document: int

    @property
    def stop(self) -> int:
        """The place after the last one in the whole sequence."""
        return self.place + self.length
