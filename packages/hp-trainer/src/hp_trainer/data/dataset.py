"""Samples by index and global batches by position, as the training loop reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hp_trainer.data.order import SampleOrder
from hp_trainer.exceptions import Problem


class Samples(Protocol):
    """Indexed samples of `sequence_length + 1` tokens."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return the samples of `indices` (`[n]`): int64 of shape `[n, sequence_length + 1]`."""
        ...


class Tokenizer(Protocol):
    """From text to tokens and back."""

    vocab_size: int

    @property
    def separator(self) -> int | None:
        """The token between documents; None where there is none."""

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, tokens: list[int]) -> str: ...


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

    def verify(self, folder: Path) -> None:
        """Compare what `prepare` wrote with its digests; called once when a run is resumed.

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
        inputs: int64 `[samples, sequence_length]`.
        targets: the token after each input, of the same shape.
        samples: index of each sample, int64 `[samples]`.
        global_tokens: target tokens of the whole global batch.
    """

    inputs: np.ndarray
    targets: np.ndarray
    samples: np.ndarray
    global_tokens: int

    def micro_batches(self, size: int | None) -> list[Batch]:
        """Return the batch in parts of at most `size` samples (None: in one)."""
        size = size or max(1, len(self.samples))
        starts = range(0, len(self.samples), size)
        return [
            Batch(
                self.inputs[i : i + size],
                self.targets[i : i + size],
                self.samples[i : i + size],
                self.global_tokens,
            )
            for i in starts
        ]


class BatchReader:
    """Global batches as a pure function of (seed, position), cut into the ranks' shares.

    Args:
        samples: what to read.
        global_batch_size: samples of a global batch.
        seed: of the order of samples.
        num_shares: data-parallel ranks; shares differ by at most one sample.
        share: this rank's.
    """

    def __init__(
        self, samples: Samples, *, global_batch_size: int, seed: int, num_shares: int = 1, share: int = 0
    ) -> None:
        self._samples = samples
        self._order = SampleOrder(len(samples), seed)
        self._size = global_batch_size
        self._begin = global_batch_size * share // num_shares
        self._end = global_batch_size * (share + 1) // num_shares

    def read(self, position: int) -> Batch:
        """This rank's share of the global batch that starts at sample `position` of the run."""
        indices = self._order.samples(position + self._begin, self._end - self._begin)
        rows = self._samples.read(indices)
        return Batch(rows[:, :-1], rows[:, 1:], indices, self._size * (rows.shape[1] - 1))
