"""Samples of a corpus: windows over all tokens, windows that separate documents, packed rows, and mixtures.

Packing splits documents into chunks of at most a row's length and puts chunks into rows by best fit.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from hp_trainer.data.dataset import IGNORED, MixedOrder, Rows, Samples, integer_weights


def split_documents(starts: np.ndarray, ends: np.ndarray, length: int, *, keep_rest: bool) -> tuple[np.ndarray, ...]:
    """Return first tokens and numbers of inputs of chunks of at most `length` inputs; the rest is kept or dropped."""
    # The last token of a document is only a target.
    inputs = np.maximum(ends - starts - 1, 0)
    counts = -(-inputs // length) if keep_rest else np.minimum(inputs, 1)
    document = np.repeat(np.arange(len(starts)), counts)
    # Index of each chunk within its document.
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts[document] + number * length
    return first, np.minimum(length, inputs[document] - number * length)


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack chunks into rows by best-fit decreasing (arXiv 2404.10830); return chunks by row, and the ends of rows."""
    rows: list[list[int]] = []
    rows_by_free: dict[int, list[int]] = defaultdict(list)
    free_sizes: list[int] = []  # sorted keys of `rows_by_free` with at least one row
    # A stable sort keeps chunks of equal size in order, so that every machine packs the same rows.
    for chunk in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[chunk])
        # The smallest free space that fits. There are at most `capacity` different sizes, so a search takes
        # log(capacity).
        at = bisect.bisect_left(free_sizes, size)
        if at < len(free_sizes):
            free = free_sizes[at]
            row = rows_by_free[free].pop()
            if not rows_by_free[free]:
                del free_sizes[at]
        else:
            free, row = capacity, len(rows)
            rows.append([])
        rows[row].append(chunk)
        free -= size
        if free:
            if not rows_by_free[free]:
                bisect.insort(free_sizes, free)
            rows_by_free[free].append(row)
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return np.fromiter((chunk for row in rows for chunk in row), np.int64, len(sizes)), ends


class TokenSamples(Samples):
    """Consecutive windows of all tokens. The last target of a window is the first input of the next one.

    Args:
        tokens: integers `[tokens]`.
        sequence_length: number of inputs of a window.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int) -> None:
        self._tokens = tokens
        self._length = sequence_length

    def __len__(self) -> int:
        # A window needs one token more than its inputs.
        return max(0, (len(self._tokens) - 1) // self._length)

    def read(self, indices: np.ndarray) -> Rows:
        # One more token than inputs: the last target.
        return Rows.successors(np.asarray(self._tokens[self._positions(indices, self._length + 1)], dtype=np.int64))

    def num_targets(self, indices: np.ndarray) -> int:
        """Return the number of targets of these windows: one per input."""
        return len(indices) * self._length

    def _positions(self, indices: np.ndarray, length: int) -> np.ndarray:
        """Return the positions in the corpus of `length` tokens from the start of each window: `[n, length]`."""
        positions: np.ndarray = indices[:, None] * self._length + np.arange(length)
        return positions


class DocumentWindows(TokenSamples):
    """Windows of all tokens that separate documents: positions restart, and no token predicts the next document.

    A document that crosses the end of a window continues in the next window as a new document.

    Args:
        ends: end (exclusive) of each document among the tokens, int64 `[documents]`, increasing.
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray, sequence_length: int) -> None:
        super().__init__(tokens, sequence_length)
        self._ends = ends

    def read(self, indices: np.ndarray) -> Rows:
        rows = super().read(indices)
        positions = self._positions(indices, self._length)
        # Ends are exclusive, so side="right" assigns the position at an end to the next document.
        document = np.searchsorted(self._ends, positions, side="right")
        starts = np.where(document > 0, self._ends[document - 1], 0)
        # The token after a document's last one belongs to the next document.
        targets = np.where(self._ends[document] == positions + 1, IGNORED, rows.targets)
        # A document that started before the window counts its positions from the start of the window.
        return Rows(rows.ids, targets, positions - np.maximum(starts, positions[:, :1]))

    def num_targets(self, indices: np.ndarray) -> int:
        """Return the number of targets of these windows: the last token of a document has none."""
        # Ends in (begin, begin + length]: each is the last input of its document, without target.
        begin = indices * self._length
        inside = np.searchsorted(self._ends, begin + self._length, side="right") - np.searchsorted(
            self._ends, begin, side="right"
        )
        return super().num_targets(indices) - int(inside.sum())


class PackedSamples(Samples):
    """Rows of separate documents, padded to the length.

    Args:
        tokens: integers `[tokens]`.
        starts, ends: range of each document among the tokens, int64 `[documents]`.
        sequence_length: number of inputs of a row.
        pad: token for padding, which is not predicted.
        predicted: bool `[tokens]`, True where a token is predicted. None predicts all.
        together: True to pack as many documents into a row as fit, False for one per row.
        keep_rest: True to split documents that are longer than a row, False to truncate them.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        sequence_length: int,
        *,
        pad: int,
        predicted: np.ndarray | None = None,
        together: bool = True,
        keep_rest: bool = True,
    ) -> None:
        self._tokens, self._predicted, self._pad, self._length = tokens, predicted, pad, sequence_length
        self._first, self._size = split_documents(starts, ends, sequence_length, keep_rest=keep_rest)
        self._targets = self._count_targets()
        # Chunks without a target would use space and contribute no loss.
        useful = self._targets > 0
        self._first, self._size, self._targets = self._first[useful], self._size[useful], self._targets[useful]
        single: np.ndarray = np.arange(len(self._size))
        self._chunks: np.ndarray
        self._row_ends: np.ndarray
        self._chunks, self._row_ends = best_fit(self._size, sequence_length) if together else (single, single + 1)

    def __len__(self) -> int:
        return len(self._row_ends)

    def read(self, indices: np.ndarray) -> Rows:
        shape = (len(indices), self._length)
        rows = Rows(np.full(shape, self._pad, np.int64), np.full(shape, IGNORED, np.int64), np.zeros(shape, np.int64))
        for row, index in enumerate(indices):
            self._fill(rows, row, self._chunks_of_row(index))
        return rows

    def num_targets(self, indices: np.ndarray) -> int:
        return int(sum(self._targets[self._chunks_of_row(index)].sum() for index in indices))

    def _chunks_of_row(self, row: int) -> np.ndarray:
        begin = self._row_ends[row - 1] if row else 0
        chunks: np.ndarray = self._chunks[begin : self._row_ends[row]]
        return chunks

    def _fill(self, rows: Rows, row: int, chunks: np.ndarray) -> None:
        assert rows.positions is not None
        at = 0
        for first, size in zip(self._first[chunks].tolist(), self._size[chunks].tolist(), strict=True):
            inside = slice(at, at + size)
            targets = self._tokens[first + 1 : first + size + 1].astype(np.int64)
            if self._predicted is not None:
                targets[~self._predicted[first + 1 : first + size + 1]] = IGNORED
            rows.ids[row, inside] = self._tokens[first : first + size]
            rows.targets[row, inside] = targets
            rows.positions[row, inside] = np.arange(size)
            at += size
        # Padding is a document of its own, so that no document attends to it.
        rows.positions[row, at:] = np.arange(self._length - at)

    def _count_targets(self) -> np.ndarray:
        if self._predicted is None:
            return self._size
        # reduceat sums between consecutive bounds; every other sum is that of a chunk, the rest are the gaps. It takes
        # no index equal to the length, so the end of the last token is dropped.
        bounds = np.stack([self._first + 1, self._first + self._size + 1], 1).ravel()
        inside = bounds[:-1] if bounds[-1:].tolist() == [len(self._predicted)] else bounds
        counts: np.ndarray = np.add.reduceat(self._predicted, inside, dtype=np.int64)[::2]
        return counts


class MixedSamples(Samples):
    """Concatenated samples of several sources, read in an order that mixes them.

    Args:
        sources: at least one source; none may be empty.
        weights: relative frequency of each source's samples. None uses the sizes of the sources.
    """

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float] | None = None) -> None:
        self.sources = tuple(sources)
        self.lengths = np.array([len(source) for source in sources], np.int64)
        self.weights = integer_weights(self.lengths.tolist() if weights is None else weights)
        self._offsets = np.concatenate([[0], np.cumsum(self.lengths)])

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def read(self, indices: np.ndarray) -> Rows:
        result: Rows | None = None
        for source, selected, own in self._by_source(indices):
            rows = source.read(own)
            result = Rows.empty(len(indices), rows) if result is None else result
            result.put(selected, rows)
        # No samples: the first source returns empty rows of the right length.
        return result if result is not None else self.sources[0].read(indices)

    def num_targets(self, indices: np.ndarray) -> int:
        return sum(source.num_targets(own) for source, _, own in self._by_source(indices))

    def order(self, seed: int) -> MixedOrder:
        """Return an order that mixes the sources by their weights."""
        return MixedOrder(self.lengths.tolist(), self.weights, seed)

    def _by_source(self, indices: np.ndarray) -> list[tuple[Samples, np.ndarray, np.ndarray]]:
        """Return (source, mask of its `indices`, their indices within the source) of each source that has any."""
        of = np.searchsorted(self._offsets, indices, side="right") - 1
        return [(self.sources[n], of == n, indices[of == n] - self._offsets[n]) for n in sorted(set(of.tolist()))]
