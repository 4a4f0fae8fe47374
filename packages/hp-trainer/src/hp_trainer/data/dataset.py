"""Interfaces of datasets, and the reader of global batches that the training loop uses."""

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
    """Samples as model inputs.

    Attributes:
        ids: tokens, int64 `[samples, length]`.
        targets: token to predict at each position, int64 of the same shape; `IGNORED` (-100) is left out of the loss.
        positions: position of each token in its document, int64 of the same shape. 0 starts a new document. None when
            each sample is one document.
    """

    ids: np.ndarray
    targets: np.ndarray
    positions: np.ndarray | None = None

    @classmethod
    def successors(cls, tokens: np.ndarray) -> Rows:
        """Return samples that predict every next token of `tokens`, which has shape `[samples, length + 1]`."""
        # Views: both are slices of one array, copied only by `Batch.arrays`.
        return cls(tokens[:, :-1], tokens[:, 1:])

    @classmethod
    def empty(cls, count: int, like: Rows) -> Rows:
        """Return `count` uninitialized rows with the length of `like`, to be filled by `put`."""
        shape = (count, like.ids.shape[1])
        positions = None if like.positions is None else np.empty(shape, np.int64)
        return cls(np.empty(shape, np.int64), np.empty(shape, np.int64), positions)

    def put(self, indices: np.ndarray, rows: Rows) -> None:
        """Replace the samples at `indices` by `rows`."""
        self.ids[indices], self.targets[indices] = rows.ids, rows.targets
        if self.positions is not None:
            self.positions[indices] = rows.positions


class Order(Protocol):
    """Maps global positions of a run to samples."""

    def samples(self, first: int, count: int) -> np.ndarray:
        """Return the samples at global positions `first` to `first + count - 1`: int64 of shape `[count]`."""
        ...


class Samples(ABC):
    """Samples of equal length, addressed by index."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, indices: np.ndarray) -> Rows:
        """Return the samples at `indices` (int64 `[n]`), in this order."""

    @abstractmethod
    def num_targets(self, indices: np.ndarray) -> int:
        """Return how many targets of these samples are not `IGNORED`, without reading the samples.

        Every rank calls it for the global batch: the loss is divided by this number before the first backward.
        """

    def order(self, seed: int) -> Order:
        """Return the order in which a run reads the samples: a new permutation of all samples in each epoch."""
        return SampleOrder(len(self), seed)


# Range of characters [begin, end) of each token in a text: int64 [tokens, 2].
Spans = np.ndarray


class Tokenizer(Protocol):
    """Converts text to tokens and back.

    Attributes:
        vocab_size: upper bound (exclusive) of the tokens.
        separator: token after each document, or None.
        begin: first token of a generated text whose prompt is empty.
        around: tokens added before and after each document, two int64 arrays.
        fingerprint: text that identifies the vocabulary: it changes when any token changes.
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
        """Return the tokens of a prompt: integers `[tokens]`."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""
        ...

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each document, with the tokens `around` it."""
        ...

    def encode_with_spans(self, text: str) -> tuple[np.ndarray, Spans]:
        """Return the tokens of a text, without added tokens, and the range of characters of each token."""
        ...


@dataclass(frozen=True)
class Dataset:
    """Disjoint samples for training and for evaluation.

    Attributes:
        fingerprint: JSON values by name that identify the samples. A resumed run must have the same fingerprint.
    """

    train: Samples
    evaluation: Samples
    tokenizer: Tokenizer
    fingerprint: Mapping[str, Any]


class DatasetSource(ABC):
    """A registered dataset: checked before ranks start, prepared by one process, and opened by every rank."""

    @abstractmethod
    def problems(self) -> Iterator[Problem]:
        """Yield the problems of the options on this machine, with paths relative to the `data` section."""

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Write the files that `open` needs into `folder`, unless they exist."""

    def verify(self, folder: Path, part: float = 1.0) -> None:
        """Compare the prepared files with their digests. Called once when a run is resumed.

        Args:
            part: fraction of the bytes to read, from 0 to 1 (setting `launch.verify_data`).

        Raises:
            DataError: a file has changed; the message names it.
        """

    @abstractmethod
    def open(self, folder: Path, sequence_length: int) -> Dataset:
        """Return the dataset with samples of `sequence_length` inputs and as many targets."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer: ...


@dataclass(frozen=True)
class Batch:
    """A rank's share of a global batch.

    Attributes:
        ids, targets, positions: as in `Rows`.
        samples: index of each sample in the dataset, int64 `[samples]`.
        global_tokens: number of tokens of the global batch, padding included.
        global_targets: number of targets of the global batch that are not `IGNORED`. The loss is the sum over these
            targets, divided by their number.
        rows: global position of each sample in the run, int64 `[samples]`. A sample that is read in two epochs has two
            positions.
        sharding: how the tokens of each sample are sharded over context parallel ranks; None: unsharded.
    """

    ids: np.ndarray
    targets: np.ndarray
    positions: np.ndarray | None
    samples: np.ndarray
    global_tokens: int
    global_targets: int
    rows: np.ndarray | None = None
    sharding: SequenceSharding | None = None

    def arrays(self) -> list[np.ndarray]:
        """Return the inputs of a model as contiguous arrays: ids, targets and, unless None, positions."""
        return [np.ascontiguousarray(x) for x in (self.ids, self.targets, self.positions) if x is not None]

    def micro_batches(self, size: int | None) -> list[Batch]:
        """Split the batch into micro-batches of at most `size` samples. None returns one micro-batch."""
        # A share may be empty, and the step of a range may not be 0.
        size = size or max(1, len(self.samples))
        # `global_targets` stays that of the global batch, by which each micro-batch's loss is divided.
        return [self._slice(slice(i, i + size)) for i in range(0, len(self.samples), size)]

    def _slice(self, samples: slice) -> Batch:
        return replace(
            self,
            ids=self.ids[samples],
            targets=self.targets[samples],
            positions=None if self.positions is None else self.positions[samples],
            samples=self.samples[samples],
            rows=None if self.rows is None else self.rows[samples],
        )


class BatchReader:
    """Reads global batches, which are a pure function of (seed, position), and returns this rank's share of each.

    Args:
        samples: samples to read.
        global_batch_size: number of samples of a global batch.
        seed: seed of the order of samples.
        num_shares: number of data-parallel ranks. Shares differ by at most one sample.
        share: index of this rank's share.
        once: read each sample once, in the order of their indices. Missing samples of the last batch have no targets.
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
        self._order: Order = _InOrder() if once else samples.order(seed)
        self._num_samples = len(samples) if once else None
        self._size = global_batch_size
        # Rounding bounds, not lengths, makes shares adjacent: none overlap, and their sizes differ by at most one.
        self._begin = global_batch_size * share // num_shares
        self._end = global_batch_size * (share + 1) // num_shares

    def read(self, position: int) -> Batch:
        """Return this rank's share of the global batch that starts at global position `position`."""
        # Every rank computes the order of the full batch, so no rank has to communicate for `global_targets`.
        batch = self._order.samples(position, self._size)
        existing = batch if self._num_samples is None else batch[batch < self._num_samples]
        own = batch[self._begin : self._end]
        rows = self._rows(own)
        return Batch(
            ids=rows.ids,
            targets=rows.targets,
            positions=rows.positions,
            samples=own,
            rows=np.arange(position + self._begin, position + self._end),
            global_tokens=len(existing) * rows.ids.shape[1],
            global_targets=self._samples.num_targets(existing),
        )

    def _rows(self, indices: np.ndarray) -> Rows:
        """Return the rows of samples. Indices beyond the last sample give copies of it without targets."""
        if self._num_samples is None:
            return self._samples.read(indices)
        rows = self._samples.read(np.minimum(indices, self._num_samples - 1))
        # All ranks must read equally many rows, so the last batch is filled up with rows that contribute no loss.
        missing = (indices >= self._num_samples)[:, None]
        return replace(rows, targets=np.where(missing, IGNORED, rows.targets))


class _InOrder:
    """Every sample once, by increasing index."""

    def samples(self, first: int, count: int) -> np.ndarray:
        # May exceed the number of samples; `BatchReader` masks those.
        return np.arange(first, first + count, dtype=np.int64)
