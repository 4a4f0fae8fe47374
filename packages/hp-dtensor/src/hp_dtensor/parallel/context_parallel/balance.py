"""The places of each rank in rows of packed documents: equally many tokens for each, and equal work.

Work is the number of keys that queries see. All rows of a batch are cut at the same places, so that a token's work is
the sum over rows. It grows by the same from token to token until a document of some row ends: a token and its mirror
image in the stretch between two such ends, here called a document too, are as much work as any other two. So a document
can be given out in parts of any size, each with as much of its head as of its tail, and costs each rank in proportion.
No document is padded to a multiple of the parts, unlike those of `_PerDocumentHeadTailLoadBalancer` of torch and of
TransformerEngine, which cut every document into equal parts for all ranks.

Equal parts for all ranks (`_spread`) make every hop of a ring equal work, but each part is a kernel call, and its keys
travel to all ranks. Mixtures (`_mix`) leave most documents on one or two ranks, with equal work in all hops together.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Documents = tuple[tuple[int, ...], ...]
Run = tuple[int, int]

HEAVY = 0.5
"""Work of a document, as a part of a rank's, above which it is spread over all ranks of a ring.

In random packings of 8 documents the last rank of a ring is then done within 1 % of the mean work; without, it is done
22 % (of 4 ranks) and 43 % (of 8) later. To spread lighter ones too takes half as many kernel calls again.
"""


@functools.lru_cache(maxsize=32)
def balanced_places(documents: Documents, ranks: int, even_hops: bool) -> tuple[Array, ...]:
    """Return for each rank its places, in order.

    Args:
        documents: the lengths of the documents of each row.
        ranks: that share the rows.
        even_hops: spread heavy documents over all ranks; False: balance the sum of hops alone.
    """
    work = _Work(documents)
    sources, shares = _sources(work), _shares(work, ranks)
    _mix(sources, shares)
    if even_hops and any(source.parts > 1 for source in sources):
        sources, shares = _sources(work), _shares(work, ranks)
        _spread(sources, shares)
        _mix(sources, shares)
    return tuple(share.places() for share in shares)


def head_tail_places(length: int, ranks: int) -> tuple[Array, ...]:
    """Return for each rank r the chunks r and 2 * ranks - 1 - r of a row in 2 * ranks chunks."""
    if ranks == 1:
        return (np.arange(length),)
    bounds = [length * chunk // (2 * ranks) for chunk in range(2 * ranks + 1)]
    chunks = [np.arange(*each) for each in itertools.pairwise(bounds)]
    return tuple(np.concatenate([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks))


def work_of_places(documents: Documents, places: Sequence[Array]) -> tuple[int, ...]:
    """Return for each rank the scores that a causal mask within documents shows its queries, of all rows."""
    return _Work(documents).of_places(places)


def document_lengths(positions: Array) -> Documents:
    """Return the lengths of the documents of each row, whose positions begin at 0."""
    return tuple(_lengths(row) for row in positions)


def _lengths(row: Array) -> tuple[int, ...]:
    starts = np.flatnonzero(np.concatenate([[True], row[1:] == 0])) if row.size else np.empty(0, np.int64)
    return tuple(np.diff([*starts.tolist(), row.size]).tolist())


class _Work:
    """The work of stretches of rows under a causal mask, as sums over all places before each.

    Attributes:
        length: of each row.
        ends: places between which every row's document is one and the same.
        sums: `[length + 1]`.
    """

    def __init__(self, documents: Documents) -> None:
        self.length = sum(documents[0])
        of_tokens = np.zeros(self.length, np.int64)
        ends = {0, self.length}
        for row in documents:
            sizes = np.array(row, np.int64)
            bounds = np.cumsum(sizes)
            ends.update(bounds.tolist())
            of_tokens += np.arange(1, self.length + 1) - np.repeat(bounds - sizes, sizes)
        self.ends = sorted(ends)
        self.sums = np.concatenate([[0], np.cumsum(of_tokens)])

    def of(self, run: Run) -> int:
        return int(self.sums[run[1]] - self.sums[run[0]])

    @property
    def mean(self) -> float:
        """Work of a token."""
        return int(self.sums[-1]) / max(self.length, 1)

    def of_places(self, places: Sequence[Array]) -> tuple[int, ...]:
        """Return the work of each rank."""
        of_tokens = np.diff(self.sums)
        return tuple(int(of_tokens[own].sum()) for own in places)


class _Source:
    """A document as it is given out, from both ends to the middle.

    Attributes:
        work: of all of it.
        density: of a token and its mirror image, the mean of both.
        left: tokens that are not given out yet.
        parts: how often some were taken.
    """

    def __init__(self, run: Run, work: int) -> None:
        self.parts = 0
        self._head, self._tail = self._start, self._stop = run
        self.work, self.density = work, work / (run[1] - run[0])

    @property
    def left(self) -> int:
        return self._tail - self._head

    def take(self, count: int) -> list[Run]:
        """Return the next tokens, some of the head and as many of the tail."""
        self.parts += count > 0
        is_ahead = self._head - self._start > self._stop - self._tail
        from_head = count // 2 if is_ahead else (count + 1) // 2
        head, tail = self._head, self._tail
        self._head, self._tail = head + from_head, tail - (count - from_head)
        return [(head, self._head), (self._tail, tail)]


class _Share:
    """Tokens of one rank, as they are given out.

    Attributes:
        room: tokens that are still to come.
        due: work that these are to be.
    """

    def __init__(self, room: int, due: float) -> None:
        self.room, self.due = room, due
        self._runs: list[Run] = []

    def take(self, source: _Source, count: int) -> None:
        self._runs += source.take(count)
        self.room -= count
        self.due -= source.density * count

    def places(self) -> Array:
        return np.concatenate([np.arange(0), *(np.arange(*run) for run in sorted(self._runs))])


def _sources(work: _Work) -> list[_Source]:
    return [_Source(run, work.of(run)) for run in itertools.pairwise(work.ends)]


def _shares(work: _Work, ranks: int) -> list[_Share]:
    bounds = [work.length * rank // ranks for rank in range(ranks + 1)]
    return [_Share(stop - start, work.mean * (stop - start)) for start, stop in itertools.pairwise(bounds)]


def _spread(sources: Sequence[_Source], shares: Sequence[_Share]) -> None:
    """Give all ranks equal parts of heavy documents.

    Tokens that do not divide go to those ranks that have the fewest so far, of these to the ones with the least work:
    ranks differ by one token at most, and so none gets more than it has room for.
    """
    total = sum(source.work for source in sources)
    for source in sorted(sources, key=lambda each: -each.work):
        equal, more = divmod(source.left, len(shares))
        if not equal or source.work * len(shares) <= HEAVY * total:
            return
        favoured = sorted(range(len(shares)), key=lambda rank: (-shares[rank].room, -shares[rank].due))[:more]
        for rank, share in enumerate(shares):
            share.take(source, equal + (rank in favoured))


def _mix(sources: Sequence[_Source], shares: Sequence[_Share]) -> None:
    """Fill the ranks with what is left of the documents, each with its share of the work.

    As in Walker's alias method, what is lighter than a rank's mean is given out together with what is heavier, so much
    of each that the mixture has the mean. Each step ends a document or fills a rank, so that there are at most twice as
    many parts as documents and ranks, and a document's parts are on ranks that follow each other.
    """
    # Documents of the same work in the order of the row: neighbours stay on one rank.
    waiting = collections.deque(sorted((each for each in sources if each.left), key=lambda source: source.density))
    carried = 0.0
    for share in shares:
        # What rounding has given one rank too much, the next one has less.
        share.due += carried
        while share.room:
            light, heavy = waiting[0], waiting[-1]
            of_light, of_heavy = _parts(light, heavy, share)
            share.take(light, of_light)
            share.take(heavy, of_heavy)
            while waiting and not waiting[0].left:
                waiting.popleft()
            while waiting and not waiting[-1].left:
                waiting.pop()
        carried = share.due


def _parts(light: _Source, heavy: _Source, share: _Share) -> tuple[int, int]:
    """Return how many tokens of two documents make a mixture of the mean work that a rank is due, at least one."""
    room = share.room
    if light is heavy or heavy.density == light.density:
        return min(room, light.left), 0
    part = min(max((share.due / room - light.density) / (heavy.density - light.density), 0.0), 1.0)
    count = min(room, light.left / (1.0 - part) if part < 1 else room, heavy.left / part if part > 0 else room)
    of_heavy = min(round(count * part), heavy.left)
    of_light = min(round(count) - of_heavy, light.left, room - of_heavy)
    return (of_light, of_heavy) if of_light + of_heavy else (1, 0)
