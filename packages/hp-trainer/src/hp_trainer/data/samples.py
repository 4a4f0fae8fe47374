"""Samples of a corpus: windows of all its tokens, or rows of whole documents."""

from __future__ import annotations

import numpy as np

from hp_trainer.data.dataset import IGNORED, Rows, Samples
from hp_trainer.data.packing import best_fit, cut_documents


class TokenSamples(Samples):
    """Consecutive windows of a row of tokens; each window's last target is the next one's first input.

    Args:
        tokens: integers `[tokens]`.
        sequence_length: places of a window.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int) -> None:
        self._tokens = tokens
        self._length = sequence_length

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._length)

    def read(self, indices: np.ndarray) -> Rows:
        """Return the windows of `indices` (`[n]`), each with the token after it as the last target."""
        return Rows.successors(np.asarray(self._tokens[self._places(indices, self._length + 1)], dtype=np.int64))

    def num_targets(self, indices: np.ndarray) -> int:
        """Return the number of targets of these samples: every place has one."""
        return len(indices) * self._length

    def _places(self, indices: np.ndarray, length: int) -> np.ndarray:
        places: np.ndarray = indices[:, None] * self._length + np.arange(length)
        return places


class DocumentWindows(TokenSamples):
    """The same windows with every document by itself: positions begin again, and none predicts the next document.

    A document that a window cuts off goes on in the next window as another one.

    Args:
        ends: place after each document's last token, int64 `[documents]`, increasing.
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray, sequence_length: int) -> None:
        super().__init__(tokens, sequence_length)
        self._ends = ends

    def read(self, indices: np.ndarray) -> Rows:
        """Return the windows of `indices` (`[n]`)."""
        rows = super().read(indices)
        places = self._places(indices, self._length)
        # An end is the place after a document's last token: `right` gives the place at an end to the next document.
        document = np.searchsorted(self._ends, places, side="right")
        starts = np.where(document > 0, self._ends[document - 1], 0)
        targets = np.where(self._ends[document] == places + 1, IGNORED, rows.targets)
        # A document that began before the window has positions from the window's first place.
        return Rows(rows.ids, targets, places - np.maximum(starts, places[:, :1]))

    def num_targets(self, indices: np.ndarray) -> int:
        """Return the number of targets of these samples: a document's last token has none."""
        begin = indices * self._length
        inside = np.searchsorted(self._ends, begin + self._length, side="right") - np.searchsorted(
            self._ends, begin, side="right"
        )
        return super().num_targets(indices) - int(inside.sum())


class PackedSamples(Samples):
    """Rows of whole documents, each by itself, and filled up to the length.

    Args:
        tokens: integers `[tokens]`.
        starts, ends: of the documents among them, int64 `[documents]`.
        sequence_length: places of a row.
        pad: token that fills a row up; no loss is taken there.
        taken: whether a loss is taken for predicting each token, bool `[tokens]`; None: for all.
        together: put as many documents into a row as fit; else one.
        keep_rest: what a row cannot hold of a document goes on as another one; else it is left out.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        sequence_length: int,
        *,
        pad: int,
        taken: np.ndarray | None = None,
        together: bool = True,
        keep_rest: bool = True,
    ) -> None:
        self._tokens, self._taken, self._pad, self._length = tokens, taken, pad, sequence_length
        self._first, self._size = cut_documents(starts, ends, sequence_length, keep_rest=keep_rest)
        self._targets = self._count_targets()
        # Pieces without a target would take up room and teach nothing.
        useful = self._targets > 0
        self._first, self._size, self._targets = self._first[useful], self._size[useful], self._targets[useful]
        single: np.ndarray = np.arange(len(self._size))
        self._pieces: np.ndarray
        self._row_ends: np.ndarray
        self._pieces, self._row_ends = best_fit(self._size, sequence_length) if together else (single, single + 1)

    def __len__(self) -> int:
        return len(self._row_ends)

    def read(self, indices: np.ndarray) -> Rows:
        """Return the rows of `indices` (`[n]`)."""
        shape = (len(indices), self._length)
        rows = Rows(np.full(shape, self._pad, np.int64), np.full(shape, IGNORED, np.int64), np.zeros(shape, np.int64))
        for row, index in enumerate(indices):
            self._fill(rows, row, self._in_row(index))
        return rows

    def num_targets(self, indices: np.ndarray) -> int:
        """Return the number of targets of these samples."""
        return int(sum(self._targets[self._in_row(index)].sum() for index in indices))

    def _in_row(self, row: int) -> np.ndarray:
        begin = self._row_ends[row - 1] if row else 0
        pieces: np.ndarray = self._pieces[begin : self._row_ends[row]]
        return pieces

    def _fill(self, rows: Rows, row: int, pieces: np.ndarray) -> None:
        assert rows.positions is not None
        at = 0
        for first, size in zip(self._first[pieces].tolist(), self._size[pieces].tolist(), strict=True):
            inside = slice(at, at + size)
            targets = self._tokens[first + 1 : first + size + 1].astype(np.int64)
            if self._taken is not None:
                targets[~self._taken[first + 1 : first + size + 1]] = IGNORED
            rows.ids[row, inside] = self._tokens[first : first + size]
            rows.targets[row, inside] = targets
            rows.positions[row, inside] = np.arange(size)
            at += size
        # What fills the row up is a document of its own.
        rows.positions[row, at:] = np.arange(self._length - at)

    def _count_targets(self) -> np.ndarray:
        if self._taken is None:
            return self._size
        # The sums from each bound to the next, those between pieces included; there is no bound behind the last token.
        bounds = np.stack([self._first + 1, self._first + self._size + 1], 1).ravel()
        inside = bounds[:-1] if bounds[-1:].tolist() == [len(self._taken)] else bounds
        counts: np.ndarray = np.add.reduceat(self._taken, inside, dtype=np.int64)[::2]
        return counts
