"""Attention that gathers the keys and values that this rank's queries see, and no others (arXiv 2407.21783).

Each rank sends every other one the stretches of keys that it needs: all of them for full attention, the tokens before
its own under a causal mask, a border as wide as the window. The gradients of what was gathered go home the same way in
float32 and are added in rank order. What was gathered is kept for backward where it is no more than the rank's own
keys (the border of a window); else it is gathered again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.parallel.attention.attention import attention_node
from hp_dtensor.parallel.attention.blockwise import Options, accumulator_dtype, attend, attend_grad, of_tokens
from hp_dtensor.parallel.attention.masks import Array, Plan, Tokens, plan_blocks
from hp_dtensor.parallel.attention.messages import empty_message, packed, unpacked
from hp_dtensor.platform.interface import Platform

Tensor = Any
Range = tuple[int, int]
Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class GatherPlan:
    """The keys that are sent and gathered, and the blocks that are computed with them.

    Attributes:
        given: by rank, the stretches of this rank's keys that it needs.
        taken: by rank, the stretches of its keys that this rank needs.
        order: the pieces of what is gathered in the order of their places in the sequence: (rank, start, stop) among
            that rank's stretches laid end to end.
        plan: the blocks of this rank's queries over the gathered keys.
        places: of the gathered keys in the whole sequence.
        is_kept: whether what is gathered is kept for backward: no rank gathers more than its own keys again.
    """

    given: tuple[Ranges, ...]
    taken: tuple[Ranges, ...]
    order: tuple[tuple[int, int, int], ...]
    plan: Plan
    places: Array
    is_kept: bool


def plan_gather(tokens: Sequence[Tokens], rank: int, causal: bool, window: int | None, tile: int | None) -> GatherPlan:
    """Plan the gathering among ranks that hold `tokens`, as `rank` sees it."""
    needed = [[_needed(queries, keys, causal, window) for keys in tokens] for queries in tokens]
    given, taken = tuple(row[rank] for row in needed), tuple(needed[rank])
    # Every rank decides alike: backward gathers again on all of them, or on none.
    is_kept = all(
        sum(_length(ranges) for ranges in row) - _length(row[each]) <= tokens[each].count
        for each, row in enumerate(needed)
    )
    pieces = []
    for source, ranges in enumerate(taken):
        offset = 0
        for start, stop in ranges:
            for a, b in _stretches(tokens[source].places, start, stop):
                pieces.append((int(tokens[source].places[a]), source, offset + a - start, offset + b - start, a, b))
            offset += stop - start
    pieces.sort()
    places = [tokens[source].places[a:b] for _, source, _, _, a, b in pieces]
    documents = [_documents(tokens[source], a, b) for _, source, _, _, a, b in pieces]
    gathered = Tokens(
        np.concatenate(places) if places else np.empty(0, np.int64),
        None if tokens[rank].documents is None else np.concatenate(documents, axis=1),
    )
    plan = plan_blocks(tokens[rank], gathered, causal, window, tile)
    order = tuple((source, start, stop) for _, source, start, stop, _, _ in pieces)
    return GatherPlan(given, taken, order, plan, gathered.places, is_kept)


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
    """Attend with the keys and values of other ranks of `group` that are seen, as one autograd node."""

    options = options.of_keys(plan.places)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        gathered = _gather(platform, group, plan, k, v)
        result = attend(platform, q, *gathered, plan.plan, options)
        return (*result, *gathered) if plan.is_kept else result

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *gathered: Tensor
    ) -> list[Tensor]:
        all_k, all_v = gathered or _gather(platform, group, plan, k, v)
        d_q, *others = attend_grad(platform, grad, q, all_k, all_v, out, lse, plan.plan, options)
        return [d_q, *_send_home(platform, group, plan, others, (k, v))]

    return attention_node(platform, query, key, value, sinks, forward, backward)


def _gather(
    platform: Platform, group: ProcessGroup, plan: GatherPlan, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    sends = [_picked(platform, (key, value), ranges) for ranges in plan.given]
    shapes = [[_with_length(x, _length(ranges)) for x in (key, value)] for ranges in plan.taken]
    receives = [
        empty_message(platform, each, key.dtype) if ranges else None
        for each, ranges in zip(shapes, plan.taken, strict=True)
    ]
    messages = [packed(platform, parts) if parts else None for parts in sends]
    receives[group.rank] = messages[group.rank]
    messages[group.rank] = None
    group.exchange(messages, [None if j == group.rank else x for j, x in enumerate(receives)])
    arrived = [None if x is None else unpacked(platform, x, each) for x, each in zip(receives, shapes, strict=True)]
    return _put_in_order(platform, arrived, plan, 0, key), _put_in_order(platform, arrived, plan, 1, value)


def _put_in_order(platform: Platform, arrived: list[Any], plan: GatherPlan, which: int, like: Tensor) -> Tensor:
    pieces = [of_tokens(platform, arrived[source][which], start, stop) for source, start, stop in plan.order]
    if not pieces:
        return platform.ops.narrow(like, 2, 0, 0)
    return pieces[0] if len(pieces) == 1 else platform.ops.cat(pieces, 2)


def _send_home(
    platform: Platform, group: ProcessGroup, plan: GatherPlan, grads: Sequence[Tensor], like: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of this rank's keys and values, from those of what each rank gathered."""
    dtype = accumulator_dtype(platform, like[0])
    cut = [_of_sources(platform, platform.ops.cast(x, dtype), plan) for x in grads]
    sends = [packed(platform, [x[j] for x in cut]) if _length(r) else None for j, r in enumerate(plan.taken)]
    shapes = [[_with_length(x, _length(ranges)) for x in like] for ranges in plan.given]
    receives = [
        empty_message(platform, each, dtype) if _length(ranges) and j != group.rank else None
        for j, (each, ranges) in enumerate(zip(shapes, plan.given, strict=True))
    ]
    own = sends[group.rank]
    sends[group.rank] = None
    group.exchange(sends, receives)
    receives[group.rank] = own
    # Added in the order of ranks, the own part in its place: sums do not depend on which message came first.
    totals = [platform.zeros(tuple(x.shape), dtype) for x in like]
    for message, each, ranges in zip(receives, shapes, plan.given, strict=True):
        if message is not None:
            parts = unpacked(platform, message, each)
            totals = [_added_at(platform, x, part, ranges) for x, part in zip(totals, parts, strict=True)]
    return totals


def _of_sources(platform: Platform, x: Tensor, plan: GatherPlan) -> list[Tensor | None]:
    """Cut what lies in the order of the sequence into what came from each rank, as that rank's stretches lie."""
    pieces: list[list[tuple[int, Tensor]]] = [[] for _ in plan.taken]
    place = 0
    for source, start, stop in plan.order:
        pieces[source].append((start, of_tokens(platform, x, place, place + stop - start)))
        place += stop - start
    ordered = [[piece for _, piece in sorted(each, key=lambda one: one[0])] for each in pieces]
    return [None if not each else each[0] if len(each) == 1 else platform.ops.cat(each, 2) for each in ordered]


def _added_at(platform: Platform, total: Tensor, part: Tensor, ranges: Ranges) -> Tensor:
    """Return `total` with the pieces of `part` added to stretches of dimension 2."""
    ops = platform.ops
    pieces, at, taken = [], 0, 0
    for start, stop in ranges:
        if start > at:
            pieces.append(ops.narrow(total, 2, at, start - at))
        piece = of_tokens(platform, part, taken, taken + stop - start)
        pieces.append(ops.add(of_tokens(platform, total, start, stop), piece))
        at, taken = stop, taken + stop - start
    if at < total.shape[2]:
        pieces.append(ops.narrow(total, 2, at, total.shape[2] - at))
    return pieces[0] if len(pieces) == 1 else ops.cat(pieces, 2)


def _picked(platform: Platform, tensors: Sequence[Tensor], ranges: Ranges) -> list[Tensor]:
    """Return the stretches of each tensor along dimension 2, end to end; nothing where there are none."""
    if not ranges:
        return []
    found = []
    for x in tensors:
        pieces = [of_tokens(platform, x, start, stop) for start, stop in ranges]
        found.append(pieces[0] if len(pieces) == 1 else platform.ops.cat(pieces, 2))
    return found


def _needed(queries: Tokens, keys: Tokens, causal: bool, window: int | None) -> Ranges:
    """Return the stretches of `keys`, as their rank holds them, that some of `queries` see."""
    seen = np.zeros(keys.count + 1, np.int64)
    for rows in plan_blocks(queries, keys, causal, window, None):
        for segment in rows.segments:
            for each in segment.keys:
                seen[each.start] += 1
                seen[each.stop] -= 1
    # Above 0, the running sum of begun and ended stretches says that some query sees the key.
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.cumsum(seen) > 0, [0]]).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))


def _stretches(places: Any, start: int, stop: int) -> list[Range]:
    """Return the parts of `start` to `stop` whose tokens follow each other in the sequence."""
    breaks = np.flatnonzero(np.diff(places[start:stop]) != 1) + 1 + start
    bounds = [start, *breaks.tolist(), stop]
    return list(itertools.pairwise(bounds))


def _documents(tokens: Tokens, start: int, stop: int) -> Any:
    return None if tokens.documents is None else tokens.documents[:, start:stop]


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _with_length(x: Tensor, length: int) -> tuple[int, ...]:
    return (*x.shape[:2], length, x.shape[3])
