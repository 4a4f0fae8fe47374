"""Attention over planned blocks, and its gradient: never more than one block's scores at a time.

The result of each block comes with the log-sum-exp of its scores, by which blocks are merged in float32; the gradient
of a block needs the whole result and its log-sum-exp, and no other block (Dao et al., 2022, arXiv 2205.14135).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hp_dtensor.parallel.attention.blocks import KeyRange, Plan, Rows, Segment
from hp_dtensor.parallel.attention.dropout import PlacedDropout
from hp_dtensor.parallel.attention.mask import Array
from hp_dtensor.parallel.attention.stretches import Stretches, of_rows, of_tokens
from hp_dtensor.platform.attention import BlockScores
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


class Attended:
    """Attention of some queries over one set of keys after another, merged by the log-sum-exps of their scores.

    Args:
        value: values of any of the keys, for their width.
    """

    def __init__(self, platform: Platform, query: Tensor, value: Tensor) -> None:
        self._platform, self._query = platform, query
        # No method of this object's: tensors in a circle of references stay until the garbage collector comes.
        dtype, width = accumulator_dtype(platform, query), value.shape[3]
        nothing = functools.partial(_nothing, platform, dtype, query.shape[1], width)
        self._found = Stretches(platform, platform.merge_attention, nothing, query.shape[0], query.shape[2])

    def add(self, key: Tensor, value: Tensor, plan: Plan, options: Options) -> None:
        """Attend over the planned blocks of these keys."""
        platform = self._platform
        dtype = accumulator_dtype(platform, self._query)
        for rows in plan:
            q, k, v = of_rows(platform, rows, self._query, key, value)
            of_these = options.of_rows(rows)
            for segment in rows.segments:
                queries = of_tokens(platform, q, segment.start, segment.stop)
                for keys in segment.keys:
                    k_part, v_part = (of_tokens(platform, x, keys.start, keys.stop) for x in (k, v))
                    scores = _scores(platform, segment, keys, of_these)
                    out, lse = platform.attention_block(queries, k_part, v_part, scores)
                    self._found.add(rows, segment.start, segment.stop, (platform.ops.cast(out, dtype), lse))

    def total(self) -> tuple[Tensor, Tensor]:
        """Return attention `[batch, heads, queries, width]` and its log-sum-exp `[batch, heads, queries]`, in float32.

        Float64 stays. A query that sees no key gets zeros and minus infinity.
        """
        out, lse = self._found.whole()
        return out, lse


def _nothing(platform: Platform, dtype: Any, heads: int, width: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the attention of queries that see no key, and its log-sum-exp."""
    shape = (batch, heads, length)
    return platform.zeros((*shape, width), dtype), platform.ops.full(shape, -np.inf, dtype)


class AttentionGrads:
    """Gradients of attention over one set of keys after another: of these keys and values, and in the end of queries.

    All are of float32; float64 stays.

    Args:
        grad, out, lse: of the queries' attention over all keys.
    """

    def __init__(self, platform: Platform, grad: Tensor, query: Tensor, out: Tensor, lse: Tensor) -> None:
        self._platform, self._of_queries = platform, (grad, query, out, lse)
        self._queries = _sums(platform, query)

    def add(self, key: Tensor, value: Tensor, plan: Plan, options: Options) -> Stretches:
        """Return the gradients of these keys and values from the planned blocks; keep those of the queries."""
        platform, found = self._platform, _sums(self._platform, key, value)
        for rows in plan:
            of_queries = of_rows(platform, rows, *self._of_queries)
            k, v = of_rows(platform, rows, key, value)
            of_these = options.of_rows(rows)
            for segment in rows.segments:
                g, q, out, lse = (of_tokens(platform, x, segment.start, segment.stop) for x in of_queries)
                for keys in segment.keys:
                    k_part, v_part = (of_tokens(platform, x, keys.start, keys.stop) for x in (k, v))
                    scores = _scores(platform, segment, keys, of_these)
                    d_q, d_k, d_v = platform.attention_block_grad(g, q, k_part, v_part, out, lse, scores)
                    dtype = accumulator_dtype(platform, q)
                    d_q, d_k, d_v = (platform.ops.cast(x, dtype) for x in (d_q, d_k, d_v))
                    self._queries.add(rows, segment.start, segment.stop, (d_q,))
                    found.add(rows, keys.start, keys.stop, (d_k, d_v))
        return found

    def of_queries(self) -> Tensor:
        """Return the gradients of the queries, over all keys that were added."""
        (d_q,) = self._queries.whole()
        return d_q


def attend(
    platform: Platform, query: Tensor, key: Tensor, value: Tensor, plan: Plan, options: Options
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp, see `Attended.total`."""
    found = Attended(platform, query, value)
    found.add(key, value, plan, options)
    return found.total()


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
    """Return the gradients of queries, keys and values in float32 (float64 stays)."""
    grads = AttentionGrads(platform, grad, query, out, lse)
    d_k, d_v = grads.add(key, value, plan, options).whole()
    return grads.of_queries(), d_k, d_v


def _sums(platform: Platform, *like: Tensor) -> Stretches:
    """Return an empty sum of gradients of tensors, which have the same rows and tokens."""

    def added(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(platform.add_into(x, y) for x, y in zip(one, other, strict=True))

    def zeros(batch: int, length: int) -> tuple[Tensor, ...]:
        dtype = accumulator_dtype(platform, like[0])
        return tuple(platform.zeros((batch, x.shape[1], length, x.shape[3]), dtype) for x in like)

    return Stretches(platform, added, zeros, like[0].shape[0], like[0].shape[2])


def accumulator_dtype(platform: Platform, x: Tensor) -> Any:
    """Return the dtype in which blocks are summed up."""
    return x.dtype if platform.dtype_name(x.dtype) == "float64" else platform.dtype("float32")


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
