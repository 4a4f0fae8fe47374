"""Sequence sharding: which rank holds which tokens, balanced by the attention work that they cost.

The work of a token is the number of keys that it sees. Under a causal mask that grows with its index in its document,
so ranks get head and tail chunks of a row (`head_tail_indices`), or in packed rows parts of documents taken from both
ends (`balanced_indices`).

Packed rows: all rows of a batch are sharded at the same indices, so a token's work is the sum over rows. It grows by a
constant per token until a document of some row ends. The span between two such ends is called a document here too. A
token and its mirror image in that span always have the same work together. So a document can be divided into parts of
any size, each with as much of its head as of its tail, whose work is proportional to their size. Documents are not
padded to a multiple of the number of parts, unlike in torch's `_PerDocumentHeadTailLoadBalancer` and in
TransformerEngine, which divide every document equally over all ranks.

Equal parts on all ranks (`_spread`) balance every hop of a ring, but each part is a kernel call and its keys are sent
to all ranks. Mixtures of a light and a heavy document (`_mix`) leave most documents on one or two ranks and balance the
sum over all hops.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.exceptions import AttentionError
from hp_dtensor.parallel.attention.masks import AttentionMask, host_integers
from hp_dtensor.platform.interface import Platform

Array = np.ndarray[Any, Any]
Documents = tuple[tuple[int, ...], ...]
Run = tuple[int, int]

HEAVY = 0.5
"""Work of a document, as a fraction of a rank's, above which it is spread over all ranks of a ring.

In random packings of 8 documents the busiest rank of a ring is then within 1 % of the mean; without it, 22 % (4 ranks)
and 43 % (8 ranks) above. Spreading lighter documents too would take half as many kernel calls again.
"""


# Documents of consecutive batches differ; the cache serves the ranks and calls of one batch.
@functools.lru_cache(maxsize=32)
def balanced_indices(documents: Documents, ranks: int, even_hops: bool) -> tuple[Array, ...]:
    """Return the sorted token indices of each rank for rows of packed documents.

    Args:
        documents: lengths of the documents of each row.
        ranks: number of ranks that share the rows.
        even_hops: spread heavy documents over all ranks, which balances each hop of a ring; False: balance only the sum
            over all hops.
    """
    work = _Work(documents)
    sources, shares = _sources(work), _shares(work, ranks)
    _mix(sources, shares)
    if even_hops and any(source.parts > 1 for source in sources):
        sources, shares = _sources(work), _shares(work, ranks)
        _spread(sources, shares)
        _mix(sources, shares)
    return tuple(share.indices() for share in shares)


def head_tail_indices(length: int, ranks: int) -> tuple[Array, ...]:
    """Divide a row into 2 * ranks chunks and return for each rank r the indices of chunks r and 2 * ranks - 1 - r."""
    if ranks == 1:
        return (np.arange(length),)
    # Uneven lengths: chunk sizes differ by at most one token.
    bounds = [length * chunk // (2 * ranks) for chunk in range(2 * ranks + 1)]
    chunks = [np.arange(*each) for each in itertools.pairwise(bounds)]
    return tuple(np.concatenate([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks))


def work_of_indices(documents: Documents, indices: Sequence[Array]) -> tuple[int, ...]:
    """Return for each rank the number of keys that its queries see, summed over queries and rows.

    A query sees the keys of its document up to its own position.
    """
    return _Work(documents).of_indices(indices)


def document_lengths(positions: Array) -> Documents:
    """Return the lengths of each row's documents, given positions that restart at 0 in each document."""
    lengths = []
    for row in positions:
        # The first token starts a document whatever its position is.
        starts = [0, *(np.flatnonzero(row[1:] == 0) + 1).tolist()] if row.size else []
        lengths.append(tuple(np.diff([*starts, row.size]).tolist()))
    return tuple(lengths)


class _Work:
    """Prefix sums of the work of tokens under a causal mask within documents, summed over rows.

    Attributes:
        length: tokens of each row.
        ends: sorted indices at which a document of some row ends.
        sums: `[length + 1]`, the work of all tokens before each index.
    """

    def __init__(self, documents: Documents) -> None:
        self.length = sum(documents[0])
        of_tokens = np.zeros(self.length, np.int64)
        ends = {0, self.length}
        for row in documents:
            sizes = np.array(row, np.int64)
            bounds = np.cumsum(sizes)
            ends.update(bounds.tolist())
            # A token sees the tokens of its document up to itself.
            of_tokens += np.arange(1, self.length + 1) - np.repeat(bounds - sizes, sizes)
        self.ends = sorted(ends)
        self.sums = np.concatenate([[0], np.cumsum(of_tokens)])

    def of(self, run: Run) -> int:
        """Return the work of the tokens in a range (start, stop)."""
        return int(self.sums[run[1]] - self.sums[run[0]])

    @property
    def mean(self) -> float:
        """Mean work of a token."""
        return int(self.sums[-1]) / max(self.length, 1)

    def of_indices(self, indices: Sequence[Array]) -> tuple[int, ...]:
        """Return the work of each rank."""
        of_tokens = np.diff(self.sums)
        return tuple(int(of_tokens[own].sum()) for own in indices)


class _Source:
    """A document whose tokens are assigned from both ends towards the middle.

    Attributes:
        work: work of all its tokens.
        density: mean work of a token and its mirror image, the same for all of them.
        left: number of tokens not assigned yet.
        parts: number of times tokens were taken.
    """

    def __init__(self, run: Run, work: int) -> None:
        self.parts = 0
        self._head, self._tail = self._start, self._stop = run
        self.work, self.density = work, work / (run[1] - run[0])

    @property
    def left(self) -> int:
        return self._tail - self._head

    def take(self, count: int) -> list[Run]:
        """Return the next `count` tokens as two spans, half from the head and half from the tail."""
        self.parts += count > 0
        # An odd count takes the extra token from the end that has given fewer, so that head and tail stay balanced.
        is_ahead = self._head - self._start > self._stop - self._tail
        from_head = count // 2 if is_ahead else (count + 1) // 2
        head, tail = self._head, self._tail
        self._head, self._tail = head + from_head, tail - (count - from_head)
        return [(head, self._head), (self._tail, tail)]


class _Share:
    """The tokens assigned to one rank so far.

    Attributes:
        room: number of tokens still to assign.
        due: work that these tokens should have.
    """

    def __init__(self, room: int, due: float) -> None:
        self.room, self.due = room, due
        self._runs: list[Run] = []

    def take(self, source: _Source, count: int) -> None:
        """Assign `count` tokens of a document to this rank."""
        self._runs += source.take(count)
        self.room -= count
        self.due -= source.density * count

    def indices(self) -> Array:
        return np.concatenate([np.arange(0), *(np.arange(*run) for run in sorted(self._runs))])


def _sources(work: _Work) -> list[_Source]:
    return [_Source(run, work.of(run)) for run in itertools.pairwise(work.ends)]


def _shares(work: _Work, ranks: int) -> list[_Share]:
    bounds = [work.length * rank // ranks for rank in range(ranks + 1)]
    return [_Share(stop - start, work.mean * (stop - start)) for start, stop in itertools.pairwise(bounds)]


def _spread(sources: Sequence[_Source], shares: Sequence[_Share]) -> None:
    """Assign equal parts of heavy documents to all ranks.

    Remainders go to the ranks with the fewest tokens so far, among these to those with the least work. So ranks differ
    by at most one token, and none exceeds its room.
    """
    total = sum(source.work for source in sources)
    for source in sorted(sources, key=lambda each: -each.work):
        equal, more = divmod(source.left, len(shares))
        # Sources are sorted by work, so all further ones are lighter.
        if not equal or source.work * len(shares) <= HEAVY * total:
            return
        favoured = sorted(range(len(shares)), key=lambda rank: (-shares[rank].room, -shares[rank].due))[:more]
        for rank, share in enumerate(shares):
            share.take(source, equal + (rank in favoured))


def _mix(sources: Sequence[_Source], shares: Sequence[_Share]) -> None:
    """Fill all ranks with the remaining documents, each rank with its share of the work.

    As in Walker's alias method, a document lighter than the mean is mixed with a heavier one in the proportion that
    gives the mean. Each step finishes a document or fills a rank, so there are at most as many parts as documents and
    ranks together, times two, and the parts of a document are on consecutive ranks.
    """
    # The sort is stable: documents of equal work keep the order of the row, so that neighbours stay on one rank.
    waiting = collections.deque(sorted((each for each in sources if each.left), key=lambda source: source.density))
    carried = 0.0
    for share in shares:
        # Rounding errors are carried over: what one rank has too much is due less on the next.
        share.due += carried
        while share.room:
            # The queue is sorted by density: the lightest and the heaviest document bracket the mean that is due.
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
    """Return the numbers of tokens to take from a light and a heavy document, at least one in total.

    The mean work of these tokens is `share.due / share.room`, as far as the documents' lengths and the room allow.
    """
    room = share.room
    if light is heavy or heavy.density == light.density:
        return min(room, light.left), 0
    # The fraction of heavy tokens for which the mixture has the mean work per token that is due.
    part = min(max((share.due / room - light.density) / (heavy.density - light.density), 0.0), 1.0)
    count = min(room, light.left / (1.0 - part) if part < 1 else room, heavy.left / part if part > 0 else room)
    of_heavy = min(round(count * part), heavy.left)
    of_light = min(round(count) - of_heavy, light.left, room - of_heavy)
    # Rounding may give nothing; at least one token guarantees progress.
    return (of_light, of_heavy) if of_light + of_heavy else (1, 0)


Method = Literal["ring", "all_gather", "ulysses"]


def check_method(what: str, method: str) -> None:
    """Raise AttentionError for an unknown method."""
    if method not in get_args(Method):
        hint = "; choose_context_parallel(...).best has the cheapest one" if method == "auto" else ""
        raise AttentionError(f"{what}: method must be one of {get_args(Method)}, got {method!r}{hint}")


def exchanging_ranks(what: str, method: str, ulysses_degree: int | None, ranks: int) -> int:
    """Return the number of ranks that exchange heads; raise AttentionError if `method` contradicts a given number."""
    if method != "ulysses":
        return 1 if ulysses_degree is None else ulysses_degree
    if ulysses_degree not in (None, ranks):
        raise AttentionError(
            f"{what}: method='ulysses' exchanges heads among all {ranks} ranks, got ulysses_degree={ulysses_degree}; "
            "expected method='ring' or 'all_gather' for the others, or no ulysses_degree"
        )
    return ranks


@dataclass(frozen=True, kw_only=True)
class SequenceSharding:
    """The assignment of a sequence's tokens to the ranks that share it.

    Ranks `r * ulysses_degree + u` with the same r exchange heads and hold neighbouring tokens; ranks with the same u
    form a ring. Under a causal mask a token's work is proportional to its index, so a ring of R ranks is balanced when
    rank r has the chunks r and 2R-1-r of 2R (head and tail). Lengths need not be divisible.

    In packed rows a token's work is proportional to its index in its document. Given the lengths of documents, ranks
    get equally many tokens (up to one) and equal work (up to that of single tokens). All rows of a batch are sharded at
    the same indices, by the sum of their work. Attention without a causal mask is balanced too if the batch is one row.

    Attributes:
        length: tokens of the full sequence.
        ranks: number of ranks that share it.
        ulysses_degree: number of ranks that exchange heads.
        balanced: head and tail chunks; False: each rank has one contiguous span, in order.
        documents: lengths of the documents of each row of the batch, to which attention is confined; None: every row is
            one document.
        even_hops: for a ring, whose ranks hop in lock-step: spread documents that are heavy for one rank over all
            ranks, so that each hop is balanced; False: divide fewer documents, whose keys are gathered.

    Raises:
        AttentionError: `ulysses_degree` does not divide `ranks`; a number is below 1 (a length: below 0); documents do
            not add up to the row, or are given with `balanced=False`.

    Examples:
        >>> sharding = SequenceSharding(length=10, ranks=2)
        >>> [sharding.indices(rank).tolist() for rank in range(2)]
        [[0, 1, 7, 8, 9], [2, 3, 4, 5, 6]]
        >>> SequenceSharding(length=10, ranks=2, ulysses_degree=2).indices(1).tolist()
        [5, 6, 7, 8, 9]
        >>> packed = SequenceSharding(length=10, ranks=2, documents=((8, 2),))
        >>> [packed.indices(rank).tolist() for rank in range(2)]
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
            # The dataclass is frozen; lists are converted to tuples, so that the sharding is hashable (plans are cached
            # by it).
            object.__setattr__(self, "documents", self._checked(self.documents))

    def __str__(self) -> str:
        """Return the repr, truncated if there are many documents."""
        text = repr(self)
        return text if len(text) <= 300 else f"{text[:300]}..."

    @classmethod
    def of_positions(
        cls, positions: Array, *, ranks: int, ulysses_degree: int = 1, even_hops: bool = True
    ) -> SequenceSharding:
        """Return the sharding of rows of packed documents.

        Args:
            positions: int64 `[batch, length]` of the full rows: the position of each token in its document, counted
                from 0, as in `AttentionMask`.
            ranks, ulysses_degree, even_hops: as for the class.

        Raises:
            AttentionError: as for the class, or `positions` are not integers `[batch, length]`.
        """
        given, positions = positions, np.asarray(positions)
        if positions.ndim != 2 or positions.dtype.kind not in "iu":
            raise AttentionError(
                f"SequenceSharding.of_positions: expected integers [batch, length], got {type(given).__name__} of "
                f"shape {list(positions.shape)} and {positions.dtype}"
            )
        # Documents are passed even if every row is one: the number of tokens per rank must not vary between batches.
        return cls(
            length=positions.shape[1],
            ranks=ranks,
            ulysses_degree=ulysses_degree,
            documents=document_lengths(positions),
            even_hops=even_hops,
        )

    @property
    def ring_size(self) -> int:
        """Number of ranks that share the sequence once heads are exchanged."""
        return self.ranks // self.ulysses_degree

    def indices(self, rank: int) -> Array:
        """Return the indices in the full sequence of a rank's tokens, in local order.

        Raises:
            AttentionError: there is no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise AttentionError(
                f"SequenceSharding: rank {rank} of {self.ranks}; expected one from 0 to {self.ranks - 1}"
            )
        # The ring is balanced first; a Ulysses group then divides its tokens evenly, because it exchanges them for
        # heads.
        ring, within = divmod(rank, self.ulysses_degree)
        return np.array_split(self.ring_indices(ring), self.ulysses_degree)[within]

    def ring_indices(self, ring: int) -> Array:
        """Return the indices of the tokens that the ranks of one Ulysses group hold together."""
        size = self.ring_size
        if not self.balanced or size == 1:
            return np.arange(ring * self.length // size, (ring + 1) * self.length // size)
        if self.documents:
            return balanced_indices(self.documents, size, self.even_hops)[ring]
        return head_tail_indices(self.length, size)[ring]

    def lengths(self) -> list[int]:
        """Return the number of tokens of each rank."""
        return [int(self.indices(rank).size) for rank in range(self.ranks)]

    def work(self) -> tuple[int, ...]:
        """Return for each ring rank the number of scores of its queries under a causal mask within `documents`.

        The maximum over the mean is the slowdown of attention relative to a perfect balance.
        """
        documents = self.documents or ((self.length,),)
        return work_of_indices(documents, [self.ring_indices(ring) for ring in range(self.ring_size)])

    def shard(self, x: Any, rank: int, dim: int = 1, platform: Platform | None = None) -> Any:
        """Return a rank's shard of `x` along `dim`.

        Args:
            x: an array or, with `platform`, a tensor, of the full sequence.
        """
        if x.shape[dim] != self.length:
            raise AttentionError(
                f"SequenceSharding of {self.length} tokens: dimension {dim} of a tensor of shape {list(x.shape)} has "
                f"length {x.shape[dim]}"
            )
        indices = self.indices(rank)
        if platform is None or isinstance(x, np.ndarray):
            return np.ascontiguousarray(np.take(x, indices, dim))
        return platform.ops.index_select(x, dim, platform.from_numpy(indices))

    def unshard(self, shards: Sequence[Any], dim: int = 1, platform: Platform | None = None) -> Any:
        """Return the full tensor or array, given the shards of all ranks in rank order: the inverse of `shard`."""
        # The inverse of the permutation from sequence order to rank order.
        order = np.argsort(np.concatenate([self.indices(rank) for rank in range(self.ranks)]), kind="stable")
        if platform is None or isinstance(shards[0], np.ndarray):
            return np.ascontiguousarray(np.take(np.concatenate(list(shards), dim), order, dim))
        return platform.ops.index_select(platform.ops.cat(list(shards), dim), dim, platform.from_numpy(order))

    def _checked(self, documents: Any) -> Documents:
        """Return documents as tuples, which can be compared and hashed, or raise if they do not fit the rows."""
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


_DIGEST_BYTES = 16
"""Bytes of the digest in front of a rank's positions, by which ranks compare their shardings."""


def positions_of_all(platform: Platform, group: ProcessGroup, sharding: SequenceSharding, mask: AttentionMask) -> Any:
    """Return the positions `[batch, length]` of all tokens, in the order of the sequence; None if the mask has none.

    Raises:
        AttentionError: on every rank, if the combined positions are not those of consecutive documents, or ranks use
            different shardings.
    """
    if mask.positions is None:
        return None
    own = np.ascontiguousarray(host_integers(platform, mask.positions))
    # Sent with the positions, so that the comparison costs no extra collective.
    digest = hashlib.blake2b(repr(sharding).encode(), digest_size=_DIGEST_BYTES).digest()
    arrived = group.all_gather_bytes(digest + own.tobytes())
    if others := [rank for rank, part in enumerate(arrived) if part[:_DIGEST_BYTES] != arrived[0][:_DIGEST_BYTES]]:
        raise AttentionError(
            f"context parallel positions: ranks {others} shard the sequence differently from rank 0; rank {group.rank} "
            f"has {sharding}. Every rank must derive the sharding from the same full rows"
        )
    everything = [
        np.frombuffer(part[_DIGEST_BYTES:], np.int64).reshape(len(own), length)
        for part, length in zip(arrived, sharding.lengths(), strict=True)
    ]
    positions = sharding.unshard(everything, 1)
    _check_positions(positions, sharding)
    return positions


def _check_positions(positions: Any, sharding: SequenceSharding) -> None:
    """Refuse positions that neither continue nor restart at 0: some rank holds other tokens than its shard."""
    # Under a wrong sharding consecutive tokens come from different places, and positions jump.
    continues = (positions[:, 1:] == positions[:, :-1] + 1) | (positions[:, 1:] == 0)
    if continues.all():
        return
    row, index = (int(x) for x in np.argwhere(~continues)[0])
    owners = [next(r for r in range(sharding.ranks) if p in sharding.indices(r)) for p in (index, index + 1)]
    raise AttentionError(
        f"context parallel positions: in row {row}, token {index} (rank {owners[0]}) has position "
        f"{positions[row, index]} and the next one (rank {owners[1]}) {positions[row, index + 1]}; expected one more, "
        f"or 0 where a document begins. Each rank must shard the batch's ids, targets and positions by {sharding}, and "
        "call the model within `use_sequence_sharding` if the sharding is one of packed documents"
    )
