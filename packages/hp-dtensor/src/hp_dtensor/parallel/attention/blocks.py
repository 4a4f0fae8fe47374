"""The blocks of the score matrix that are computed: rectangles that are seen whole, causal squares, and bands.

Everything here is arithmetic on the host. Blocks in which no query sees a key do not occur, so that causal attention
costs half, a window its width, and packed documents their own squares, whatever the order of the tokens on a rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hp_dtensor.parallel.attention.mask import Array, Run, Tokens

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
