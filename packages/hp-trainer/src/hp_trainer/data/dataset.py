"""Samples by index and global batches by position, as the training loop reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hp_dtensor.parallel.attention import SequenceSharding
from hp_trainer.data.order import SampleOrder
from hp_trainer.exceptions import Problem

IGNORED = -100


@dataclass(frozen=True)
class Rows:
    """Samples as a model takes them.

    Attributes:
        ids: tokens, int64 `[samples, length]`.
        targets: the token to predict at each place, of the same shape; `IGNORED` (-100) where no loss is taken.
        positions: of each token in its document, of the same shape: 0 begins another one; None: a sample is one
            document.
    """

    ids: np.ndarray
    targets: np.ndarray
    positions: np.ndarray | None = None

    @classmethod
    def successors(cls, tokens: np.ndarray) -> Rows:
        """Return the samples of `tokens` `[samples, length + 1]` whose targets are the next tokens, all of them."""
        return cls(tokens[:, :-1], tokens[:, 1:])

    @classmethod
    def empty(cls, count: int, like: Rows) -> Rows:
        """Return rows to be filled by `put`, of the length of `like`."""
        shape = (count, like.ids.shape[1])
        positions = None if like.positions is None else np.empty(shape, np.int64)
        return cls(np.empty(shape, np.int64), np.empty(shape, np.int64), positions)

    def put(self, places: np.ndarray, rows: Rows) -> None:
        """Replace the samples at `places` by `rows`."""
        self.ids[places], self.targets[places] = rows.ids, rows.targets
        if self.positions is not None:
            self.positions[places] = rows.positions


class Order(Protocol):
    """The sample at each global position."""

    def samples(self, first: int, count: int) -> np.ndarray:
        """Return the samples at global positions `first` to `first + count - 1`: int64 of shape `[count]`."""
        ...


class Samples(ABC):
    """Indexed samples of one length."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, indices: np.ndarray) -> Rows:
        """Return the samples of `indices` (int64 `[n]`), in their order."""

    @abstractmethod
    def num_targets(self, indices: np.ndarray) -> int:
        """Return the number of targets of these samples that are not `IGNORED`, without reading all of them.

        Every rank asks it of the whole global batch: the loss is divided by it before the first backward.
        """

    def order(self, seed: int) -> Order:
        """Return the order in which a run reads them: every sample once in each epoch, in another order."""
        return SampleOrder(len(self), seed)


# Characters [begin, end) of a text that each token stands for: int64 [tokens, 2].
Spans = np.ndarray


class Tokenizer(Protocol):
    """From text to tokens and back.

    Attributes:
        vocab_size: tokens are below it.
        separator: the token after each document; None where there is none.
        begin: the token to begin a text with that has none.
        around: tokens before and after a document, int64 each.
        fingerprint: text that changes when a token does.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def separator(self) -> int | None: ...

    @property
    def begin(self) -> int: ...

    @property
    def around(self) -> tuple[np.ndarray, np.ndarray]: ...

    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text to go on from: integers `[tokens]`."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""
        ...

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of whole documents, each with its end."""
        ...

    def encode_with_spans(self, text: str) -> tuple[np.ndarray, Spans]:
        """Return the tokens of a text, nothing added, and the characters that each of them stands for."""
        ...


@dataclass(frozen=True)
class Dataset:
    """Samples to train on and to evaluate with, disjoint.

    Attributes:
        fingerprint: facts by name (JSON values), of which one changes when a sample does; a resumed run must find
            the same.
    """

    train: Samples
    evaluation: Samples
    tokenizer: Tokenizer
    fingerprint: Mapping[str, Any]


class DatasetSource(ABC):
    """A registered dataset: checked before any rank starts, prepared by one process, opened by every rank."""

    @abstractmethod
    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong with the options on this machine; paths are within the `data` section."""

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Write into `folder` whatever `open` needs; does nothing where it is there."""

    def verify(self, folder: Path, part: float = 1.0) -> None:
        """Compare what `prepare` wrote with its digests; called once when a run is resumed.

        Args:
            part: how much of it to read (`launch.verify_data`), from 0 to 1.

        Raises:
            DataError: it has changed; names the file.
        """

    @abstractmethod
    def open(self, folder: Path, sequence_length: int) -> Dataset:
        """Return the dataset, for samples of `sequence_length` tokens and their successors."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer: ...


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch.

    Attributes:
        ids, targets, positions: as in `Rows`.
        samples: index of each sample, int64 `[samples]`.
        global_tokens: tokens of the whole global batch, padding included.
        global_targets: those targets of the whole global batch that are not `IGNORED`: the loss is the sum over
            them, divided by their number.
        rows: the number of each sample in the run, int64 `[samples]`: the first sample that the run reads has 0, and a
            sample that is read again another one.
        cut: which tokens of the samples these are, and which other ranks have; None: all.
    """

    ids: np.ndarray
    targets: np.ndarray
    positions: np.ndarray | None
    samples: np.ndarray
    global_tokens: int
    global_targets: int
    rows: np.ndarray | None = None
    cut: SequenceSharding | None = None

    def arrays(self) -> list[np.ndarray]:
        """Return the arguments of a model: ids, targets and, where there are any, positions; each contiguous."""
        return [np.ascontiguousarray(x) for x in (self.ids, self.targets, self.positions) if x is not None]

    def micro_batches(self, size: int | None) -> list[Batch]:
        """Return the batch in parts of at most `size` samples (None: in one)."""
        size = size or max(1, len(self.samples))
        return [self._part(slice(i, i + size)) for i in range(0, len(self.samples), size)]

    def _part(self, part: slice) -> Batch:
        positions = None if self.positions is None else self.positions[part]
        rows = None if self.rows is None else self.rows[part]
        return replace(
            self,
            ids=self.ids[part],
            targets=self.targets[part],
            positions=positions,
            samples=self.samples[part],
            rows=rows,
        )


class BatchReader:
    """Global batches as a pure function of (seed, position), cut into the ranks' shares.

    Args:
        samples: what to read.
        global_batch_size: samples of a global batch.
        seed: of the order of samples.
        num_shares: data-parallel ranks; shares differ by at most one sample.
        share: this rank's.
        once: read the samples as they stand, each once; what a last batch has no sample for has no target.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        global_batch_size: int,
        seed: int,
        num_shares: int = 1,
        share: int = 0,
        once: bool = False,
    ) -> None:
        self._samples = samples
        self._order: Order = _InTurn() if once else samples.order(seed)
        self._end_of_all = len(samples) if once else None
        self._size = global_batch_size
        # Bounds, not lengths, are rounded: shares then meet without a gap and differ by at most one sample.
        self._begin = global_batch_size * share // num_shares
        self._end = global_batch_size * (share + 1) // num_shares

    def read(self, position: int) -> Batch:
        """This rank's share of the global batch that starts at sample `position` of the run."""
        everyones = self._order.samples(position, self._size)
        there = everyones if self._end_of_all is None else everyones[everyones < self._end_of_all]
        own = everyones[self._begin : self._end]
        rows = self._rows(own)
        return Batch(
            ids=rows.ids,
            targets=rows.targets,
            positions=rows.positions,
            samples=own,
            rows=np.arange(position + self._begin, position + self._end),
            global_tokens=len(there) * rows.ids.shape[1],
            global_targets=self._samples.num_targets(there),
        )

    def _rows(self, indices: np.ndarray) -> Rows:
        """Return the rows of samples; beyond the last one, copies of it without targets."""
        if self._end_of_all is None:
            return self._samples.read(indices)
        rows = self._samples.read(np.minimum(indices, self._end_of_all - 1))
        missing = (indices >= self._end_of_all)[:, None]
        return replace(rows, targets=np.where(missing, IGNORED, rows.targets))


class _InTurn:
    """The order in which samples stand."""

    def samples(self, first: int, count: int) -> np.ndarray:
        return np.arange(first, first + count, dtype=np.int64)
