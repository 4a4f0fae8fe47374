"""Interfaces of datasets, orders of their samples, and the reader of global batches that the training loop uses.

Position p of n samples is in epoch p // n and reads sample `permutation(p % n)` of that epoch. The permutation is
computed for each position and never stored. It does not depend on the number of ranks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hp_dtensor.parallel.attention import SequenceSharding
from hp_trainer.exceptions import Problem

_ROUNDS = 8
_LARGEST = 1 << 20


class SampleOrder:
    """A pseudo-random permutation per epoch, computed in O(1) memory and O(1) time per position.

    The permutation is a balanced Feistel network over the smallest domain with an even number of bits that contains all
    samples. Cycle walking restricts it to the samples, in fewer than four steps on average (Black and Rogaway, 2002,
    "Ciphers with arbitrary finite domains").

    Args:
        num_samples: number of samples of an epoch, at least 1.
        seed: seed of the permutations.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        # Two halves of equally many bits, so that the network can swap them.
        self._half_bits = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))

    def samples(self, first: int, count: int) -> np.ndarray:
        """Return the samples at global positions `first` to `first + count - 1`: int64 of shape `[count]`."""
        return self.at(np.arange(first, first + count, dtype=np.int64))

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at the given global positions. Both are int64 of shape `[n]`."""
        epochs, indices = np.divmod(positions, self.num_samples)
        result = np.empty(len(positions), dtype=np.int64)
        # A batch spans more than one epoch only at its boundary, or where the samples are few.
        for epoch in sorted(set(epochs.tolist())):
            inside = epochs == epoch
            result[inside] = self._permute(indices[inside].astype(np.uint64), epoch)
        return result

    def _permute(self, values: np.ndarray, epoch: int) -> np.ndarray:
        # Seeds and epochs are mixed first: neighbouring ones must not give related keys.
        start = _mix(np.array([self.seed % 2**64], dtype=np.uint64)) ^ np.uint64(epoch)
        keys = _mix(_mix(start) + np.arange(1, _ROUNDS + 1, dtype=np.uint64))
        values = self._feistel(values, keys)
        outside = values >= self.num_samples
        # Cycle walking (Black and Rogaway, 2002): a value outside the samples is permuted again until it is inside. The
        # result is still a permutation. The domain is less than four times as large as the number of samples.
        while outside.any():
            values[outside] = self._feistel(values[outside], keys)
            outside = values >= self.num_samples
        return values.astype(np.int64)

    def _feistel(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        bits = self._half_bits
        mask = (np.uint64(1) << bits) - np.uint64(1)
        left, right = values >> bits, values & mask
        # A round is invertible whatever `_mix` returns, so the network is a permutation.
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        joined: np.ndarray = (left << bits) | right
        return joined


def _mix(x: np.ndarray) -> np.ndarray:
    """Mix bits with the finalizer of splitmix64 (Steele, Lea and Flood, 2014). Unsigned arithmetic wraps at 2**64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


class MixedOrder:
    """An order that interleaves several sources in fixed proportions.

    A binary tree distributes positions to sources: of the first n positions of a node, round(n * share) belong to the
    first half of its sources. The source of any position, and the position within that source, are computed in
    O(log(sources)) without looking at earlier positions. Each source has its own `SampleOrder`, so its own epochs.

    Args:
        lengths: number of samples of each source.
        weights: integer weights; their sum is at most about 2**20.
        seed: seed of the first source's order; the others count up from it.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[int], seed: int) -> None:
        self._weights = list(weights)
        self._offsets = np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))])
        self._orders = [SampleOrder(length, seed + number) for number, length in enumerate(lengths)]

    def samples(self, first: int, count: int) -> np.ndarray:
        """Return the samples at global positions `first` to `first + count - 1`: int64 of shape `[count]`."""
        result = np.empty(count, np.int64)
        positions = np.arange(first, first + count, dtype=np.int64)
        self._distribute(positions, np.arange(count), 0, len(self._weights), result)
        return result

    def _distribute(self, positions: np.ndarray, out: np.ndarray, begin: int, end: int, result: np.ndarray) -> None:
        """Write the samples at `positions` of the node with sources `begin` to `end - 1` to `result[out]`."""
        if not len(positions):
            return
        if end - begin == 1:
            result[out] = self._orders[begin].at(positions) + self._offsets[begin]
            return
        middle = (begin + end) // 2
        share, total = sum(self._weights[begin:middle]), sum(self._weights[begin:end])
        # In integers, so that every machine agrees: position n belongs to the first half where round(n * share / total)
        # increases from n to n + 1.
        before, after = ((n * share + total // 2) // total for n in (positions, positions + 1))
        first = after > before
        self._distribute(before[first], out[first], begin, middle, result)
        self._distribute((positions - before)[~first], out[~first], middle, end, result)


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Return positive integers in the proportions of `weights`, whose sum of some 2**20 keeps products in 64 bits."""
    total = sum(map(Fraction, weights))
    shares = [(Fraction(weight) / total).limit_denominator(10**6) for weight in weights]
    common = math.lcm(*(share.denominator for share in shares))
    # The least common multiple keeps the proportions exact; a larger one is rounded.
    scale = min(common, _LARGEST)
    return [max(1, round(share * scale)) for share in shares]


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
