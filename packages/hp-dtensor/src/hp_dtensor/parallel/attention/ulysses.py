"""Ulysses (arXiv 2309.14509): one exchange gives each rank some heads of the full sequence, another reverses it.

Query heads are divided evenly. A rank gets the key-value heads that its query heads read and no others. With fewer
key-value heads than ranks, several ranks get the same head; it is sent to each of them, and its gradients are added at
its owner in rank order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.collectives import exchange_packed, saving_result
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.saved_tensors import COLLECTIVES, saved_result
from hp_dtensor.platform.interface import Platform

Tensor = Any
Range = tuple[int, int]


@dataclass(frozen=True)
class HeadShares:
    """The heads of each rank of a Ulysses group.

    Attributes:
        queries: by rank, the range (start, stop) of its query heads.
        keys: by rank, the range of the key-value heads that these read.
        groups: number of query heads per key-value head.
    """

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    groups: int

    @classmethod
    def of(cls, heads: int, kv_heads: int, ranks: int) -> HeadShares:
        """Divide `heads` evenly over `ranks`."""
        groups = heads // max(kv_heads, 1)
        queries = [(rank * heads // ranks, (rank + 1) * heads // ranks) for rank in range(ranks)]
        # Rounded outwards: a key-value head is needed if any of the query heads that read it is local.
        keys = [(a // groups, -(-b // groups)) if b > a else (0, 0) for a, b in queries]
        return cls(tuple(queries), tuple(keys), groups)

    def expansion(self, rank: int) -> list[int] | None:
        """Return, for each local query head, the local key-value head it reads; None if all are read equally often."""
        (a, b), (first, last) = self.queries[rank], self.keys[rank]
        # Uneven shares may split a group of query heads, so heads no longer divide evenly by position.
        reads = [head // self.groups - first for head in range(a, b)]
        shared = (b - a) // max(last - first, 1)
        return None if reads == [i // shared for i in range(b - a)] else reads


def heads_for_sequence(
    platform: Platform, tensors: Sequence[Tensor], group: ProcessGroup, shares: HeadShares, lengths: Sequence[int]
) -> list[Tensor]:
    """Exchange tokens for heads: return this rank's heads of queries, keys and values for the tokens of all ranks.

    Args:
        tensors: queries, keys, values `[batch, heads, own tokens, width]`.
        lengths: number of tokens of each rank.
    """
    of_tensor = [shares.queries, shares.keys, shares.keys]
    rank, size = group.rank, group.size
    # The closures hold shapes only, so that the tensors can be freed after forward.
    like = [(tuple(x.shape), x.dtype) for x in tensors]

    def forward(*given: Tensor) -> tuple[Tensor, ...]:
        sends = [[_heads(platform, x, of[j]) for x, of in zip(given, of_tensor, strict=True)] for j in range(size)]
        shapes = [
            [_shaped(shape, of[rank], lengths[j]) for (shape, _), of in zip(like, of_tensor, strict=True)]
            for j in range(size)
        ]
        # Queries, keys and values are one message per pair of ranks.
        arrived = exchange_packed(group, sends, shapes, given[0].dtype)
        return tuple(platform.ops.cat([parts[i] for parts in arrived], 2) for i in range(len(given)))

    def backward(*grads: Tensor | None) -> list[Tensor]:
        full = [_shaped(shape, of[rank], sum(lengths)) for (shape, _), of in zip(like, of_tensor, strict=True)]
        known = [
            # An unused output has no gradient, but this rank must send one: the exchange is a collective.
            platform.zeros(shape, dtype) if g is None else g
            for g, shape, (_, dtype) in zip(grads, full, like, strict=True)
        ]
        split = [platform.ops.split(g, list(lengths), 2) for g in known]
        sends = [[each[j] for each in split] for j in range(size)]
        shapes = [
            [_shaped(shape, of[j], lengths[rank]) for shape, of in zip(full, of_tensor, strict=True)]
            for j in range(size)
        ]
        arrived = exchange_packed(group, sends, shapes, known[0].dtype)
        return [
            _summed(platform, [parts[i] for parts in arrived], of_tensor[i], shape[1])
            for i, (shape, _) in enumerate(like)
        ]

    found = platform.custom_function(
        lambda *given: saved_result(COLLECTIVES, lambda: forward(*given)), backward, *tensors
    )
    return list(found)


def sequence_for_heads(
    platform: Platform, x: Tensor, group: ProcessGroup, shares: HeadShares, lengths: Sequence[int]
) -> Tensor:
    """Return all heads of this rank's tokens, `[batch, heads, tokens, width]`: the inverse of `heads_for_sequence`."""
    rank, size = group.rank, group.size
    heads = sum(b - a for a, b in shares.queries)

    def forward(given: Tensor) -> Tensor:
        sends = [[part] for part in platform.ops.split(given, list(lengths), 2)]
        shapes = [[_shaped(tuple(given.shape), shares.queries[j], lengths[rank])] for j in range(size)]
        return platform.ops.cat([parts[0] for parts in exchange_packed(group, sends, shapes, given.dtype)], 1)

    def backward(grad: Tensor) -> Tensor:
        # The result has all heads of this rank's tokens, so its gradient does too.
        assert grad.shape[1] == heads
        sends = [[_heads(platform, grad, shares.queries[j])] for j in range(size)]
        shapes = [[_shaped(tuple(grad.shape), shares.queries[rank], lengths[j])] for j in range(size)]
        return platform.ops.cat([parts[0] for parts in exchange_packed(group, sends, shapes, grad.dtype)], 2)

    return platform.linear_map(x, saving_result(forward), backward)


def _heads(platform: Platform, x: Tensor, span: Range) -> Tensor:
    first, last = span
    return x if last - first == x.shape[1] else platform.ops.narrow(x, 1, first, last - first)


def _shaped(shape: tuple[int, ...], heads: Range, length: int) -> tuple[int, ...]:
    return (shape[0], heads[1] - heads[0], length, shape[3])


def _summed(platform: Platform, parts: Sequence[Tensor], spans: Sequence[Range], heads: int) -> Tensor:
    """Assemble heads from all ranks along dimension 1, adding those that several ranks hold."""
    ops = platform.ops
    # Heads are divided at all ends of ranks' spans, so that each interval is held fully or not at all by a rank.
    bounds = sorted({0, heads, *(end for span in spans for end in span)})
    joined = []
    for first, last in itertools.pairwise(bounds):
        owners = [
            _heads(platform, part, (first - a, last - a))
            for part, (a, b) in zip(parts, spans, strict=True)
            if a <= first and last <= b
        ]
        total = owners[0]
        for other in owners[1:]:
            total = ops.add(total, other)
        joined.append(total)
    return joined[0] if len(joined) == 1 else ops.cat(joined, 1)
