"""Ring attention (arXiv 2310.01889): queries stay, keys and values are passed from rank to rank.

In forward each rank's block of keys and values is sent to the next rank, for as many hops as some query needs it: after
h hops rank r has the block of rank r - h. The results over the blocks are merged by log-sum-exp (`PartialAttention` in
`blockwise.py`). Backward is the dual: blocks are sent to the previous rank, and the float32 sum of a block's gradients
follows one hop behind and is sent to the block's owner after the last rank that used it. Each hop is started before the
rank computes on the block that it has, so communication overlaps with computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.collectives import empty_message, pack, unpack
from hp_dtensor.comm.process_group import DONE, ProcessGroup, Work
from hp_dtensor.parallel.attention.blockwise import (
    AttentionGrads,
    Options,
    PartialAttention,
    SpanTensors,
    accumulator_dtype,
)
from hp_dtensor.parallel.attention.functional import attention_node
from hp_dtensor.parallel.attention.masks import (
    Array,
    Plan,
    Tokens,
    equal_rows,
    is_empty,
    plan_blocks,
    runs_by_document,
    sees_any,
)
from hp_dtensor.platform.interface import Platform

Tensor = Any
Block = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RingPlan:
    """The blocks that this rank computes, and how many hops each rank's keys and values are sent.

    Attributes:
        plans: by hop h, the blocks of this rank's queries over the keys of the rank h hops before it.
        reach: by rank, the number of hops that its keys and values are sent in forward.
        back_reach: by rank, the number of hops that they are sent, in the other direction, in backward.
        back_first: by rank, the first backward hop at which they are used; 0: at none.
        indices: by rank, the indices of its keys in the full sequence.
    """

    plans: tuple[Plan, ...]
    reach: tuple[int, ...]
    back_reach: tuple[int, ...]
    back_first: tuple[int, ...]
    indices: tuple[Array, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of keys of each rank."""
        return tuple(int(indices.size) for indices in self.indices)


def plan_ring(tokens: Sequence[Tokens], rank: int, causal: bool, window: int | None, tile: int | None) -> RingPlan:
    """Return the plan of `rank` in a ring whose ranks hold `tokens`."""
    return plan_member(tokens, rank, needed_hops(tokens, causal, window), causal, window, tile)


def needed_hops(tokens: Sequence[Tokens], causal: bool, window: int | None) -> list[list[bool]]:
    """Return, as `[rank][hop]`, whether the rank `hop` hops after `rank` sees any of its keys."""
    size, rows = len(tokens), [start for start, _ in equal_rows(tokens)]
    # Evaluated for all pairs of ranks in every step with packed rows, so runs are found once and no blocks are planned.
    # O(ranks^2) pairs below, but O(tokens) work here.
    runs = [[runs_by_document(each, row) for row in rows] for each in tokens]

    def sees(queries: int, keys: int) -> bool:
        pairs = zip(runs[queries % size], runs[keys], strict=True)
        return any(sees_any(*pair, causal, window) for pair in pairs)

    return [[sees(owner + hop, owner) for hop in range(size)] for owner in range(size)]


def plan_member(
    tokens: Sequence[Tokens],
    rank: int,
    needed: Sequence[Sequence[bool]],
    causal: bool,
    window: int | None,
    tile: int | None,
) -> RingPlan:
    """Return the plan of one rank, given the result of `needed_hops`, which is the same for all ranks."""
    size = len(tokens)
    # A block is sent on to the last rank that sees it, past ranks that see none of it.
    reach = [max((hop for hop in range(1, size) if row[hop]), default=0) for row in needed]
    # Backward runs in the other direction: the rank `hop` hops after the owner is reached after size - hop hops.
    back = [[size - hop for hop in range(size - 1, 0, -1) if row[hop]] for row in needed]
    # The same ranges of rows for all hops, because their results are merged by rows.
    rows = equal_rows(tokens)
    plans = tuple(
        plan_blocks(tokens[rank], tokens[(rank - hop) % size], causal, window, tile, rows) for hop in range(size)
    )
    return RingPlan(
        plans,
        tuple(reach),
        tuple(max(hops, default=0) for hops in back),
        tuple(min(hops, default=0) for hops in back),
        tuple(each.indices for each in tokens),
    )


def ring_attention(
    platform: Platform,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    group: ProcessGroup,
    plan: RingPlan,
    options: Options,
) -> Tensor:
    """Return attention over keys and values sharded over the ranks of `group`, as one autograd node."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Block:
        return _forward(_Ring(platform, group, plan, k, v), q, options)

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return _backward(_Ring(platform, group, plan, k, v), AttentionGrads(platform, grad, q, out, lse), options)

    return attention_node(platform, query, key, value, sinks, forward, backward)


class _Ring:
    """The communication of one pass of keys and values around the ring."""

    def __init__(self, platform: Platform, group: ProcessGroup, plan: RingPlan, key: Tensor, value: Tensor) -> None:
        self.platform, self.group, self.plan = platform, group, plan
        self.size, self.rank = group.size, group.rank
        self.dtype, self.accumulator = key.dtype, accumulator_dtype(platform, key)
        self._shapes = tuple(key.shape), tuple(value.shape)
        # Keys and values are one message per hop: half the latency of two.
        self.own = pack(platform, (key, value))

    def shapes(self, owner: int) -> list[tuple[int, ...]]:
        """Return the shapes of the keys and values of a rank."""
        length = self.plan.lengths[owner % self.size]
        return [(*shape[:2], length, shape[3]) for shape in self._shapes]

    def indices(self, owner: int) -> Array:
        """Return the indices of a rank's keys in the full sequence."""
        return self.plan.indices[owner % self.size]

    def block(self, message: Tensor, owner: int) -> Block:
        """Return the keys and values, or their gradients, in a message about the block of rank `owner`."""
        key, value = unpack(self.platform, message, self.shapes(owner))
        return key, value

    def swap(self, leaving: Tensor | None, to: int, arriving: Sequence[tuple[int, Tensor | None]]) -> Work:
        """Start sending `leaving` to rank `to` and receiving into the given memory from each rank in `arriving`."""
        sends: list[Tensor | None] = [None] * self.size
        receives: list[Tensor | None] = [None] * self.size
        sends[to % self.size] = leaving
        for source, memory in arriving:
            if memory is not None:
                receives[source % self.size] = memory
        return self.group.start_exchange(sends, receives)


def _forward(ring: _Ring, q: Tensor, options: Options) -> Block:
    """Return attention and its log-sum-exp. In hop h this rank computes on the block of rank me - h."""
    me, reach = ring.rank, ring.plan.reach
    here: Tensor | None = ring.own
    found = PartialAttention(ring.platform, q, ring.block(ring.own, me)[1])
    for hop in range(max(reach) + 1):
        work: Work = DONE
        coming: Tensor | None = None
        # Started before the attention over the present block, so that the next block is sent meanwhile.
        if hop < max(reach):
            owner = (me - hop - 1) % ring.size
            if reach[owner] > hop:
                coming = empty_message(ring.platform, ring.shapes(owner), ring.dtype)
            # A block is sent no further than to the last rank that sees one of its keys.
            leaving = here if reach[(me - hop) % ring.size] > hop else None
            work = ring.swap(leaving, me + 1, [(me - 1, coming)])
        plan = ring.plan.plans[hop]
        if not is_empty(plan):
            assert here is not None
            found.add(*ring.block(here, me - hop), plan, options.of_keys(ring.indices(me - hop)))
        # Only now, after computing: this hop was hidden behind the block above.
        work.wait()
        here = coming
    return found.total()


def _backward(ring: _Ring, grads: AttentionGrads, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values. The own block is computed during the first hop."""
    me, size = ring.rank, ring.size
    last = max(ring.plan.back_reach)
    coming, arrival = _next_block(ring, ring.own, 0)
    # The own block needs no communication, so it overlaps with the first hop.
    own = grads.add(*ring.block(ring.own, me), ring.plan.plans[0], options.of_keys(ring.indices(me)))
    sums = _GradientSums(ring)
    for hop in range(1, last + 1):
        arrival.wait()
        here = coming
        coming, arrival = _next_block(ring, here, hop)
        plan = ring.plan.plans[size - hop]
        found = None
        if not is_empty(plan):
            found = grads.add(*ring.block(here, me + hop), plan, options.of_keys(ring.indices(me + hop)))
        sums.pass_on(hop, found)
    # Waits for the last message: the sum of this rank's keys over all other ranks.
    others = sums.own_total()
    d_k, d_v = own.full() if others is None else own.added_to(ring.block(others, me))
    return grads.of_queries(), d_k, d_v


def _next_block(ring: _Ring, here: Tensor | None, hop: int) -> tuple[Tensor | None, Work]:
    """Start sending the present block to the previous rank and receiving the next one; return its memory and work."""
    me, reach = ring.rank, ring.plan.back_reach
    if hop >= max(reach):
        return None, DONE
    owner = (me + hop + 1) % ring.size
    coming = empty_message(ring.platform, ring.shapes(owner), ring.dtype) if reach[owner] > hop else None
    leaving = here if reach[(me + hop) % ring.size] > hop else None
    return coming, ring.swap(leaving, me - 1, [(me + 1, coming)])


class _GradientSums:
    """Sums of the gradients of keys and values, which follow their blocks around the ring and end at the owners.

    After backward hop h this rank adds to the sum of the block of rank me + h and sends it to the previous rank, or to
    the block's owner if it is the last rank that used the block. The sum from the next rank is received meanwhile.
    """

    def __init__(self, ring: _Ring) -> None:
        self.ring = ring
        self._work: Work = DONE
        self._coming: Tensor | None = None
        self._own: Tensor | None = None
        self._sent: Tensor | None = None

    def pass_on(self, hop: int, grads: SpanTensors | None) -> None:
        """Add this rank's gradients of the present block (None: it is not used) to its sum, and send that on."""
        ring, plan, me = self.ring, self.ring.plan, self.ring.rank
        self._work.wait()
        total = self._coming
        if grads is not None:
            total = self._added(total, grads, me + hop)
        owner, following = (me + hop) % ring.size, (me + hop + 1) % ring.size
        # The last rank that used a block sends its sum to the owner directly, instead of around the rest of the ring.
        to = owner if plan.back_reach[owner] == hop else me - 1
        is_sent = plan.back_first[owner] and plan.back_first[owner] <= hop <= plan.back_reach[owner]
        # Referenced until the exchange, which reads this memory, is over.
        self._sent = total if is_sent else None
        is_received = plan.back_first[following] and plan.back_first[following] <= hop < plan.back_reach[following]
        self._coming = self._memory(following) if is_received else None
        arriving = [(me + 1, self._coming)]
        if plan.back_reach[me] == hop:
            self._own = self._memory(me)
            arriving.append((me - hop, self._own))
        self._work = ring.swap(self._sent, to, arriving)

    def _added(self, total: Tensor | None, grads: SpanTensors, owner: int) -> Tensor:
        """Return `total`, a message, with the gradients of one more rank added.

        It is float32 on the wire too: the sum is rounded at every hop, and 16 bits would lose small contributions.
        """
        # The first rank that uses a block starts its sum.
        if total is None:
            return pack(self.ring.platform, grads.full())
        known = self.ring.block(total, owner)
        sums = grads.added_to(known)
        is_in_place = all(x is y for x, y in zip(sums, known, strict=True))
        return total if is_in_place else pack(self.ring.platform, sums)

    def own_total(self) -> Tensor | None:
        """Return the sum for this rank's own block over all other ranks; None if no other rank used the block."""
        self._work.wait()
        return self._own

    def _memory(self, owner: int) -> Tensor:
        return empty_message(self.ring.platform, self.ring.shapes(owner), self.ring.accumulator)
