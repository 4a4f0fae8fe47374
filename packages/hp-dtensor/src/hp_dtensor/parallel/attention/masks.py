"""`AttentionMask`, the rule for the keys that a query sees, and the tokens of one rank as the mask needs them.

Dropout of attention by place: which entries of the softmax are dropped does not depend on who computes them.

An entry is dropped or kept by a number that is hashed from the seed of its row of the batch, its head, its query's and
its key's place in the whole sequence (`hp_dtensor.platform.attention.kept_entries`). So one device and any ranks that
share rows, heads or the sequence drop the same entries, in forward, in backward and when a forward is repeated, and no
mask is ever kept.

The blocks of the score matrix that are computed: rectangles that are seen whole, causal squares, and bands.

Everything here is arithmetic on the host. Blocks in which no query sees a key do not occur, so that causal attention
costs half, a window its width, and packed documents their own squares, whatever the order of the tokens on a rank.
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
from hp_dtensor.platform.attention import mixed, steps_of
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


@dataclass(frozen=True, eq=False)
class AttentionDropout:
    """Entries of the softmax that become zero; the others are divided by `1 - p`.

    Give each layer and each step a seed of its own; a forward that is repeated has the same.

    Attributes:
        p: the probability with which an entry is dropped, from 0 to 1.
        seed: an integer, of which each row of the batch makes its own; or int64 `[batch]`, one for each row, such as a
            hash of the sample's number, so that ranks with other rows drop what one device would.
        heads: int64 `[heads]`, the number of each query head in the whole layer, where the tensors are plain and have
            some of its heads; None: 0, 1, ... (heads of DTensors know their numbers).

    Raises:
        AttentionError: `p` is no probability.

    Example:
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
        """Return the dropout of rows with these numbers.

        Args:
            rows: int64 `[batch]`, the number of each row in the whole run, on whichever rank it is.
            keys: the seed of the run, the layer: what else tells seeds apart.

        Example:
            >>> one, other = (AttentionDropout.of_rows(0.1, np.array([7, 8]), layer) for layer in (0, 1))
            >>> len({*one.seed.tolist(), *other.seed.tolist()})
            4
        """
        seeds = np.array(rows, np.int64).view(np.uint64)
        for key in keys:
            seeds = mixed(seeds + steps_of(np.array([key])))
        return cls(p, seeds.view(np.int64))

    def rows(self, platform: Platform, batch: int) -> Array:
        """Return the seed of each row, int64 `[batch]`."""
        if isinstance(self.seed, (int, np.integer)):
            return np.array([_seed_of_row(int(self.seed), row) for row in range(batch)], np.uint64).view(np.int64)
        return self._checked("seed", host_integers(platform, self.seed), batch, "rows of the batch")

    def numbers(self, platform: Platform, heads: int) -> Array:
        """Return the number of each head in the whole layer, int64 `[heads]`."""
        if self.heads is None:
            return np.arange(heads)
        return self._checked("heads", host_integers(platform, self.heads), heads, "query heads")

    def _checked(self, name: str, found: Array, size: int, what: str) -> Array:
        if found.shape != (size,):
            raise AttentionError(f"AttentionDropout: {name} {list(found.shape)} must be one for each of {size} {what}")
        return found


@dataclass(frozen=True, eq=False)
class PlacedDropout:
    """The dropout of a call on this rank: whose rows and heads it has, and the places of its queries and keys.

    Attributes:
        rows, heads, queries, keys: int64 vectors.
    """

    p: float
    rows: Array
    heads: Array
    queries: Array
    keys: Array

    def of(self, **parts: Array | slice) -> PlacedDropout:
        """Return it for other rows, heads, queries or keys, given as vectors or as slices of these."""
        cut: dict[str, Any] = {name: getattr(self, name)[x] if isinstance(x, slice) else x for name, x in parts.items()}
        return dataclasses.replace(self, **cut)

    def factors(self, platform: Platform) -> Tensor:
        """Return what the entries are multiplied by, float32 `[rows, heads, queries, keys]`."""
        return platform.dropout_factors(self.p, self.rows, self.heads, self.queries, self.keys)


def placed(
    platform: Platform, dropout: AttentionDropout | None, query: Tensor, queries: Array, keys: Array
) -> PlacedDropout | None:
    """Return the dropout of a call with plain `query` and the places of its queries and keys; None: nothing drops."""
    if dropout is None or dropout.p == 0:
        return None
    rows, heads = dropout.rows(platform, query.shape[0]), dropout.numbers(platform, query.shape[1])
    return PlacedDropout(float(dropout.p), rows, heads, queries, keys)


def _seed_of_row(seed: int, row: int) -> int:
    """Return the seed of a row of the batch: seeds that follow each other share no rows."""
    return (seed * 0xD1342543DE82EF95 + row * 0x9E3779B97F4A7C15 + 1) % 2**64


_BAND_ROWS = 512
"""Queries of one block under a window: few enough for most keys of a block to be seen, enough for its kernel."""


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Keys that the queries of a segment see, all or some of them.

    Attributes:
        start, stop: of the keys, as the rank holds them.
        is_causal: the block is a square, and each query sees the keys up to its own place.
        band: place of the first query minus that of the first key, where the window cuts the block; else None.
    """

    start: int
    stop: int
    is_causal: bool = False
    band: int | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Queries, as the rank holds them from `start` to `stop`, with the ranges of keys that they see."""

    start: int
    stop: int
    keys: tuple[KeyRange, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the batch from `start` to `stop` (None: all) with the segments of their queries, in order."""

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
        tile: most queries and most keys of a block, where its scores are held as a matrix; None: any number.
        rows: the rows of the batch that are planned together, see `equal_rows`; None: those of these tokens.
    """
    planned = []
    queries, keys = _closed_up(queries, keys, causal, window)
    for start, stop in equal_rows([queries, keys]) if rows is None else rows:
        runs = runs_by_document(keys, start)
        segments = tuple(
            segment
            for run in queries.runs(start)
            for segment in _segments(run, runs.get(run.document, []), causal, window, tile)
        )
        planned.append(Rows(start, stop, segments))
    return tuple(planned)


def _closed_up(queries: Tokens, keys: Tokens, causal: bool, window: int | None) -> tuple[Tokens, Tokens]:
    """Return the tokens with gaps between their places closed, where a mask does not tell: blocks are larger then.

    Without a window only the order of tokens matters, so that places which neither side has are left out: head and tail
    chunks of one rank are one causal square. Without a causal mask the order does not matter either.
    """
    if window is not None:
        return queries, keys
    if not causal:
        return Tokens(np.arange(queries.count), queries.documents), Tokens(np.arange(keys.count), keys.documents)
    firsts, gaps = _gaps(queries, keys)
    closed = (x.places - gaps[np.searchsorted(firsts, x.places, "right") - 1] for x in (queries, keys))
    return Tokens(next(closed), queries.documents), Tokens(next(closed), keys.documents)


def _gaps(queries: Tokens, keys: Tokens) -> tuple[Array, Array]:
    """Return the first places of the stretches that either side has, and for each the places before it that none has.

    Stretches are few where tokens are many: sorting all places would take most of the time of a plan.
    """
    spans = sorted((run.place, run.stop) for side in (queries, keys) for run in Tokens(side.places).runs(0))
    firsts, gaps, reached, gap = [0], [0], 0, 0
    for place, stop in spans:
        if place > reached:
            gap += place - reached
            firsts.append(place)
            gaps.append(gap)
        reached = max(reached, stop)
    return np.array(firsts, np.int64), np.array(gaps, np.int64)


def equal_rows(tokens: Sequence[Tokens]) -> list[tuple[int, int | None]]:
    """Return (start, stop) of the rows of the batch in which all of these tokens are of the same documents; None: all.

    Results over several sets of keys are put together by rows, so their plans need the same ones.
    """
    documents = [each.documents for each in tokens if each.documents is not None]
    if len(documents) < len(tokens) or not documents:
        return [(0, None)]
    whole = np.concatenate(documents, axis=1)
    changes = np.flatnonzero((whole[1:] != whole[:-1]).any(axis=1)) + 1
    return list(itertools.pairwise([0, *changes.tolist(), len(whole)]))


def is_empty(plan: Plan) -> bool:
    """Return whether no query sees a key."""
    return not any(segment.keys for rows in plan for segment in rows.segments)


def runs_by_document(tokens: Tokens, row: int) -> dict[int, list[Run]]:
    """Return the runs of tokens of a row by the number of their document."""
    runs: dict[int, list[Run]] = {}
    for run in tokens.runs(row):
        runs.setdefault(run.document, []).append(run)
    return runs


def sees_any(
    queries: Mapping[int, Sequence[Run]], keys: Mapping[int, Sequence[Run]], causal: bool, window: int | None
) -> bool:
    """Return whether a query of a row sees a key: whether `plan_blocks` has something to compute, without a plan.

    Args:
        queries, keys: as of `runs_by_document`.
    """
    # A key of distance d in front of a query is seen where d is within these.
    least = 0 if causal else -math.inf if window is None else 1 - window
    most = math.inf if window is None else window - 1
    # The distances between two runs are all whole numbers from one to another.
    return any(
        query.stop - 1 - key.place >= least and query.place - (key.stop - 1) <= most
        for document, runs in queries.items()
        for query in runs
        for key in keys.get(document, ())
    )


def count_scores(plan: Plan, batch: int) -> int:
    """Return the number of scores that are seen or computed in vain, per head; causal squares count half."""
    total = 0
    for rows in plan:
        count = batch if rows.stop is None else rows.stop - rows.start
        for segment in rows.segments:
            length = segment.stop - segment.start
            for keys in segment.keys:
                area = length * (keys.stop - keys.start)
                total += count * ((area + length) // 2 if keys.is_causal else area)
    return total


def _segments(
    queries: Run, keys: Sequence[Run], causal: bool, window: int | None, tile: int | None
) -> Iterator[Segment]:
    for place, stop in itertools.pairwise(_bounds(queries, keys, causal, window, tile)):
        start = queries.start + place - queries.place
        ranges = [each for run in keys for each in _seen(place, stop, run, causal, window)]
        split = [each for one in _joined(ranges) for each in _tiles(one, tile)]
        yield Segment(start, start + stop - place, tuple(split))


def _bounds(queries: Run, keys: Sequence[Run], causal: bool, window: int | None, tile: int | None) -> list[int]:
    """Return the places at which queries are cut into segments: at ends of runs of keys, so that the rest is square."""
    bounds = {queries.place, queries.stop}
    if causal and window is None:
        bounds |= {place for run in keys for place in (run.place, run.stop) if queries.place < place < queries.stop}
    rows = min(tile or _BAND_ROWS, _BAND_ROWS) if window is not None else tile
    ordered = sorted(bounds)
    if rows is not None:
        ordered = [place for a, b in itertools.pairwise(ordered) for place in range(a, b, rows)] + ordered[-1:]
    return ordered


def _seen(place: int, stop: int, keys: Run, causal: bool, window: int | None) -> Iterator[KeyRange]:
    """Yield the ranges of a run of keys that queries of places `place` to `stop` see."""
    first, last = keys.place, keys.stop
    if causal:
        last = min(last, stop)
    if window is not None:
        first = max(first, place - window + 1)
        last = last if causal else min(last, stop - 1 + window)
    if first >= last:
        return
    offset = keys.start - keys.place
    if window is not None:
        above = last - 1 <= place if causal else last - 1 - place < window
        whole = above and stop - 1 - first < window
        yield KeyRange(first + offset, last + offset, band=None if whole else place - first)
    elif not causal or last <= place:
        yield KeyRange(first + offset, last + offset)
    else:  # segments are cut at ends of runs: what is left from `place` on is the segment's own square
        if first < place:
            yield KeyRange(first + offset, place + offset)
        yield KeyRange(place + offset, last + offset, is_causal=True)


def _joined(ranges: Sequence[KeyRange]) -> Iterator[KeyRange]:
    """Yield the ranges, those that are seen whole and lie beside each other as one."""
    pending: KeyRange | None = None
    for each in ranges:
        whole = not each.is_causal and each.band is None
        if pending is not None and whole and pending.stop == each.start:
            pending = KeyRange(pending.start, each.stop)
            continue
        if pending is not None:
            yield pending
        pending = each if whole else None
        if not whole:
            yield each
    if pending is not None:
        yield pending


def _tiles(keys: KeyRange, tile: int | None) -> Iterator[KeyRange]:
    if tile is None or keys.is_causal or keys.stop - keys.start <= tile:
        yield keys
        return
    for start in range(keys.start, keys.stop, tile):
        band = None if keys.band is None else keys.band - (start - keys.start)
        yield KeyRange(start, min(start + tile, keys.stop), band=band)
