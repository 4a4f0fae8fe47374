"""Cost model of context parallelism: bytes sent, time and memory of each method, counted from its plan.

`choose_context_parallel` ranks the methods by it. Times are those of a latency and bandwidth model of the links
(`Links`) and of a constant rate of the attention kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hp_dtensor.comm.links import DEFAULT_LINKS, Links
from hp_dtensor.exceptions import AttentionError
from hp_dtensor.parallel.attention.all_gather import plan_gather
from hp_dtensor.parallel.attention.masks import Plan, Tokens, count_scores
from hp_dtensor.parallel.attention.ring import needed_spans, plan_member
from hp_dtensor.parallel.attention.sharding import SequenceSharding, check_method, exchanging_ranks
from hp_dtensor.parallel.attention.ulysses import HeadShares


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention of one layer over a full sequence, before ranks share it.

    Attributes:
        batch: number of sequences that the ranks share.
        length: tokens of each.
        heads, kv_heads, head_dim: those of this rank; tensor parallel ranks have a share of the heads.
        causal, window: as in `hp_dtensor.AttentionMask`.
        itemsize: bytes per element of queries, keys and values; gradients of keys and values are sent in float32.
        documents: lengths of the documents packed into each sequence, within which it is sharded; None: one document.

    Examples:
        >>> AttentionShape(batch=1, length=8192, heads=32, kv_heads=8, head_dim=128).window is None
        True
    """

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    itemsize: int = 2
    documents: tuple[int, ...] | None = None

    def tokens(self, sharding: SequenceSharding) -> list[Tokens]:
        """Return the tokens of each ring rank."""
        indices = [sharding.ring_indices(ring) for ring in range(sharding.ring_size)]
        if self.documents is None:
            return [Tokens(each) for each in indices]
        # Only row 0 is planned: the cost model assumes that all rows have the same documents.
        numbers = np.repeat(np.arange(len(self.documents)), self.documents)
        return [Tokens(each, numbers[None, each]) for each in indices]


@dataclass(frozen=True, kw_only=True)
class ContextCost:
    """The cost of one layer's attention by one method, forward and backward.

    Attributes:
        method, ulysses_degree: arguments of `context_parallel_attention` and `SequenceSharding`.
        forward_bytes, backward_bytes: bytes that a rank sends, mean over ranks.
        heads_bytes: the share of the exchange of heads in each of the two; it does not overlap with computation.
        seconds: computation of the busiest rank plus the communication that computation does not hide.
        extra_bytes: peak memory of a rank for other ranks' keys and values, and their gradients.

    Examples:
        >>> shape = AttentionShape(batch=1, length=64, heads=8, kv_heads=2, head_dim=16, itemsize=4)
        >>> cost: ContextCost = choose_context_parallel(shape, 2, method="ring", ulysses_degree=1).best
        >>> cost.forward_bytes, cost.backward_bytes  # 3/4 of half of 2 * 64 * 2 * 16 * 4; and with their gradients
        (6144.0, 12288.0)
    """

    method: str
    ulysses_degree: int
    forward_bytes: float
    backward_bytes: float
    heads_bytes: float
    seconds: float
    extra_bytes: float

    @property
    def wire_bytes(self) -> float:
        return self.forward_bytes + self.backward_bytes


@dataclass(frozen=True)
class ContextChoice:
    """The ways to share a sequence that were considered, cheapest first.

    Attributes:
        best: the chosen one: least time, then fewest bytes.
        costs: all that were considered, best first.

    Examples:
        >>> shape = AttentionShape(batch=1, length=8192, heads=32, kv_heads=8, head_dim=128)
        >>> choose_context_parallel(shape, 4).best.method in ("ring", "all_gather")
        True
    """

    ranks: int
    costs: tuple[ContextCost, ...] = field(repr=False)

    @property
    def best(self) -> ContextCost:
        return self.costs[0]

    def __str__(self) -> str:
        lines = [f"{'':2}{'method':<12}{'ulysses':>8}{'sent MiB':>12}{'extra MiB':>12}{'ms':>10}"]
        for index, cost in enumerate(self.costs):
            lines.append(
                f"{'* ' if index == 0 else '  '}{cost.method:<12}{cost.ulysses_degree:>8}"
                f"{cost.wire_bytes / 2**20:>12.3f}{cost.extra_bytes / 2**20:>12.3f}{cost.seconds * 1e3:>10.3f}"
            )
        return "\n".join(lines)


def choose_context_parallel(
    shape: AttentionShape,
    ranks: int,
    *,
    method: str | None = None,
    ulysses_degree: int | None = None,
    links: Links = DEFAULT_LINKS,
    axis: str = "cp",
    flops: float = 1e14,
) -> ContextChoice:
    """Return the costs of the methods by which `ranks` can share a sequence, cheapest first.

    Args:
        method: `"ring"` or `"all_gather"` among the ranks that do not exchange heads; `"ulysses"`: all ranks do; None:
            any.
        ulysses_degree: number of ranks that exchange heads; None: any divisor of `ranks` up to the number of heads.
        links: latency and bandwidth of mesh axes.
        axis: name of the axis in `links`.
        flops: operations per second of a rank's attention kernels.

    Raises:
        AttentionError: unknown method, no ranks, or a `ulysses_degree` that contradicts the method, does not divide
            `ranks` or exceeds the number of heads.

    Examples:
        >>> print(choose_context_parallel(AttentionShape(batch=1, length=64, heads=8, kv_heads=8, head_dim=16), 1))
          method       ulysses    sent MiB   extra MiB        ms
        * ulysses            1       0.000       0.000     0.000
    """
    if method is not None:
        check_method("choose_context_parallel", method)
    if ranks < 1:
        raise AttentionError(f"choose_context_parallel: expected at least one rank, got {ranks}")
    if method == "ulysses":
        ulysses_degree = exchanging_ranks("choose_context_parallel", method, ulysses_degree, ranks)
    # More ranks than heads would leave ranks without work.
    degrees = [degree for degree in range(1, ranks + 1) if ranks % degree == 0 and degree <= max(shape.heads, 1)]
    if ulysses_degree is not None and ulysses_degree not in degrees:
        raise AttentionError(
            f"ulysses_degree={ulysses_degree} of {ranks} context parallel ranks and {shape.heads} heads; "
            f"expected one of {degrees}"
        )
    chosen = degrees if ulysses_degree is None else [ulysses_degree]
    found = [cost for degree in chosen for cost in _costs_of(shape, ranks, degree, method, links, axis, flops)]
    return ContextChoice(
        ranks, tuple(sorted(found, key=lambda each: (each.seconds, each.wire_bytes, each.extra_bytes)))
    )


def _costs_of(
    shape: AttentionShape, ranks: int, degree: int, method: str | None, links: Links, axis: str, flops: float
) -> Iterator[ContextCost]:
    """Yield the cost of each method by which ranks share the sequence if `degree` of them exchange heads."""
    # Without a causal mask all tokens cost the same, and contiguous spans need fewer kernel calls.
    is_balanced = shape.causal or shape.documents is not None
    sharding = SequenceSharding(length=shape.length, ranks=ranks, ulysses_degree=degree, balanced=is_balanced)
    methods = ("ulysses",) if degree == ranks else ("ring", "all_gather") if method is None else (method,)
    heads = _HeadsExchanged(shape, sharding)
    for each in methods:
        if shape.documents is not None:
            sharding = dataclasses.replace(sharding, documents=(shape.documents,), even_hops=each == "ring")
        inner = (_Gather if each == "all_gather" else _Ring)(shape, sharding, heads)
        forward, backward = heads.wire_bytes + inner.forward_bytes, heads.wire_bytes + inner.backward_bytes
        # Four exchanges per layer: heads and result, in forward and in backward; none overlaps with computation.
        alone = links.seconds("exchange", (axis,), heads.wire_bytes) * 4 if degree > 1 else 0.0
        yield ContextCost(
            method=each,
            ulysses_degree=degree,
            forward_bytes=forward,
            backward_bytes=backward,
            heads_bytes=heads.wire_bytes,
            seconds=alone + inner.seconds(links, axis, flops),
            extra_bytes=inner.extra_bytes,
        )


class _HeadsExchanged:
    """The exchange of heads within a Ulysses group: queries, keys and values one way, the result back.

    Attributes:
        wire_bytes: bytes sent by a rank in one direction of the layer, mean over ranks.
        query_heads, kv_heads: maximum heads of a rank.
    """

    def __init__(self, shape: AttentionShape, sharding: SequenceSharding) -> None:
        degree = sharding.ulysses_degree
        shares = HeadShares.of(shape.heads, shape.kv_heads, degree)
        queries, keys = (sum(b - a for a, b in spans) for spans in (shares.queries, shares.keys))
        self.query_heads, self.kv_heads = (max(b - a for a, b in spans) for spans in (shares.queries, shares.keys))
        self.kv_heads_mean = keys / degree
        elements = shape.batch * shape.length / sharding.ranks * shape.head_dim * (2 * queries + 2 * keys) / degree
        self.wire_bytes = (degree - 1) * elements * shape.itemsize


class _Ring:
    """Cost of ring attention for a sequence sharding: bytes and time of each hop. All ranks hop in lock-step."""

    def __init__(self, shape: AttentionShape, sharding: SequenceSharding, heads: _HeadsExchanged) -> None:
        size, tokens = sharding.ring_size, shape.tokens(sharding)
        needed = needed_spans(tokens, shape.causal, shape.window)
        plans = [plan_member(tokens, ring, needed, shape.causal, shape.window, None) for ring in range(size)]
        # Every block is sent to the ranks that see it, in both passes, and its gradients back to its owner.
        tokens_sent = sum(stop - start for spans in needed for start, stop in spans[1:]) / size
        per_token = 2 * shape.batch * heads.kv_heads_mean * shape.head_dim
        self.forward_bytes = tokens_sent * per_token * shape.itemsize
        self.backward_bytes = self.forward_bytes + tokens_sent * per_token * _sum_itemsize(shape)
        self.hops = plans[0].last
        # Ranks hop in lock-step, so each hop lasts as long as its busiest rank.
        self._work = [max(_operations(plan.plans[hop], shape, heads) for plan in plans) for hop in range(size)]
        # Of keys and values: the present block, the next one, and the message that is sent meanwhile. Of gradients:
        # those of the present block, the message with them, and the one that is received meanwhile.
        block = max(each.count for each in tokens) * 2 * shape.batch * heads.kv_heads * shape.head_dim
        self.extra_bytes = 0.0 if size == 1 else block * (3 * shape.itemsize + 3 * _sum_itemsize(shape))

    def seconds(self, links: Links, axis: str, flops: float) -> float:
        compute = [work / flops for work in self._work]
        if not self.hops:
            return 3.5 * sum(compute)
        forward = links.seconds("exchange", (axis,), self.forward_bytes / self.hops)
        backward = links.seconds("exchange", (axis,), self.backward_bytes / self.hops)
        # Each hop overlaps with attention over the block before it. Backward has 2.5 times the products of forward:
        # five (S, dP, dQ, dK, dV) against two (S, O).
        hidden, rest = compute[: self.hops], sum(compute[self.hops :])
        forward_seconds = sum(max(forward, work) for work in hidden) + rest
        backward_seconds = sum(max(backward, 2.5 * work) for work in hidden) + 2.5 * rest
        return forward_seconds + backward_seconds


class _Gather:
    """Cost of gathering the keys and values that are seen: communication first, then all of the computation."""

    def __init__(self, shape: AttentionShape, sharding: SequenceSharding, heads: _HeadsExchanged) -> None:
        size, tokens = sharding.ring_size, shape.tokens(sharding)
        plans = [plan_gather(tokens, ring, shape.causal, shape.window, None) for ring in range(size)]
        others = [
            sum(b - a for source, ranges in enumerate(plan.received) if source != ring for a, b in ranges)
            for ring, plan in enumerate(plans)
        ]
        per_token = 2 * shape.batch * heads.kv_heads_mean * shape.head_dim
        mean = float(np.mean(others))
        self.forward_bytes = mean * per_token * shape.itemsize
        # Gathered again in backward unless saved.
        again = 0.0 if plans[0].is_saved else self.forward_bytes
        self.backward_bytes = again + mean * per_token * _sum_itemsize(shape)
        self._work = max(_operations(plan.plan, shape, heads) for plan in plans)
        most = max(others) * 2 * shape.batch * heads.kv_heads * shape.head_dim
        self.extra_bytes = most * (shape.itemsize + _sum_itemsize(shape))

    def seconds(self, links: Links, axis: str, flops: float) -> float:
        forward = links.seconds("exchange", (axis,), self.forward_bytes)
        return forward + links.seconds("exchange", (axis,), self.backward_bytes) + 3.5 * self._work / flops


def _sum_itemsize(shape: AttentionShape) -> int:
    # Sums of gradients are sent in float32 at least.
    return max(shape.itemsize, 4)


def _operations(plan: Plan, shape: AttentionShape, heads: _HeadsExchanged) -> float:
    """Return the floating-point operations of a plan in forward: two products, of 2 operations per element each."""
    return 4.0 * count_scores(plan) * shape.batch * heads.query_heads * shape.head_dim
