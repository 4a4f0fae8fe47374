"""The places of each rank in rows of packed documents: equally many tokens for each, and equal work.

Work is the number of keys that queries see. All rows of a batch are cut at the same places, so that a token's work is
the sum over rows. It grows by the same from token to token until a document of some row ends: a token and its mirror
image in the stretch between two such ends, here called a document too, are as much work as any other two. So a document
can be given out in parts of any size, each with as much of its head as of its tail, and costs each rank in proportion.
No document is padded to a multiple of the parts, unlike those of `_PerDocumentHeadTailLoadBalancer` of torch and of
TransformerEngine, which cut every document into equal parts for all ranks.

Equal parts for all ranks (`_spread`) make every hop of a ring equal work, but each part is a kernel call, and its keys
travel to all ranks. Mixtures (`_mix`) leave most documents on one or two ranks, with equal work in all hops together.

Cutting a sequence over context parallel ranks: which rank holds which tokens, in which order.

Positions of a sequence that ranks share: every rank learns those of all tokens, once per mask.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.exceptions import AttentionError
from hp_dtensor.parallel.attention.masks import AttentionMask, host_integers
from hp_dtensor.platform.interface import Platform

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


@dataclass(frozen=True, kw_only=True)
class SequenceSharding:
    """The tokens of each rank that shares a sequence.

    Ranks `r * ulysses_degree + u` with the same r exchange heads, so they hold neighbouring tokens; the others are
    the ring. Under a causal mask a token costs as much as its place, so a ring of R ranks is balanced when rank r has
    the chunks r and 2R-1-r of 2R (head and tail). Chunks need not be equally long.

    In rows of packed documents a token costs as much as its place in its document. Given their lengths, ranks have
    equally many tokens (those that do not divide apart) and equal work, within what single tokens are: heads and tails
    of documents, in parts of any size, and whole ones. All rows of a batch are cut at the same places, by the sum of
    their work; attention without a causal mask is balanced too where the batch is one row.

    Attributes:
        length: tokens of the whole sequence.
        ranks: ranks that share it.
        ulysses_degree: how many of them exchange heads.
        balanced: head and tail chunks; False: each rank has one stretch, in order.
        documents: the lengths of the documents of each row of the batch, of which attention sees no other; None: every
            row is one document.
        even_hops: for a ring, in which ranks go along together: documents that are heavy for one rank are spread over
            all, so that each hop is equal work too; False: fewer documents are cut, whose keys are gathered.

    Raises:
        AttentionError: `ulysses_degree` does not divide `ranks`, or a number is below 1 (a length: below 0); documents
            of a row that are not as long as the row, or that are not to be balanced.

    Example:
        >>> cut = SequenceSharding(length=10, ranks=2)
        >>> [cut.places(rank).tolist() for rank in range(2)]
        [[0, 1, 7, 8, 9], [2, 3, 4, 5, 6]]
        >>> SequenceSharding(length=10, ranks=2, ulysses_degree=2).places(1).tolist()
        [5, 6, 7, 8, 9]
        >>> packed = SequenceSharding(length=10, ranks=2, documents=((8, 2),))
        >>> [packed.places(rank).tolist() for rank in range(2)]
        [[0, 1, 6, 7, 8], [2, 3, 4, 5, 9]]
    """

    length: int
    ranks: int
    ulysses_degree: int = 1
    balanced: bool = True
    documents: Documents | None = None
    even_hops: bool = True

    def __post_init__(self) -> None:
        if min(self.ranks, self.ulysses_degree) < 1 or self.length < 0 or self.ranks % self.ulysses_degree:
            raise AttentionError(
                f"SequenceSharding: length {self.length} over {self.ranks} ranks of which {self.ulysses_degree} "
                "exchange heads; expected a ulysses_degree that divides the ranks, and no negative number"
            )
        if self.documents is not None:
            object.__setattr__(self, "documents", self._checked(self.documents))

    def __str__(self) -> str:
        """Return the cut as Python would show it, without most of many documents."""
        text = repr(self)
        return text if len(text) <= 300 else f"{text[:300]}..."

    @classmethod
    def of_positions(
        cls, positions: Array, *, ranks: int, ulysses_degree: int = 1, even_hops: bool = True
    ) -> SequenceSharding:
        """Return the cut of rows of packed documents.

        Args:
            positions: int64 `[batch, length]`, of each token in its document, which begins at 0, as in
                `AttentionMask`; of the whole rows.
            ranks, ulysses_degree, even_hops: as of the class.

        Raises:
            AttentionError: as of the class, or positions that are not whole numbers `[batch, length]`.
        """
        given, positions = positions, np.asarray(positions)
        if positions.ndim != 2 or positions.dtype.kind not in "iu":
            raise AttentionError(
                f"SequenceSharding.of_positions: expected whole numbers [batch, length], got {type(given).__name__} of "
                f"shape {list(positions.shape)} and {positions.dtype}"
            )
        # With rows that are one document too: shapes stay the same from batch to batch.
        return cls(
            length=positions.shape[1],
            ranks=ranks,
            ulysses_degree=ulysses_degree,
            documents=document_lengths(positions),
            even_hops=even_hops,
        )

    @property
    def ring_size(self) -> int:
        """Ranks that share the sequence once heads are exchanged."""
        return self.ranks // self.ulysses_degree

    def places(self, rank: int) -> Array:
        """Return the places in the whole sequence of a rank's tokens, in the order in which it holds them.

        Raises:
            AttentionError: there is no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise AttentionError(
                f"SequenceSharding: rank {rank} of {self.ranks}; expected one from 0 to {self.ranks - 1}"
            )
        ring, within = divmod(rank, self.ulysses_degree)
        return np.array_split(self.ring_places(ring), self.ulysses_degree)[within]

    def ring_places(self, ring: int) -> Array:
        """Return the places of the tokens that the ranks of one Ulysses group hold together."""
        size = self.ring_size
        if not self.balanced or size == 1:
            return _chunk(self.length, size, ring)
        if self.documents:
            return balanced_places(self.documents, size, self.even_hops)[ring]
        return head_tail_places(self.length, size)[ring]

    def lengths(self) -> list[int]:
        """Return the number of tokens of each rank."""
        return [int(self.places(rank).size) for rank in range(self.ranks)]

    def work(self) -> tuple[int, ...]:
        """Return for each ring rank the scores that its queries have in rows of `documents` under a causal mask.

        The busiest one over the mean is how much longer attention takes than if it were equally shared.
        """
        documents = self.documents or ((self.length,),)
        return work_of_places(documents, [self.ring_places(ring) for ring in range(self.ring_size)])

    def take(self, x: Any, rank: int, dim: int = 1, platform: Platform | None = None) -> Any:
        """Return a rank's part of `x`, an array or (with `platform`) a tensor, which is whole along `dim`."""
        self._check_length(x, dim)
        places = self.places(rank)
        if platform is None or isinstance(x, np.ndarray):
            return np.ascontiguousarray(np.take(x, places, dim))
        return platform.ops.index_select(x, dim, platform.from_numpy(places))

    def restore(self, parts: Sequence[Any], dim: int = 1, platform: Platform | None = None) -> Any:
        """Return the whole of which `parts` are the ranks' parts along `dim`, in rank order: the inverse of `take`."""
        order = np.argsort(np.concatenate([self.places(rank) for rank in range(self.ranks)]), kind="stable")
        if platform is None or isinstance(parts[0], np.ndarray):
            return np.ascontiguousarray(np.take(np.concatenate(list(parts), dim), order, dim))
        return platform.ops.index_select(platform.ops.cat(list(parts), dim), dim, platform.from_numpy(order))

    def _checked(self, documents: Any) -> Documents:
        """Return documents as tuples, which can be compared and hashed."""
        if not self.balanced:
            raise AttentionError(
                "SequenceSharding: documents with balanced=False; expected balanced=True, or documents=None, where "
                "each rank has one contiguous span"
            )
        try:
            found = tuple(tuple(int(length) for length in row) for row in documents)
        except (TypeError, ValueError):
            raise AttentionError(
                f"SequenceSharding: documents must be the lengths of each row's documents, such as ((8, 2), (10,)), "
                f"got {documents!r}"
            ) from None
        for row, lengths in enumerate(found):
            if sum(lengths) != self.length or min(lengths, default=1) < 1:
                raise AttentionError(
                    f"SequenceSharding: documents of {list(lengths[:8])} tokens in row {row} of {len(documents)}; "
                    f"expected lengths of at least 1 that make up the row's {self.length}"
                )
        return found

    def _check_length(self, x: Any, dim: int) -> None:
        if x.shape[dim] != self.length:
            raise AttentionError(
                f"SequenceSharding of {self.length} tokens: dimension {dim} of a tensor of shape {list(x.shape)} has "
                f"length {x.shape[dim]}"
            )


def _chunk(length: int, count: int, index: int) -> Array:
    return np.arange(index * length // count, (index + 1) * length // count)


_MARK = 16
"""Bytes in front of a rank's positions that are equal where the cuts are."""


def positions_of_all(platform: Platform, group: ProcessGroup, cut: SequenceSharding, mask: AttentionMask) -> Any:
    """Return the positions `[batch, length]` of all tokens in the order of the sequence; None: the mask has none.

    Raises:
        AttentionError: the ranks' positions put together are not those of documents that follow each other, or the
            ranks have different cuts; on every rank.
    """
    if mask.positions is None:
        return None
    own = np.ascontiguousarray(host_integers(platform, mask.positions))
    mark = hashlib.blake2b(repr(cut).encode(), digest_size=_MARK).digest()
    arrived = group.all_gather_bytes(mark + own.tobytes())
    if others := [rank for rank, part in enumerate(arrived) if part[:_MARK] != arrived[0][:_MARK]]:
        raise AttentionError(
            f"context parallel positions: ranks {others} cut the sequence otherwise than rank 0; rank {group.rank} has "
            f"{cut}. All ranks make the cut of the same whole rows"
        )
    everything = [np.frombuffer(part[_MARK:], np.int64).reshape(len(own), -1) for part in arrived]
    positions = cut.restore(everything, 1)
    _check_positions(positions, cut)
    return positions


def _check_positions(positions: Any, cut: SequenceSharding) -> None:
    """Refuse positions that neither go on nor begin again: ranks were given other tokens than the cut gives them."""
    goes_on = (positions[:, 1:] == positions[:, :-1] + 1) | (positions[:, 1:] == 0)
    if goes_on.all():
        return
    row, place = (int(x) for x in np.argwhere(~goes_on)[0])
    owners = [next(r for r in range(cut.ranks) if p in cut.places(r)) for p in (place, place + 1)]
    raise AttentionError(
        f"context parallel positions: in row {row}, token {place} (rank {owners[0]}) has position "
        f"{positions[row, place]} and the next one (rank {owners[1]}) {positions[row, place + 1]}; expected one more, "
        f"or 0 where a document begins. Each rank takes its part of the batch's ids, targets and positions by "
        f"{cut}, and a model is called within `use_sequence_sharding` of a cut of packed documents"
    )
