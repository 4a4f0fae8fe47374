"""Masks and dropout of attention: the keys that a query sees, and the entries of the softmax that drop out.

`AttentionMask` states the rule. `plan_blocks` turns it into the blocks of the score matrix that have to be computed:
rectangles in which every query sees every key, causal squares, and bands under a window. This is arithmetic on the
host. Blocks in which no query sees a key are never planned, so causal attention costs half, a window its width, and
packed documents their own squares, in whatever order a rank holds its tokens.

`AttentionDropout` decides by a hash whether an entry is dropped: of the seed of its row of the batch, its head, and the
indices of its query and key in the full sequence (`hp_dtensor.platform.attention.dropout_mask`). So the result does not
depend on how rows, heads or the sequence are sharded, backward and recomputation drop the same entries as forward, and
no dropout mask is saved.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hp_dtensor.exceptions import AttentionError
from hp_dtensor.platform.attention import mix, stream_offsets
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any
Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """The rule for the keys that each query sees. Make one per forward pass and give it to every layer.

    Token i of a sequence sees token j where all of the following hold. With fewer queries than keys, the queries are
    the last tokens of the sequence, as with a key-value cache.

    Attributes:
        causal: j is not after i.
        window: j is less than this many tokens away (`window=1`: a token sees itself alone), as the sliding window of
            Mistral (arXiv 2310.06825); None: any number.
        positions: int64 `[batch, keys]`, a tensor or an array: the position of each token in its document, counted from
            0 in each of the documents packed into a row; i and j belong to the same document. None: each row is one
            document. Under context parallelism these are the positions of this rank's tokens.

    Raises:
        AttentionError: a window below 1.

    Examples:
        >>> mask = AttentionMask(window=2, positions=np.array([[0, 1, 2, 0, 1]]))
        >>> mask.documents(platform).tolist()
        [[0, 0, 0, 1, 1]]
    """

    causal: bool = True
    window: int | None = None
    positions: Any = None
    # Shared by all layers of a forward, and freed with the mask. Not compared: `eq=False` above.
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.window is not None and (not isinstance(self.window, int) or self.window < 1):
            raise AttentionError(f"AttentionMask: window must be None or an integer of at least 1, got {self.window!r}")

    def documents(self, platform: Platform) -> Array | None:
        """Return each token's document number within its row, `[batch, keys]`; None if every row is one document."""
        if self.positions is None:
            return None
        found: Array | None = self.cached("documents", lambda: documents_of(host_integers(platform, self.positions)))
        return found

    def cached(self, key: Any, find: Any) -> Any:
        """Return `find()`, computed once per mask and key, so that layers with the same mask share it."""
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    def of_rows(self, positions: Tensor) -> AttentionMask:
        """Return the same mask for other rows of the batch."""
        return AttentionMask(self.causal, self.window, positions)


def documents_of(positions: Array) -> Array | None:
    """Return each token's document number, `[batch, length]`; None if every row is one document."""
    # A position of 0 starts a document. The first token need not have position 0 (a shard may start within a document),
    # so numbers are relative to the first.
    documents = np.cumsum(positions == 0, axis=1)
    documents = documents - documents[:, :1]
    return documents if documents.any() else None


def host_integers(platform: Platform, x: Any) -> Array:
    """Return a tensor or array of integers as int64 on the host; a DTensor is gathered."""
    if isinstance(x, np.ndarray):
        return x.astype(np.int64, copy=False)
    if isinstance(x, DTensor):
        x = x.full_tensor()
    return np.asarray(platform.to_numpy(x)).astype(np.int64, copy=False)


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens whose queries or keys a rank holds, in local order.

    Attributes:
        indices: `[tokens]`, the index of each token in the full sequence.
        documents: `[batch, tokens]`, the document number of each token; None: every row is one document.
    """

    indices: Array
    documents: Array | None = None

    @property
    def count(self) -> int:
        return int(self.indices.size)

    def narrowed(self, start: int, stop: int) -> Tokens:
        """Return the tokens with local indices `start` to `stop`."""
        return Tokens(self.indices[start:stop], None if self.documents is None else self.documents[:, start:stop])

    def runs(self, row: int) -> list[Run]:
        """Return the maximal spans of a row's tokens that are consecutive and in one document."""
        if not self.count:
            return []
        # A run ends where indices jump (another chunk of the sequence) or where the document changes.
        breaks = np.diff(self.indices) != 1
        if self.documents is not None:
            breaks |= np.diff(self.documents[row]) != 0
        bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), self.count]
        found = []
        for start, stop in itertools.pairwise(bounds):
            document = 0 if self.documents is None else int(self.documents[row, start])
            found.append(Run(start, int(self.indices[start]), stop - start, document))
        return found


@dataclass(frozen=True, slots=True)
class Run:
    """A span of consecutive tokens of one document.

    Attributes:
        start: local index of the first token, among those that the rank holds.
        index: its index in the full sequence.
        length: number of tokens.
        document: document number.
    """

    start: int
    index: int
    length: int
    document: int

    @property
    def stop(self) -> int:
        """The index after the last token in the full sequence."""
        return self.index + self.length


@dataclass(frozen=True, eq=False)
class AttentionDropout:
    """Dropout of softmax entries: dropped entries become 0, the others are divided by `1 - p`.

    Use a different seed for each layer and step, and the same one when a forward is recomputed.

    Attributes:
        p: probability of dropping an entry, from 0 to 1.
        seed: an integer, from which a seed is derived for each row of the batch; or int64 `[batch]`, one seed per row,
            for example a hash of the sample number, so that ranks holding other rows drop what one device would.
        heads: int64 `[heads]`, the index of each query head in the full layer, for plain tensors that hold only some
            of its heads; None: 0, 1, ... (head indices of DTensors follow from their placements).

    Raises:
        AttentionError: `p` is not a probability.

    Examples:
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
        """Return a dropout whose seed is derived per row from global row numbers.

        Args:
            rows: int64 `[batch]`, the number of each row within the training run, independent of its rank.
            keys: further integers to derive the seed from, such as the run's seed and the layer index.

        Examples:
            >>> one, other = (AttentionDropout.of_rows(0.1, np.array([7, 8]), layer) for layer in (0, 1))
            >>> len({*one.seed.tolist(), *other.seed.tolist()})
            4
        """
        # uint64 arithmetic wraps around, which is intended in a hash.
        seeds = np.array(rows, np.int64).view(np.uint64)
        for key in keys:
            seeds = mix(seeds + stream_offsets(np.array([key])))
        return cls(p, seeds.view(np.int64))

    def rows(self, platform: Platform, batch: int) -> Array:
        """Return the seed of each row, int64 `[batch]`."""
        if isinstance(self.seed, (int, np.integer)):
            # The multipliers keep neighbouring seeds from sharing rows.
            first = int(self.seed) * 0xD1342543DE82EF95 + 1
            seeds = [(first + row * 0x9E3779B97F4A7C15) % 2**64 for row in range(batch)]
            return np.array(seeds, np.uint64).view(np.int64)
        return self._checked("seed", host_integers(platform, self.seed), batch, "rows of the batch")

    def numbers(self, platform: Platform, heads: int) -> Array:
        """Return the index of each head in the full layer, int64 `[heads]`."""
        if self.heads is None:
            return np.arange(heads)
        return self._checked("heads", host_integers(platform, self.heads), heads, "query heads")

    def _checked(self, name: str, found: Array, size: int, what: str) -> Array:
        if found.shape != (size,):
            raise AttentionError(f"AttentionDropout: {name} {list(found.shape)} must be one for each of {size} {what}")
        return found


@dataclass(frozen=True, eq=False)
class LocalDropout:
    """Dropout resolved for one call on this rank.

    Attributes:
        rows, heads, queries, keys: int64 vectors: the seed of each local row, the index of each local head in the full
            layer, and the indices of the local queries and keys in the full sequence.
    """

    p: float
    rows: Array
    heads: Array
    queries: Array
    keys: Array

    def of(self, **parts: Array | slice) -> LocalDropout:
        """Return a copy with some vectors replaced; a slice selects from the present vector."""
        changed: dict[str, Any] = {n: getattr(self, n)[x] if isinstance(x, slice) else x for n, x in parts.items()}
        return dataclasses.replace(self, **changed)

    def factors(self, platform: Platform) -> Tensor:
        """Return the factors on the softmax entries, float32 `[rows, heads, queries, keys]`."""
        return platform.dropout_factors(self.p, self.rows, self.heads, self.queries, self.keys)


def local_dropout(
    platform: Platform, dropout: AttentionDropout | None, query: Tensor, queries: Array, keys: Array
) -> LocalDropout | None:
    """Return the dropout of a call with a plain `query` and given token indices; None if nothing is dropped."""
    if dropout is None or dropout.p == 0:
        return None
    rows, heads = dropout.rows(platform, query.shape[0]), dropout.numbers(platform, query.shape[1])
    return LocalDropout(float(dropout.p), rows, heads, queries, keys)


_BAND_ROWS = 512
"""Queries per block under a window: few, so that most keys of the block are seen, but enough to keep a kernel busy."""


@dataclass(frozen=True, slots=True)
class KeyRange:
    """A range of keys that the queries of a segment see, fully or partly.

    Attributes:
        start, stop: local indices of the keys.
        is_causal: the block is square, and each query sees the keys up to its own index.
        band: index of the first query minus that of the first key, if the window masks part of the block; else None.
    """

    start: int
    stop: int
    is_causal: bool = False
    band: int | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """The local queries `start` to `stop`, with the ranges of keys that they see."""

    start: int
    stop: int
    keys: tuple[KeyRange, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `start` to `stop` of the batch (None: all) with the segments of their queries, in order."""

    start: int
    stop: int | None
    segments: tuple[Segment, ...]


Plan = tuple[Rows, ...]


def plan_blocks(
    queries: Tokens,
    keys: Tokens,
    causal: bool,
    window: int | None,
    tile: int | None,
    rows: Sequence[tuple[int, int | None]] | None = None,
) -> Plan:
    """Return the blocks of attention of `queries` over `keys`.

    Args:
        tile: maximum queries and keys of a block, for kernels that hold its scores as a matrix; None: unlimited.
        rows: ranges of rows to plan together, see `equal_rows`; None: derived from these tokens.
    """
    planned = []
    # Afterwards all arithmetic is on intervals of indices; no array of the size of the score matrix is made.
    queries, keys = _without_gaps(queries, keys, causal, window)
    for start, stop in equal_rows([queries, keys]) if rows is None else rows:
        # Queries see keys of their own document only.
        runs = runs_by_document(keys, start)
        segments = tuple(
            segment
            for run in queries.runs(start)
            for segment in _segments(run, runs.get(run.document, []), causal, window, tile)
        )
        planned.append(Rows(start, stop, segments))
    return tuple(planned)


def _without_gaps(queries: Tokens, keys: Tokens, causal: bool, window: int | None) -> tuple[Tokens, Tokens]:
    """Return the tokens renumbered without gaps where the mask allows it, which makes blocks larger.

    Without a window only the order of tokens matters, so indices that neither side holds can be skipped: the head and
    tail chunks of one rank become one causal square. Without a causal mask the order does not matter either.
    """
    if window is not None:
        return queries, keys
    if not causal:
        return Tokens(np.arange(queries.count), queries.documents), Tokens(np.arange(keys.count), keys.documents)
    firsts, gaps = _gaps(queries, keys)
    renumbered = (x.indices - gaps[np.searchsorted(firsts, x.indices, "right") - 1] for x in (queries, keys))
    return Tokens(next(renumbered), queries.documents), Tokens(next(renumbered), keys.documents)


def _gaps(queries: Tokens, keys: Tokens) -> tuple[Array, Array]:
    """Return the start of each span that queries or keys cover, and the number of uncovered indices before it."""
    # Works on spans, of which there are few: sorting all token indices would dominate the time of planning.
    spans = sorted((run.index, run.stop) for side in (queries, keys) for run in Tokens(side.indices).runs(0))
    firsts, gaps, reached, gap = [0], [0], 0, 0
    for index, stop in spans:
        if index > reached:
            gap += index - reached
            firsts.append(index)
            gaps.append(gap)
        reached = max(reached, stop)
    return np.array(firsts, np.int64), np.array(gaps, np.int64)


def equal_rows(tokens: Sequence[Tokens]) -> list[tuple[int, int | None]]:
    """Return ranges (start, stop) of rows whose tokens have the same documents; stop None means all rows.

    Partial results over several sets of keys are merged by rows, so all their plans must use the same ranges.
    """
    documents = [each.documents for each in tokens if each.documents is not None]
    if len(documents) < len(tokens) or not documents:
        return [(0, None)]
    joined = np.concatenate(documents, axis=1)
    changes = np.flatnonzero((joined[1:] != joined[:-1]).any(axis=1)) + 1
    return list(itertools.pairwise([0, *changes.tolist(), len(joined)]))


def runs_by_document(tokens: Tokens, row: int) -> dict[int, list[Run]]:
    """Return the runs of a row's tokens by document number."""
    runs: dict[int, list[Run]] = {}
    for run in tokens.runs(row):
        runs.setdefault(run.document, []).append(run)
    return runs


def seen_span(
    queries: Mapping[int, Sequence[Run]], keys: Mapping[int, Sequence[Run]], causal: bool, window: int | None
) -> tuple[int, int] | None:
    """Return the smallest span of local indices with all keys of a row that its queries see; None: they see none.

    Args:
        queries, keys: as `runs_by_document` returns them.
    """
    # A key at distance d before a query is seen if d is within these bounds.
    # Without a mask all distances are allowed; a window is symmetric unless causal.
    least = 0 if causal else -math.inf if window is None else 1 - window
    most = math.inf if window is None else window - 1
    # The distances between two runs are all the integers between two bounds, so comparing intervals is enough.
    spans = [
        (int(first) - key.index + key.start, int(stop) - key.index + key.start)
        for document, runs in queries.items()
        for query in runs
        for key in keys.get(document, ())
        if (first := max(key.index, query.index - most)) < (stop := min(key.stop, query.stop - least))
    ]
    return (min(start for start, _ in spans), max(stop for _, stop in spans)) if spans else None


def count_scores(plan: Plan) -> int:
    """Return the number of scores per head, summed over rows; a plan of all rows (`Rows.stop` None) counts one row.

    A causal square counts half, a masked band in full.
    """
    total = 0
    for rows in plan:
        count = 1 if rows.stop is None else rows.stop - rows.start
        for segment in rows.segments:
            length = segment.stop - segment.start
            for keys in segment.keys:
                area = length * (keys.stop - keys.start)
                total += count * ((area + length) // 2 if keys.is_causal else area)
    return total


def _segments(
    queries: Run, keys: Sequence[Run], causal: bool, window: int | None, tile: int | None
) -> Iterator[Segment]:
    """Yield the segments of a run of queries, with the keys of one document that they see."""
    for index, stop in itertools.pairwise(_bounds(queries, keys, causal, window, tile)):
        start = queries.start + index - queries.index
        ranges = [each for run in keys for each in _seen(index, stop, run, causal, window)]
        split = [each for one in _joined(ranges) for each in _tiles(one, tile)]
        yield Segment(start, start + stop - index, tuple(split))


def _bounds(queries: Run, keys: Sequence[Run], causal: bool, window: int | None, tile: int | None) -> list[int]:
    """Return the indices at which queries are split into segments.

    Under a causal mask they are split where runs of keys end, so that each segment's diagonal block is square.
    """
    bounds = {queries.index, queries.stop}
    if causal and window is None:
        bounds |= {index for run in keys for index in (run.index, run.stop) if queries.index < index < queries.stop}
    # Under a window a segment's keys span its length plus the window, so long segments would compute many masked
    # scores.
    rows = min(tile or _BAND_ROWS, _BAND_ROWS) if window is not None else tile
    ordered = sorted(bounds)
    if rows is not None:
        ordered = [index for a, b in itertools.pairwise(ordered) for index in range(a, b, rows)] + ordered[-1:]
    return ordered


def _seen(index: int, stop: int, keys: Run, causal: bool, window: int | None) -> Iterator[KeyRange]:
    """Yield the ranges of a run of keys that the queries `index` to `stop` see."""
    first, last = keys.index, keys.stop
    if causal:
        last = min(last, stop)
    if window is not None:
        first = max(first, index - window + 1)
        last = last if causal else min(last, stop - 1 + window)
    if first >= last:
        return
    # Converts an index in the full sequence to one among the rank's keys.
    offset = keys.start - keys.index
    if window is not None:
        # The band needs no mask if its last key is visible to the first query, and its first key to the last query.
        above = last - 1 <= index if causal else last - 1 - index < window
        is_full = above and stop - 1 - first < window
        yield KeyRange(first + offset, last + offset, band=None if is_full else index - first)
    elif not causal or last <= index:
        yield KeyRange(first + offset, last + offset)
    else:  # `_bounds` splits at the ends of runs, so the keys from `index` on are the segment's own causal square
        if first < index:
            yield KeyRange(first + offset, index + offset)
        yield KeyRange(index + offset, last + offset, is_causal=True)


def _joined(ranges: Sequence[KeyRange]) -> Iterator[KeyRange]:
    """Yield the ranges, merging adjacent ones that are seen in full."""
    pending: KeyRange | None = None
    for each in ranges:
        is_full = not each.is_causal and each.band is None
        if pending is not None and is_full and pending.stop == each.start:
            pending = KeyRange(pending.start, each.stop)
            continue
        if pending is not None:
            yield pending
        pending = each if is_full else None
        if not is_full:
            yield each
    if pending is not None:
        yield pending


def _tiles(keys: KeyRange, tile: int | None) -> Iterator[KeyRange]:
    # A causal square is at most as long as its segment, which is split by `tile` already.
    if tile is None or keys.is_causal or keys.stop - keys.start <= tile:
        yield keys
        return
    for start in range(keys.start, keys.stop, tile):
        # Moving the first key by n moves the diagonal by n.
        band = None if keys.band is None else keys.band - (start - keys.start)
        yield KeyRange(start, min(start + tile, keys.stop), band=band)
