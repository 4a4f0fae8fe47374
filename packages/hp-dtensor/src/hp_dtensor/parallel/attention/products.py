"""Attention over planned blocks, and its gradient: never more than one block's scores at a time.

The result of each block comes with the log-sum-exp of its scores, by which blocks are merged in float32; the gradient
of a block needs the whole result and its log-sum-exp, and no other block (Dao et al., 2022, arXiv 2205.14135).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hp_dtensor.parallel.attention.blocks import KeyRange, Plan, Rows, Segment
from hp_dtensor.parallel.attention.dropout import PlacedDropout
from hp_dtensor.parallel.attention.mask import Array
from hp_dtensor.platform.attention import LOWEST, TINY, BlockScores
from hp_dtensor.platform.interface import Platform

Tensor = Any


@dataclass(frozen=True, slots=True)
class Options:
    """The part of a call that is the same for all of its blocks.

    Attributes:
        scale: factor on the products of queries and keys.
        soft_cap: see `hp_dtensor.platform.attention.BlockScores`.
        causal, window: as of the mask, for blocks that are seen in part.
        dropout: of these queries and keys; None: nothing is dropped.
    """

    scale: float
    soft_cap: float | None
    causal: bool
    window: int | None
    dropout: PlacedDropout | None = None

    def of_keys(self, places: Array) -> Options:
        """Return the options of the same queries with keys of other places."""
        return self if self.dropout is None else replace(self, dropout=self.dropout.of(keys=places))

    def of_rows(self, rows: Rows) -> Options:
        """Return the options of some rows of the batch."""
        if self.dropout is None or rows.stop is None:
            return self
        return replace(self, dropout=self.dropout.of(rows=slice(rows.start, rows.stop)))


def attend(
    platform: Platform, query: Tensor, key: Tensor, value: Tensor, plan: Plan, options: Options
) -> tuple[Tensor, Tensor]:
    """Return attention `[batch, heads, queries, width]` and its log-sum-exp `[batch, heads, queries]`, in float32.

    Float64 stays. A query that sees no key gets zeros and minus infinity.
    """
    parts = [_attend_rows(platform, _of_rows(platform, rows, query, key, value), rows, options) for rows in plan]
    if len(parts) == 1:
        return parts[0]
    out, lse = zip(*parts, strict=True)
    return platform.ops.cat(list(out), 0), platform.ops.cat(list(lse), 0)


def merge(platform: Platform, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same queries over two sets of keys, each with its log-sum-exp."""
    ops = platform.ops
    # out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i). The highest is taken off, so that no
    # exponential overflows; where no key is seen it would be minus infinity, and minus infinity less itself is no
    # number.
    highest = ops.maximum(ops.maximum(one[1], other[1]), LOWEST)
    weights = [ops.exp(ops.sub(lse, highest)) for _, lse in (one, other)]
    total = ops.add(*weights)
    divisor = ops.maximum(total, TINY)
    shares = [ops.unsqueeze(ops.div(weight, divisor), -1) for weight in weights]
    out = ops.add(ops.mul(one[0], shares[0]), ops.mul(other[0], shares[1]))
    return out, ops.add(highest, ops.log(total))


def attend_grad(
    platform: Platform,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Plan,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values in float32 (float64 stays), as far as these keys cause them.

    Args:
        out, lse: the queries' attention over all keys, of this call and of others, and its log-sum-exp.
    """
    parts = []
    for rows in plan:
        inputs = _of_rows(platform, rows, query, key, value)
        given = _of_rows(platform, rows, grad, out, lse)
        parts.append(_grad_of_rows(platform, inputs, given, rows, options))
    if len(parts) == 1:
        return parts[0]
    d_q, d_k, d_v = (platform.ops.cat(list(each), 0) for each in zip(*parts, strict=True))
    return d_q, d_k, d_v


def accumulator_dtype(platform: Platform, x: Tensor) -> Any:
    """Return the dtype in which blocks are summed up."""
    return x.dtype if platform.dtype_name(x.dtype) == "float64" else platform.dtype("float32")


def of_tokens(platform: Platform, x: Tensor, start: int, stop: int) -> Tensor:
    """Return the stretch of `x` along dimension 2, that of tokens."""
    return x if stop - start == x.shape[2] else platform.ops.narrow(x, 2, start, stop - start)


def _attend_rows(platform: Platform, inputs: tuple[Tensor, ...], rows: Rows, options: Options) -> tuple[Tensor, Tensor]:
    q, k, v = inputs
    options = options.of_rows(rows)
    parts = [_attend_segment(platform, q, k, v, segment, options) for segment in rows.segments]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return _nothing(platform, q, v, 0)
    out, lse = zip(*parts, strict=True)
    return platform.ops.cat(list(out), 2), platform.ops.cat(list(lse), 2)


def _attend_segment(
    platform: Platform, q: Tensor, k: Tensor, v: Tensor, segment: Segment, options: Options
) -> tuple[Tensor, Tensor]:
    queries = of_tokens(platform, q, segment.start, segment.stop)
    merged: tuple[Tensor, Tensor] | None = None
    for keys in segment.keys:
        block = platform.attention_block(
            queries,
            of_tokens(platform, k, keys.start, keys.stop),
            of_tokens(platform, v, keys.start, keys.stop),
            _scores(platform, segment, keys, options),
        )
        out = platform.ops.cast(block[0], accumulator_dtype(platform, q))
        merged = (out, block[1]) if merged is None else merge(platform, merged, (out, block[1]))
    return merged if merged is not None else _nothing(platform, q, v, segment.stop - segment.start)


def _nothing(platform: Platform, q: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    dtype, shape = accumulator_dtype(platform, q), (q.shape[0], q.shape[1], length)
    return platform.zeros((*shape, v.shape[3]), dtype), platform.ops.full(shape, -np.inf, dtype)


def _grad_of_rows(
    platform: Platform,
    inputs: tuple[Tensor, ...],
    given: tuple[Tensor, ...],
    rows: Rows,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = inputs
    grad, out, lse = given
    options = options.of_rows(rows)
    bounds = sorted(
        {0, k.shape[2], *(end for s in rows.segments for keys in s.keys for end in (keys.start, keys.stop))}
    )
    d_k, d_v = (_Sum(platform, x, bounds) for x in (k, v))
    d_q = _Sum(platform, q, sorted({0, q.shape[2], *(end for s in rows.segments for end in (s.start, s.stop))}))
    for segment in rows.segments:
        of_segment = [of_tokens(platform, x, segment.start, segment.stop) for x in (grad, q, out, lse)]
        for keys in segment.keys:
            k_part, v_part = (of_tokens(platform, x, keys.start, keys.stop) for x in (k, v))
            g, queries, o, sums = of_segment
            scores = _scores(platform, segment, keys, options)
            grads = platform.attention_block_grad(g, queries, k_part, v_part, o, sums, scores)
            d_q.add(segment.start, segment.stop, grads[0])
            d_k.add(keys.start, keys.stop, grads[1])
            d_v.add(keys.start, keys.stop, grads[2])
    return d_q.total(), d_k.total(), d_v.total()


class _Sum:
    """Sum of tensors that each cover a stretch of dimension 2, kept in pieces between the ends that there are."""

    def __init__(self, platform: Platform, like: Tensor, bounds: list[int]) -> None:
        self.platform, self.bounds = platform, bounds
        self.shape, self.dtype = tuple(like.shape), accumulator_dtype(platform, like)
        self.pieces: dict[int, Tensor] = {}

    def add(self, start: int, stop: int, x: Tensor) -> None:
        ops, x = self.platform.ops, self.platform.ops.cast(x, self.dtype)
        first, last = self.bounds.index(start), self.bounds.index(stop)
        for place in range(first, last):
            a, b = self.bounds[place], self.bounds[place + 1]
            piece = x if last - first == 1 else ops.narrow(x, 2, a - start, b - a)
            self.pieces[a] = piece if a not in self.pieces else ops.add(self.pieces[a], piece)

    def total(self) -> Tensor:
        pieces = [self._piece(a, b) for a, b in itertools.pairwise(self.bounds)]
        if not pieces:
            return self.platform.zeros(self.shape, self.dtype)
        return pieces[0] if len(pieces) == 1 else self.platform.ops.cat(pieces, 2)

    def _piece(self, start: int, stop: int) -> Tensor:
        if start in self.pieces:
            return self.pieces[start]
        return self.platform.zeros((*self.shape[:2], stop - start, self.shape[3]), self.dtype)


def _of_rows(platform: Platform, rows: Rows, *tensors: Tensor) -> tuple[Tensor, ...]:
    if rows.stop is None:
        return tensors
    return tuple(platform.ops.narrow(x, 0, rows.start, rows.stop - rows.start) for x in tensors)


def _scores(platform: Platform, segment: Segment, keys: KeyRange, options: Options) -> BlockScores:
    mask = None
    if keys.band is not None:
        size = segment.stop - segment.start, keys.stop - keys.start
        mask = platform.from_numpy(_band(size, keys.band, options.causal, options.window))
    factors = None
    if options.dropout is not None:
        stretch = slice(segment.start, segment.stop), slice(keys.start, keys.stop)
        factors = options.dropout.of(queries=stretch[0], keys=stretch[1]).factors(platform)
    return BlockScores(options.scale, options.soft_cap, keys.is_causal, mask, factors)


@functools.lru_cache(maxsize=64)
def _band(size: tuple[int, int], offset: int, causal: bool, window: int | None) -> np.ndarray[Any, Any]:
    """Return which of the keys are seen: `offset` is the place of the first query minus that of the first key."""
    distance = offset + np.arange(size[0])[:, None] - np.arange(size[1])
    seen = distance >= 0 if causal else np.ones(size, np.bool_)
    return seen if window is None else seen & (np.abs(distance) < window)
