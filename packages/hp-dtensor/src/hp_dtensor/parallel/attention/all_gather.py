"""Attention that first gathers the keys and values that this rank's queries see, and no others (arXiv 2407.21783).

Each rank sends every other rank the spans of keys that it needs: all of them for full attention, the tokens before its
own under a causal mask, a border as wide as the window under a window. They are put into the order of the sequence, so
that few, large blocks are computed. In backward the gradients of gathered keys and values are returned to their owners
in float32 and added in rank order. Gathered tensors are saved for backward if no rank gathers more than its own keys
(the border of a window); else they are gathered again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_dtensor.comm.collectives import exchange_packed
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.parallel.attention.blockwise import Options, accumulator_dtype, attend, attend_grad, narrow_tokens
from hp_dtensor.parallel.attention.functional import attention_node
from hp_dtensor.parallel.attention.masks import Array, Plan, Tokens, plan_blocks
from hp_dtensor.platform.interface import Platform

Tensor = Any
Range = tuple[int, int]
Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class GatherPlan:
    """The keys that this rank sends and receives, and the blocks that it computes with them.

    Attributes:
        sent: by rank, the spans of this rank's keys that the other rank needs.
        received: by rank, the spans of the other rank's keys that this rank needs.
        order: the gathered tokens in the order of the sequence, as (rank, start, stop) within the concatenation of the
            spans received from that rank.
        plan: the blocks of this rank's queries over the gathered keys.
        indices: indices of the gathered keys in the full sequence.
        is_saved: whether gathered tensors are saved for backward, because no rank gathers more than its own keys.
    """

    sent: tuple[Ranges, ...]
    received: tuple[Ranges, ...]
    order: tuple[tuple[int, int, int], ...]
    plan: Plan
    indices: Array
    is_saved: bool


def plan_gather(tokens: Sequence[Tokens], rank: int, causal: bool, window: int | None, tile: int | None) -> GatherPlan:
    """Return the plan of `rank` for gathering among ranks that hold `tokens`."""
    # Every rank computes the needs of all ranks, so that senders and receivers agree without communication.
    needed = [[_needed(queries, keys, causal, window) for keys in tokens] for queries in tokens]
    sent, received = tuple(row[rank] for row in needed), tuple(needed[rank])
    # All ranks must decide alike: gathering again in backward is a collective.
    is_saved = all(
        sum(_length(ranges) for ranges in row) - _length(row[each]) <= tokens[each].count
        for each, row in enumerate(needed)
    )
    spans = []
    for source, ranges in enumerate(received):
        offset = 0
        for start, stop in ranges:
            # Split where the tokens are not consecutive in the full sequence: other ranks' tokens are between them.
            breaks = np.flatnonzero(np.diff(tokens[source].indices[start:stop]) != 1) + 1 + start
            for a, b in itertools.pairwise([start, *breaks.tolist(), stop]):
                spans.append((int(tokens[source].indices[a]), source, offset + a - start, offset + b - start, a, b))
            offset += stop - start
    # Into the order of the sequence: adjacent tokens of different ranks form few, large blocks.
    spans.sort()
    indices = [np.empty(0, np.int64), *(tokens[source].indices[a:b] for _, source, _, _, a, b in spans)]
    documents = tokens[rank].documents
    if documents is not None:
        parts = [(tokens[source].documents, a, b) for _, source, _, _, a, b in spans]
        # The empty one is for a rank that has no tokens and needs none.
        documents = np.concatenate([documents[:, :0], *(x[:, a:b] for x, a, b in parts if x is not None)], axis=1)
    # The gathered keys are planned like keys of one rank; the ring's merging is not needed.
    gathered = Tokens(np.concatenate(indices), documents)
    plan = plan_blocks(tokens[rank], gathered, causal, window, tile)
    order = tuple((source, start, stop) for _, source, start, stop, _, _ in spans)
    return GatherPlan(sent, received, order, plan, gathered.indices, is_saved)


def gathering_attention(
    platform: Platform,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    group: ProcessGroup,
    plan: GatherPlan,
    options: Options,
) -> Tensor:
    """Return attention over gathered keys and values of the ranks of `group`, as one autograd node."""
    # Dropout hashes global indices, so it needs those of the gathered keys.
    options = options.of_keys(plan.indices)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        gathered = _gather(platform, group, plan, k, v)
        result = attend(platform, q, *gathered, plan.plan, options)
        # What is returned in addition is saved by the autograd node.
        return (*result, *gathered) if plan.is_saved else result

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *gathered: Tensor
    ) -> list[Tensor]:
        all_k, all_v = gathered or _gather(platform, group, plan, k, v)
        d_q, *others = attend_grad(platform, grad, q, all_k, all_v, out, lse, plan.plan, options)
        return [d_q, *_return_gradients(platform, group, plan, others, (k, v))]

    return attention_node(platform, query, key, value, sinks, forward, backward)


def _gather(
    platform: Platform, group: ProcessGroup, plan: GatherPlan, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the keys and values that this rank's queries see, in the order of the sequence."""
    sends = [[_picked(platform, x, ranges) for x in (key, value) if ranges] for ranges in plan.sent]
    shapes = [[_with_length(x, _length(ranges)) for x in (key, value) if ranges] for ranges in plan.received]
    arrived = exchange_packed(group, sends, shapes, key.dtype)
    return _put_in_order(platform, arrived, plan, 0, key), _put_in_order(platform, arrived, plan, 1, value)


def _put_in_order(platform: Platform, arrived: list[Any], plan: GatherPlan, which: int, like: Tensor) -> Tensor:
    spans = [narrow_tokens(platform, arrived[source][which], start, stop) for source, start, stop in plan.order]
    if not spans:
        return platform.ops.narrow(like, 2, 0, 0)
    return spans[0] if len(spans) == 1 else platform.ops.cat(spans, 2)


def _return_gradients(
    platform: Platform, group: ProcessGroup, plan: GatherPlan, grads: Sequence[Tensor], like: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of this rank's keys and values, summed over the ranks that gathered them."""
    dtype = accumulator_dtype(platform, like[0])
    split = [_by_source(platform, platform.ops.cast(x, dtype), plan) for x in grads]
    sends = [[x[j] for x in split if ranges] for j, ranges in enumerate(plan.received)]
    shapes = [[_with_length(x, _length(ranges)) for x in like if ranges] for ranges in plan.sent]
    arrived = exchange_packed(group, sends, shapes, dtype)
    # Added in rank order, the own contribution included: the sum must not depend on which message arrives first.
    totals = [platform.zeros(tuple(x.shape), dtype) for x in like]
    for parts, ranges in zip(arrived, plan.sent, strict=True):
        if parts:
            totals = [_added_at(platform, x, part, ranges) for x, part in zip(totals, parts, strict=True)]
    return totals


def _by_source(platform: Platform, x: Tensor, plan: GatherPlan) -> list[Tensor | None]:
    """Split tensors in the order of the sequence by source rank, each in the order of the spans received from it."""
    spans: list[list[tuple[int, Tensor]]] = [[] for _ in plan.received]
    index = 0
    for source, start, stop in plan.order:
        spans[source].append((start, narrow_tokens(platform, x, index, index + stop - start)))
        index += stop - start
    ordered = [[span for _, span in sorted(each, key=lambda one: one[0])] for each in spans]
    return [None if not each else each[0] if len(each) == 1 else platform.ops.cat(each, 2) for each in ordered]


def _added_at(platform: Platform, total: Tensor, part: Tensor, ranges: Ranges) -> Tensor:
    """Return `total` with `part`, the concatenation of spans of tokens, added at these spans."""
    ops = platform.ops
    spans, at, used = [], 0, 0
    for start, stop in ranges:
        if start > at:
            spans.append(ops.narrow(total, 2, at, start - at))
        span = narrow_tokens(platform, part, used, used + stop - start)
        spans.append(ops.add(narrow_tokens(platform, total, start, stop), span))
        at, used = stop, used + stop - start
    if at < total.shape[2]:
        spans.append(ops.narrow(total, 2, at, total.shape[2] - at))
    return spans[0] if len(spans) == 1 else ops.cat(spans, 2)


def _picked(platform: Platform, x: Tensor, ranges: Ranges) -> Tensor:
    """Return the concatenated spans of tokens of a tensor."""
    spans = [narrow_tokens(platform, x, start, stop) for start, stop in ranges]
    return spans[0] if len(spans) == 1 else platform.ops.cat(spans, 2)


def _needed(queries: Tokens, keys: Tokens, causal: bool, window: int | None) -> Ranges:
    """Return the spans of `keys`, in local indices, that some of `queries` see."""
    # A difference array: O(ranges + keys), whatever the ranges overlap.
    seen = np.zeros(keys.count + 1, np.int64)
    for rows in plan_blocks(queries, keys, causal, window, None):
        for segment in rows.segments:
            for each in segment.keys:
                seen[each.start] += 1
                seen[each.stop] -= 1
    # The running sum counts the ranges that contain a key; where it is positive, some query sees the key.
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.cumsum(seen) > 0, [0]]).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _with_length(x: Tensor, length: int) -> tuple[int, ...]:
    return (*x.shape[:2], length, x.shape[3])
