"""Ring attention (arXiv 2310.01889): keys and values travel from rank to rank while queries stay.

Forward: the block of keys and values of each rank goes to the next rank, as many hops as a query needs it; the
result over each block is merged by its log-sum-exp. Backward runs the other way: blocks go to the rank before, and the
sum of their gradients, in float32, one hop behind them, until it is at home after as many hops. A hop is under way
while the rank computes with the block that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.process_group import DONE, ProcessGroup, Work
from hp_dtensor.parallel.attention.attention import attention_node
from hp_dtensor.parallel.attention.blockwise import (
    AttentionGrads,
    Options,
    PartialAttention,
    Stretches,
    accumulator_dtype,
)
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
from hp_dtensor.parallel.attention.messages import empty_message, packed, unpacked
from hp_dtensor.platform.interface import Platform

Tensor = Any
Block = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RingPlan:
    """The blocks that this rank computes, and how far each rank's keys and values travel.

    Attributes:
        plans: by hop, the blocks of this rank's queries over the keys of the rank so many hops before.
        reach: by rank, the hops that its keys and values go forward.
        back_reach: by rank, the hops that they go the other way in backward.
        back_first: by rank, the first of those at which they are needed; 0: at none.
        places: by rank, the places of its keys in the whole sequence.
    """

    plans: tuple[Plan, ...]
    reach: tuple[int, ...]
    back_reach: tuple[int, ...]
    back_first: tuple[int, ...]
    places: tuple[Array, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """By rank, its number of keys."""
        return tuple(int(places.size) for places in self.places)


def plan_ring(tokens: Sequence[Tokens], rank: int, causal: bool, window: int | None, tile: int | None) -> RingPlan:
    """Plan a ring whose ranks hold `tokens`, as `rank` sees it."""
    return plan_member(tokens, rank, needed_hops(tokens, causal, window), causal, window, tile)


def needed_hops(tokens: Sequence[Tokens], causal: bool, window: int | None) -> list[list[bool]]:
    """Return for each rank's keys whether the rank so many hops after it sees any of them."""
    size, rows = len(tokens), [start for start, _ in equal_rows(tokens)]
    # For all pairs of ranks, in every step with packed rows: runs are looked for once, and no blocks are planned.
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
    """Return `plan_ring` of one rank, from what is the same for all of them."""
    size = len(tokens)
    reach = [max((hop for hop in range(1, size) if row[hop]), default=0) for row in needed]
    back = [[size - hop for hop in range(size - 1, 0, -1) if row[hop]] for row in needed]
    rows = equal_rows(tokens)
    plans = tuple(
        plan_blocks(tokens[rank], tokens[(rank - hop) % size], causal, window, tile, rows) for hop in range(size)
    )
    return RingPlan(
        plans,
        tuple(reach),
        tuple(max(hops, default=0) for hops in back),
        tuple(min(hops, default=0) for hops in back),
        tuple(each.places for each in tokens),
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
    """Attend with keys and values that are spread over the ranks of `group`, as one autograd node."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Block:
        return _forward(_Ring(platform, group, plan, k, v), q, options)

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return _backward(_Ring(platform, group, plan, k, v), AttentionGrads(platform, grad, q, out, lse), options)

    return attention_node(platform, query, key, value, sinks, forward, backward)


class _Ring:
    """One passage of keys and values around the ring, as one rank sees it."""

    def __init__(self, platform: Platform, group: ProcessGroup, plan: RingPlan, key: Tensor, value: Tensor) -> None:
        self.platform, self.group, self.plan = platform, group, plan
        self.size, self.rank = group.size, group.rank
        self.dtype, self.accumulator = key.dtype, accumulator_dtype(platform, key)
        self._shapes = tuple(key.shape), tuple(value.shape)
        self.own = packed(platform, (key, value))

    def shapes(self, owner: int) -> list[tuple[int, ...]]:
        """Return the shapes of the keys and values of a rank."""
        length = self.plan.lengths[owner % self.size]
        return [(*shape[:2], length, shape[3]) for shape in self._shapes]

    def places(self, owner: int) -> Array:
        """Return the places of a rank's keys in the whole sequence."""
        return self.plan.places[owner % self.size]

    def block(self, message: Tensor, owner: int) -> Block:
        key, value = unpacked(self.platform, message, self.shapes(owner))
        return key, value

    def swap(self, leaving: Tensor | None, to: int, arriving: Sequence[tuple[int, Tensor | None]]) -> Work:
        """Send `leaving` to rank `to`, and fill the memory that is to come from each of the ranks in `arriving`."""
        sends: list[Tensor | None] = [None] * self.size
        receives: list[Tensor | None] = [None] * self.size
        sends[to % self.size] = leaving
        for source, memory in arriving:
            if memory is not None:
                receives[source % self.size] = memory
        return self.group.start_exchange(sends, receives)


def _forward(ring: _Ring, q: Tensor, options: Options) -> Block:
    me, reach = ring.rank, ring.plan.reach
    here: Tensor | None = ring.own
    found = PartialAttention(ring.platform, q, ring.block(ring.own, me)[1])
    for hop in range(max(reach) + 1):
        work: Work = DONE
        coming: Tensor | None = None
        # Begun before the block that is here is worked on: the next one travels meanwhile.
        if hop < max(reach):
            owner = (me - hop - 1) % ring.size
            if reach[owner] > hop:
                coming = empty_message(ring.platform, ring.shapes(owner), ring.dtype)
            # A block goes no further than to the last rank that sees a key of it.
            leaving = here if reach[(me - hop) % ring.size] > hop else None
            work = ring.swap(leaving, me + 1, [(me - 1, coming)])
        plan = ring.plan.plans[hop]
        if not is_empty(plan):
            assert here is not None
            found.add(*ring.block(here, me - hop), plan, options.of_keys(ring.places(me - hop)))
        work.wait()
        here = coming
    return found.total()


def _backward(ring: _Ring, grads: AttentionGrads, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; the own block is computed while the first hop is under way."""
    me, size = ring.rank, ring.size
    last = max(ring.plan.back_reach)
    coming, arrival = _next_block(ring, ring.own, 0)
    own = grads.add(*ring.block(ring.own, me), ring.plan.plans[0], options.of_keys(ring.places(me)))
    sums = _TravellingSums(ring)
    for hop in range(1, last + 1):
        arrival.wait()
        here = coming
        coming, arrival = _next_block(ring, here, hop)
        plan = ring.plan.plans[size - hop]
        found = None
        if not is_empty(plan):
            found = grads.add(*ring.block(here, me + hop), plan, options.of_keys(ring.places(me + hop)))
        sums.pass_on(hop, found)
    home = sums.at_home()
    d_k, d_v = own.whole() if home is None else own.added_to(ring.block(home, me))
    return grads.of_queries(), d_k, d_v


def _next_block(ring: _Ring, here: Tensor | None, hop: int) -> tuple[Tensor | None, Work]:
    """Send the block that is here on to the rank before; return the memory of the next one, which is under way."""
    me, reach = ring.rank, ring.plan.back_reach
    if hop >= max(reach):
        return None, DONE
    owner = (me + hop + 1) % ring.size
    coming = empty_message(ring.platform, ring.shapes(owner), ring.dtype) if reach[owner] > hop else None
    leaving = here if reach[(me + hop) % ring.size] > hop else None
    return coming, ring.swap(leaving, me - 1, [(me + 1, coming)])


class _TravellingSums:
    """The sums of gradients of keys and values, which follow their block and then go home.

    After hop h of backward this rank adds to the sum of the block of rank me + h, and sends it to the rank before, or
    home from the last rank that needed the block. What it has from the rank behind arrives meanwhile.
    """

    def __init__(self, ring: _Ring) -> None:
        self.ring = ring
        self._work: Work = DONE
        self._coming: Tensor | None = None
        self._home: Tensor | None = None
        self._sent: Tensor | None = None

    def pass_on(self, hop: int, grads: Stretches | None) -> None:
        ring, plan, me = self.ring, self.ring.plan, self.ring.rank
        self._work.wait()
        total = self._coming
        if grads is not None:
            total = self._added(total, grads, me + hop)
        owner, following = (me + hop) % ring.size, (me + hop + 1) % ring.size
        to = owner if plan.back_reach[owner] == hop else me - 1
        goes = plan.back_first[owner] and plan.back_first[owner] <= hop <= plan.back_reach[owner]
        # Held until the exchange is over, which reads its memory.
        self._sent = total if goes else None
        travels = plan.back_first[following] and plan.back_first[following] <= hop < plan.back_reach[following]
        self._coming = self._memory(following) if travels else None
        arriving = [(me + 1, self._coming)]
        if plan.back_reach[me] == hop:
            self._home = self._memory(me)
            arriving.append((me - hop, self._home))
        self._work = ring.swap(self._sent, to, arriving)

    def _added(self, total: Tensor | None, grads: Stretches, owner: int) -> Tensor:
        """Return the message of the sum of `total` and the gradients of one more rank.

        It is of float32 on the wire too: the sum is rounded at every hop, and 16 bits would lose the small parts.
        """
        if total is None:
            return packed(self.ring.platform, grads.whole())
        known = self.ring.block(total, owner)
        sums = grads.added_to(known)
        is_in_place = all(x is y for x, y in zip(sums, known, strict=True))
        return total if is_in_place else packed(self.ring.platform, sums)

    def at_home(self) -> Tensor | None:
        """Return the sum of this rank's own block over all other ranks; None where no other needed it."""
        self._work.wait()
        return self._home

    def _memory(self, owner: int) -> Tensor:
        return empty_message(self.ring.platform, self.ring.shapes(owner), self.ring.accumulator)
