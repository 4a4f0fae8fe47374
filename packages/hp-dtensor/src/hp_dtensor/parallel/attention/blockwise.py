"""Attention over planned blocks, merged by log-sum-exp, and its gradient; one block's scores exist at a time.

Each block's result comes with the log-sum-exp of its scores. `PartialAttention` merges results over different keys
(`merge_blocks`). The gradient of a block needs the merged result and its log-sum-exp, but no other block:
P = exp(S - lse), D = rowsum(dO * O), dS = P * (dO V^T - D) (Dao et al., 2022, arXiv 2205.14135).
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from hp_dtensor.parallel.attention.masks import Array, KeyRange, LocalDropout, Plan, Rows, Segment
from hp_dtensor.platform.attention import LOWEST, TINY, BlockScores
from hp_dtensor.platform.interface import Platform

Tensor: TypeAlias = Any
Tensors: TypeAlias = tuple[Tensor, ...]
Combine: TypeAlias = Callable[[Tensors, Tensors], Tensors]
"""Combines two tuples of tensors of the same tokens. It may write into the first tuple's tensors and return these."""
Missing: TypeAlias = Callable[[int, int], Tensors]
"""Makes the tensors for a number of rows and tokens to which nothing was added."""


def narrow_tokens(platform: Platform, x: Tensor, start: int, stop: int) -> Tensor:
    """Return tokens `start` to `stop` of `x` (dimension 2), a view where possible."""
    return x if stop - start == x.shape[2] else platform.ops.narrow(x, 2, start, stop - start)


def narrow_rows(platform: Platform, rows: Rows, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the given rows of the batch of each tensor."""
    if rows.stop is None:
        return tensors
    return tuple(platform.ops.narrow(x, 0, rows.start, rows.stop - rows.start) for x in tensors)


class SpanTensors:
    """Tensors `[batch, heads, tokens, ...]` assembled from spans of tokens, which are combined where they overlap.

    Ranges of rows must be equal or disjoint between calls of `add`. Added tensors belong to this object, which may
    write into their memory.

    Args:
        batch, tokens: sizes of the assembled tensors.
    """

    def __init__(self, platform: Platform, combine: Combine, missing: Missing, batch: int, tokens: int) -> None:
        self._platform, self._combine, self._missing = platform, combine, missing
        self._batch, self._tokens = batch, tokens
        self._by_rows: dict[Rows, _Spans] = {}

    def add(self, rows: Rows, start: int, stop: int, tensors: Tensors) -> None:
        """Combine `tensors` into tokens `start` to `stop` of these rows."""
        # Plans over different keys have different segments for the same rows, so rows are compared without segments.
        key = Rows(rows.start, rows.stop, ())
        if key not in self._by_rows:
            self._by_rows[key] = _Spans(self._platform, self._combine)
        self._by_rows[key].add(start, stop, tensors)

    def full(self) -> Tensors:
        """Return the assembled tensors of all rows and tokens."""
        joined, at = [], 0
        for rows in sorted(self._by_rows, key=lambda each: each.start):
            stop = self._batch if rows.stop is None else rows.stop
            if at < rows.start:
                joined.append(self._missing(rows.start - at, self._tokens))
            missing = functools.partial(self._missing, stop - rows.start)
            joined.append(self._by_rows[rows].full(self._tokens, missing))
            at = stop
        if at < self._batch or not joined:
            joined.append(self._missing(self._batch - at, self._tokens))
        return _concatenated(self._platform, joined, 0)

    def added_to(self, total: Tensors) -> Tensors:
        """Return `total`, tensors of all rows and tokens, with everything that was added combined into it."""
        # The usual case: all rows have one plan, and sums are added in place without assembling a full tensor.
        if list(self._by_rows) == [Rows(0, None, ())]:
            return self._by_rows[Rows(0, None, ())].added_to(total, self._tokens)
        return self._combine(total, self.full())


class _Spans:
    """The tensors of a range of rows as disjoint spans (start, stop, tensors), sorted by start."""

    def __init__(self, platform: Platform, combine: Combine) -> None:
        self._platform, self._combine = platform, combine
        self._spans: list[tuple[int, int, Tensors]] = []

    def add(self, start: int, stop: int, tensors: Tensors) -> None:
        # The spans that overlap [start, stop): O(log n) per block instead of a scan.
        first = bisect.bisect_right(self._spans, start, key=lambda span: span[1])
        last = bisect.bisect_left(self._spans, stop, key=lambda span: span[0])
        found: list[tuple[int, int, Tensors]] = []
        at = start
        for span in self._spans[first:last]:
            if at < span[0]:
                found.append((at, span[0], self._narrowed(tensors, start, at, span[0])))
            a, b = max(start, span[0]), min(stop, span[1])
            found += self._combined(span, a, b, self._narrowed(tensors, start, a, b))
            at = b
        if at < stop:
            found.append((at, stop, self._narrowed(tensors, start, at, stop)))
        self._spans[first:last] = found

    def full(self, tokens: int, missing: Callable[[int], Tensors]) -> Tensors:
        joined, at = [], 0
        for start, stop, tensors in self._spans:
            if at < start:
                joined.append(missing(start - at))
            joined.append(tensors)
            at = stop
        if at < tokens or not joined:
            joined.append(missing(tokens - at))
        return _concatenated(self._platform, joined, 2)

    def added_to(self, total: Tensors, tokens: int) -> Tensors:
        sums = _Spans(self._platform, self._combine)
        sums._spans = [(0, tokens, total)]
        for span in self._spans:
            sums.add(*span)
        return _concatenated(self._platform, [tensors for _, _, tensors in sums._spans], 2)

    def _combined(
        self, span: tuple[int, int, Tensors], a: int, b: int, tensors: Tensors
    ) -> list[tuple[int, int, Tensors]]:
        """Return the spans that replace `span` once `tensors` are combined into its tokens `a` to `b`."""
        start, stop, known = span
        own = self._narrowed(known, start, a, b)
        result = self._combine(own, tensors)
        # `combine` may work in place on views of the span, and then nothing has to be split.
        if all(x is y for x, y in zip(result, own, strict=True)):
            return [span]  # combined in place, in the memory of the span
        before = [(start, a, self._narrowed(known, start, start, a))] if start < a else []
        after = [(b, stop, self._narrowed(known, start, b, stop))] if b < stop else []
        return [*before, (a, b, result), *after]

    def _narrowed(self, tensors: Tensors, start: int, a: int, b: int) -> Tensors:
        """Return tokens `a` to `b` of tensors whose first token is `start`."""
        return tuple(narrow_tokens(self._platform, x, a - start, b - start) for x in tensors)


def _concatenated(platform: Platform, spans: Sequence[Tensors], dim: int) -> Tensors:
    if len(spans) == 1:
        return spans[0]
    return tuple(platform.ops.cat(list(each), dim) for each in zip(*spans, strict=True))


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a call that are the same for all of its blocks.

    Attributes:
        scale: factor on the products of queries and keys.
        soft_cap: see `hp_dtensor.platform.attention.BlockScores`.
        causal, window: those of the mask, for partly masked blocks.
        dropout: for these queries and keys; None: no dropout.
    """

    scale: float
    soft_cap: float | None
    causal: bool
    window: int | None
    dropout: LocalDropout | None = None

    def of_keys(self, indices: Array) -> Options:
        """Return the options for the same queries and keys with other global indices."""
        return self if self.dropout is None else replace(self, dropout=self.dropout.of(keys=indices))

    def of_rows(self, rows: Rows) -> Options:
        """Return the options for some rows of the batch."""
        if self.dropout is None or rows.stop is None:
            return self
        return replace(self, dropout=self.dropout.of(rows=slice(rows.start, rows.stop)))


class PartialAttention:
    """Attention of queries over one set of keys after another, merged by log-sum-exp.

    Ring attention adds one set of keys per hop.

    Args:
        value: values of any set of keys; only their width is used.
    """

    def __init__(self, platform: Platform, query: Tensor, value: Tensor) -> None:
        self._platform, self._query = platform, query
        # `nothing` refers to no tensor and not to `self`: a reference cycle would keep the tensors until the garbage
        # collector runs.
        dtype, width = accumulator_dtype(platform, query), value.shape[3]
        heads = query.shape[1]

        def nothing(batch: int, length: int) -> tuple[Tensor, Tensor]:
            """Return attention and log-sum-exp of queries that see no key."""
            shape = (batch, heads, length)
            return platform.zeros((*shape, width), dtype), platform.ops.full(shape, -np.inf, dtype)

        merge = functools.partial(merge_blocks, platform)
        self._found = SpanTensors(platform, merge, nothing, query.shape[0], query.shape[2])

    def add(self, key: Tensor, value: Tensor, plan: Plan, options: Options) -> None:
        """Merge in attention over the planned blocks of these keys."""
        platform = self._platform
        dtype = accumulator_dtype(platform, self._query)
        for rows in plan:
            # Rows with equal documents share a plan; the loop is over few ranges of rows, not over rows.
            q, k, v = narrow_rows(platform, rows, self._query, key, value)
            of_these = options.of_rows(rows)
            for segment in rows.segments:
                queries = narrow_tokens(platform, q, segment.start, segment.stop)
                for keys in segment.keys:
                    k_part, v_part = (narrow_tokens(platform, x, keys.start, keys.stop) for x in (k, v))
                    scores = _scores(platform, segment, keys, of_these)
                    out, lse = platform.attention_block(queries, k_part, v_part, scores)
                    self._found.add(rows, segment.start, segment.stop, (platform.ops.cast(out, dtype), lse))

    def total(self) -> tuple[Tensor, Tensor]:
        """Return attention `[batch, heads, queries, width]` and its log-sum-exp `[batch, heads, queries]`.

        Both are float32, or float64 for float64 queries. A query that sees no key gets zeros and minus infinity.
        """
        out, lse = self._found.full()
        return out, lse


def merge_blocks(platform: Platform, one: Tensors, other: Tensors) -> Tensors:
    """Merge attention of the same queries over two disjoint sets of keys into that over both.

    With lse = log(exp(lse_1) + exp(lse_2)), out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2.

    Args:
        one, other: pairs of attention `[batch, heads, queries, width]` and log-sum-exp `[batch, heads, queries]`, all
            float32 or all float64. The tensors of `one` may be updated in place and returned.
    """
    merged = platform.merge_blocks_in_place(one, other)
    if merged is not None:
        return merged
    ops = platform.ops
    # The maximum is subtracted so that no exponential overflows. It is at least LOWEST, because `-inf - -inf` is NaN
    # where no key is visible.
    highest = ops.maximum(ops.maximum(one[1], other[1]), LOWEST)
    weights = [ops.exp(ops.sub(lse, highest)) for _, lse in (one, other)]
    total = ops.add(*weights)
    divisor = ops.maximum(total, TINY)
    shares = [ops.unsqueeze(ops.div(weight, divisor), -1) for weight in weights]
    out = ops.add(ops.mul(one[0], shares[0]), ops.mul(other[0], shares[1]))
    return out, ops.add(highest, ops.log(total))


class AttentionGrads:
    """Gradients of attention over one set of keys after another, in float32 (float64 for float64 queries).

    Args:
        grad, out, lse: gradient, result and log-sum-exp of the queries' attention over all keys.
    """

    def __init__(self, platform: Platform, grad: Tensor, query: Tensor, out: Tensor, lse: Tensor) -> None:
        self._platform, self._of_queries = platform, (grad, query, out, lse)
        self._queries = sums_of(platform, query)

    def add(self, key: Tensor, value: Tensor, plan: Plan, options: Options) -> SpanTensors:
        """Return the gradients of these keys and values over the planned blocks, and accumulate the queries'."""
        platform, found = self._platform, sums_of(self._platform, key, value)
        for rows in plan:
            of_queries = narrow_rows(platform, rows, *self._of_queries)
            k, v = narrow_rows(platform, rows, key, value)
            of_these = options.of_rows(rows)
            for segment in rows.segments:
                g, q, out, lse = (narrow_tokens(platform, x, segment.start, segment.stop) for x in of_queries)
                for keys in segment.keys:
                    k_part, v_part = (narrow_tokens(platform, x, keys.start, keys.stop) for x in (k, v))
                    scores = _scores(platform, segment, keys, of_these)
                    d_q, d_k, d_v = platform.attention_block_grad(g, q, k_part, v_part, out, lse, scores)
                    # Kernels may return 16-bit gradients; sums over many blocks are kept in float32.
                    dtype = accumulator_dtype(platform, q)
                    d_q, d_k, d_v = (platform.ops.cast(x, dtype) for x in (d_q, d_k, d_v))
                    self._queries.add(rows, segment.start, segment.stop, (d_q,))
                    found.add(rows, keys.start, keys.stop, (d_k, d_v))
        return found

    def of_queries(self) -> Tensor:
        """Return the gradients of the queries over all keys added so far."""
        (d_q,) = self._queries.full()
        return d_q


def attend(
    platform: Platform, query: Tensor, key: Tensor, value: Tensor, plan: Plan, options: Options
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp over one set of keys; see `PartialAttention.total`."""
    found = PartialAttention(platform, query, value)
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
    """Return the gradients of queries, keys and values in the dtype of `accumulator_dtype`."""
    grads = AttentionGrads(platform, grad, query, out, lse)
    d_k, d_v = grads.add(key, value, plan, options).full()
    return grads.of_queries(), d_k, d_v


def sums_of(platform: Platform, *like: Tensor) -> SpanTensors:
    """Return an empty sum for gradients of tensors with equal rows and tokens."""

    def added(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # In place where the framework can.
        return tuple(platform.add_into(x, y) for x, y in zip(one, other, strict=True))

    def zeros(batch: int, length: int) -> tuple[Tensor, ...]:
        dtype = accumulator_dtype(platform, like[0])
        return tuple(platform.zeros((batch, x.shape[1], length, x.shape[3]), dtype) for x in like)

    return SpanTensors(platform, added, zeros, like[0].shape[0], like[0].shape[2])


def accumulator_dtype(platform: Platform, x: Tensor) -> Any:
    """Return the dtype in which blocks are accumulated: float32, or float64 for float64 tensors."""
    return x.dtype if platform.dtype_name(x.dtype) == "float64" else platform.dtype("float32")


def _scores(platform: Platform, segment: Segment, keys: KeyRange, options: Options) -> BlockScores:
    mask = None
    if keys.band is not None:
        size = segment.stop - segment.start, keys.stop - keys.start
        mask = platform.from_numpy(_band(size, keys.band, options.causal, options.window))
    factors = None
    if options.dropout is not None:
        factors = options.dropout.of(
            queries=slice(segment.start, segment.stop), keys=slice(keys.start, keys.stop)
        ).factors(platform)
    return BlockScores(options.scale, options.soft_cap, keys.is_causal, mask, factors)


@functools.lru_cache(maxsize=64)
def _band(size: tuple[int, int], offset: int, causal: bool, window: int | None) -> np.ndarray[Any, Any]:
    """Return the mask `[queries, keys]` of a band; `offset` is the first query's index minus the first key's."""
    # Cached: all bands of a plan have few different sizes and offsets.
    distance = offset + np.arange(size[0])[:, None] - np.arange(size[1])
    seen = distance >= 0 if causal else np.ones(size, np.bool_)
    return seen if window is None else seen & (np.abs(distance) < window)
