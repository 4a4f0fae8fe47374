"""Ring attention (arXiv 2310.01889): queries stay; each rank attends to the keys and values of one rank after another.

In hop h a rank uses the keys and values of the rank h before it. They come from their owner, which sends each rank only
the span of tokens that it sees, so no rank passes on what it does not use. The results over the blocks are merged by
log-sum-exp (`PartialAttention` in `blockwise.py`). Backward is the same, and returns float32 gradients of a block to
its owner, which adds them. The transfer of the next hop is under way while a rank computes on the block that it has.
Where ranks read each other's messages in place, each rank puts a span of its keys and values there once for all ranks
that see it, and all hops are started ahead. A late rank delays those that send to it, too.

Compared with a ring in which neighbours pass blocks on, a rank sends as many messages and at most as many bytes; but
where several ranks of a host share one network card, more of them cross it. There a `ulysses_degree` of the ranks of a
host leaves one rank per host in each ring.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from hp_dtensor.comm.collectives import empty_message, unpack
from hp_dtensor.comm.process_group import ProcessGroup, Work
from hp_dtensor.parallel.attention.blockwise import (
    AttentionGrads,
    Options,
    PartialAttention,
    SpanTensors,
    accumulator_dtype,
    narrow_tokens,
    sums_of,
)
from hp_dtensor.parallel.attention.functional import attention_node
from hp_dtensor.parallel.attention.masks import (
    Array,
    Plan,
    Rows,
    Tokens,
    equal_rows,
    plan_blocks,
    runs_by_document,
    seen_span,
)
from hp_dtensor.platform.interface import Platform

Tensor = Any
Block = tuple[Tensor, Tensor]
Span = tuple[int, int]


@dataclass(frozen=True)
class RingPlan:
    """The blocks that this rank computes, and the keys that are exchanged for them.

    Attributes:
        plans: by hop h, the blocks of this rank's queries over the span of keys of the rank h before it.
        received: by hop h, the span (start, stop) of the keys of the rank h before this one that it receives.
        sent: by hop h, the span of this rank's keys that it sends to the rank h after it.
        indices: by hop, the indices of the received keys in the full sequence.
        last: the last hop in which some rank of the ring receives keys.
        longest: the largest number of keys of a rank.
    """

    plans: tuple[Plan, ...]
    received: tuple[Span, ...]
    sent: tuple[Span, ...]
    indices: tuple[Array, ...]
    last: int
    longest: int


def plan_ring(tokens: Sequence[Tokens], rank: int, causal: bool, window: int | None, tile: int | None) -> RingPlan:
    """Return the plan of `rank` in a ring whose ranks hold `tokens`."""
    return plan_member(tokens, rank, needed_spans(tokens, causal, window), causal, window, tile)


def needed_spans(tokens: Sequence[Tokens], causal: bool, window: int | None) -> list[list[Span]]:
    """Return, as `[rank][hop]`, the span of the rank's keys that the rank `hop` after it sees; hop 0: all of them."""
    size, rows = len(tokens), [start for start, _ in equal_rows(tokens)]
    # Evaluated for all pairs of ranks in every step with packed rows, so runs are found once and no blocks are planned.
    # O(ranks^2) pairs below, but O(tokens) work here.
    runs = [[runs_by_document(each, row) for row in rows] for each in tokens]

    def span(queries: int, keys: int) -> Span:
        pairs = zip(runs[queries % size], runs[keys], strict=True)
        spans = [each for pair in pairs if (each := seen_span(*pair, causal, window))]
        return min((start for start, _ in spans), default=0), max((stop for _, stop in spans), default=0)

    return [[(0, tokens[owner].count), *(span(owner + hop, owner) for hop in range(1, size))] for owner in range(size)]


def plan_member(
    tokens: Sequence[Tokens],
    rank: int,
    needed: Sequence[Sequence[Span]],
    causal: bool,
    window: int | None,
    tile: int | None,
) -> RingPlan:
    """Return the plan of one rank, given the result of `needed_spans`, which is the same for all ranks."""
    size = len(tokens)
    received = [needed[(rank - hop) % size][hop] for hop in range(size)]
    keys = [tokens[(rank - hop) % size].narrowed(*span) for hop, span in enumerate(received)]
    # The same ranges of rows for all hops, because their results are merged by rows.
    rows = equal_rows(tokens)
    return RingPlan(
        tuple(plan_blocks(tokens[rank], each, causal, window, tile, rows) for each in keys),
        tuple(received),
        tuple(needed[rank]),
        tuple(each.indices for each in keys),
        max((hop for spans in needed for hop, (start, stop) in enumerate(spans) if hop and stop > start), default=0),
        max(each.count for each in tokens),
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
        found = PartialAttention(platform, q, v)

        def attend(hop: int, block: Block) -> None:
            found.add(*block, plan.plans[hop], options.of_keys(plan.indices[hop]))

        _Ring(platform, group, plan, (k, v)).run(attend)
        return found.total()

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        ring, grads = _Ring(platform, group, plan, (k, v)), AttentionGrads(platform, grad, q, out, lse)
        sums = _GradientSums(ring)

        def attend(hop: int, block: Block) -> None:
            sums.found = grads.add(*block, plan.plans[hop], options.of_keys(plan.indices[hop]))

        ring.run(attend, sums.exchange)
        return grads.of_queries(), *sums.total()

    return attention_node(platform, query, key, value, sinks, forward, backward)


class _Ring:
    """One pass of keys and values around the ring.

    Args:
        own: this rank's keys and values.
    """

    def __init__(self, platform: Platform, group: ProcessGroup, plan: RingPlan, own: Block) -> None:
        self.platform, self.group, self.plan, self.own = platform, group, plan, own
        # The same on all ranks: one that is ahead may wait until the others have started to receive.
        per_token = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in own) * platform.itemsize(own[0].dtype)
        self.is_ahead = group.reads_in_place(own[0], plan.longest * per_token)
        self._has_failed = False
        # One object per span: ranks that get the same one share a message.
        self._sent = {(a, b): tuple(narrow_tokens(platform, x, a, b) for x in own) for a, b in plan.sent if b > a}

    def run(self, attend: Callable[[int, Block], None], finish: Callable[[int], None] = lambda hop: None) -> None:
        """Call `attend(hop, block)` for each block that this rank sees, and `finish(hop)` after each hop."""
        try:
            self._run(attend, finish)
        except BaseException:
            # A later exchange of the group receives what is still to arrive, for which nothing is to be computed.
            self._has_failed = True
            raise

    def _run(self, attend: Callable[[int, Block], None], finish: Callable[[int], None]) -> None:
        last = self.plan.last
        # The next block is sent while this rank computes on the present one.
        num_started = last if self.is_ahead else min(1, last)
        works = deque(self._start(hop, attend) for hop in range(1, num_started + 1))
        attend(0, self.own)
        finish(0)
        for hop in range(1, last + 1):
            if num_started < last:
                num_started += 1
                works.append(self._start(num_started, attend))
            works.popleft().wait()
            finish(hop)

    def _start(self, hop: int, attend: Callable[[int, Block], None]) -> Work:
        """Start the exchange of a hop; its `wait` calls `attend` with the received block."""
        plan, me = self.plan, self.group.rank
        # In the first hop for all ranks, which read one copy, where they read it in place.
        hops = [hop] if not self.is_ahead else range(1, plan.last + 1) if hop == 1 else []
        sends = {me + each: self._sent.get(plan.sent[each]) for each in hops}
        read = functools.partial(attend, hop)
        return self.exchange(sends, me - hop, plan.received[hop], self.own[0].dtype, read)

    def exchange(
        self, sends: Mapping[int, Any], source: int, span: Span, dtype: Any, read: Callable[[Block], object]
    ) -> Work:
        """Start sending pairs of tensors to ranks, and receiving one for a span of tokens, which `wait` reads."""
        size = self.group.size
        leaving: list[Any] = [None] * size
        receives: list[Tensor | None] = [None] * size
        # Keys and values are one message: half the latency of two.
        for target, pair in sends.items():
            leaving[target % size] = pair
        shapes = [(*x.shape[:2], span[1] - span[0], x.shape[3]) for x in self.own]
        # Also if empty: a rank without messages connects too, as the connection of the others waits for it.
        receives[source % size] = empty_message(self.platform, shapes, dtype)

        def read_pair(_: int, message: Tensor) -> None:
            if not self._has_failed:
                first, second = unpack(self.platform, message, shapes)
                read((first, second))

        return self.group.start_exchange(leaving, receives, read_pair)


_ALL_ROWS = Rows(0, None, ())


class _GradientSums:
    """Gradients of keys and values: other ranks' are returned to them, and the own ones are summed over the ranks.

    Attributes:
        found: the gradients of the present hop's block; None: this rank does not use it.
    """

    def __init__(self, ring: _Ring) -> None:
        self._ring, self.found = ring, cast("SpanTensors | None", None)
        self._total = sums_of(ring.platform, *ring.own)
        self._works: deque[Work] = deque()

    def exchange(self, hop: int) -> None:
        """Start returning the present gradients to the block's owner, and receiving those of the own block."""
        ring, (found, self.found) = self._ring, (self.found, None)
        grads = None if found is None else found.full()
        if hop == 0:
            assert grads is not None
            self._total.add(_ALL_ROWS, 0, ring.own[0].shape[2], grads)
            return
        # Only one hop's gradients are under way: while the present ones were computed, those before were sent. Where
        # hops are started ahead, messages are in shared memory, as far as they fit there, and none is waited for.
        while self._works and not ring.is_ahead:
            self._works.popleft().wait()
        me, span = ring.group.rank, ring.plan.sent[hop]
        read = functools.partial(self._total.add, _ALL_ROWS, *span)
        # In float32, in which they are summed: 16 bits would lose small contributions.
        dtype = accumulator_dtype(ring.platform, ring.own[0])
        self._works.append(ring.exchange({me - hop: grads}, me + hop, span, dtype, read))

    def total(self) -> Block:
        """Wait for the gradients of the own block, and return their sums over all ranks."""
        while self._works:
            self._works.popleft().wait()
        d_k, d_v = self._total.full()
        return d_k, d_v
