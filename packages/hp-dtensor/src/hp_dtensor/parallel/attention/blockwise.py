"""Tensors that cover stretches of tokens, put together where they overlap: results and gradients of blocks.

Attention over planned blocks, and its gradient: never more than one block's scores at a time.

The result of each block comes with the log-sum-exp of its scores, by which blocks are merged in float32; the gradient
of a block needs the whole result and its log-sum-exp, and no other block (Dao et al., 2022, arXiv 2205.14135).
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from hp_dtensor.parallel.attention.masks import Array, KeyRange, PlacedDropout, Plan, Rows, Segment
from hp_dtensor.platform.attention import BlockScores
from hp_dtensor.platform.interface import Platform

Tensor: TypeAlias = Any
Tensors: TypeAlias = tuple[Tensor, ...]
Combine: TypeAlias = Callable[[Tensors, Tensors], Tensors]
"""Puts two tuples of tensors of the same tokens together. It may write into the first and return its very tensors."""
Missing: TypeAlias = Callable[[int, int], Tensors]
"""Makes the tensors of so many rows and tokens of which nothing was added."""


def of_tokens(platform: Platform, x: Tensor, start: int, stop: int) -> Tensor:
    """Return the stretch of `x` along dimension 2, that of tokens."""
    return x if stop - start == x.shape[2] else platform.ops.narrow(x, 2, start, stop - start)


def of_rows(platform: Platform, rows: Rows, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of the batch of each tensor."""
    if rows.stop is None:
        return tensors
    return tuple(platform.ops.narrow(x, 0, rows.start, rows.stop - rows.start) for x in tensors)


class Stretches:
    """Tensors `[batch, heads, tokens, ...]` of which each call of `add` gives a stretch of some rows' tokens.

    Rows of the batch are the same in every call, or the same stretches of them. What is added belongs to this object,
    which may write into its memory.

    Args:
        batch, tokens: the sizes of the whole.
    """

    def __init__(self, platform: Platform, combine: Combine, missing: Missing, batch: int, tokens: int) -> None:
        self._platform, self._combine, self._missing = platform, combine, missing
        self._batch, self._tokens = batch, tokens
        self._of_rows: dict[Rows, _Pieces] = {}

    def add(self, rows: Rows, start: int, stop: int, tensors: Tensors) -> None:
        """Combine `tensors` with what there is of these rows' tokens `start` to `stop`."""
        key = Rows(rows.start, rows.stop, ())
        if key not in self._of_rows:
            self._of_rows[key] = _Pieces(self._platform, self._combine)
        self._of_rows[key].add(start, stop, tensors)

    def whole(self) -> Tensors:
        """Return the tensors of all rows and tokens."""
        parts, at = [], 0
        for rows in sorted(self._of_rows, key=lambda each: each.start):
            stop = self._batch if rows.stop is None else rows.stop
            if at < rows.start:
                parts.append(self._missing(rows.start - at, self._tokens))
            missing = functools.partial(self._missing, stop - rows.start)
            parts.append(self._of_rows[rows].whole(self._tokens, missing))
            at = stop
        if at < self._batch or not parts:
            parts.append(self._missing(self._batch - at, self._tokens))
        return _joined(self._platform, parts, 0)

    def added_to(self, total: Tensors) -> Tensors:
        """Return `total`, the tensors of all rows and tokens, with everything combined into it."""
        if list(self._of_rows) == [Rows(0, None, ())]:
            return self._of_rows[Rows(0, None, ())].added_to(total, self._tokens)
        whole = self.whole()
        return self._combine(total, whole)


class _Pieces:
    """The tensors of some rows, as pieces that lie beside each other or apart: (start, stop, tensors), in order."""

    def __init__(self, platform: Platform, combine: Combine) -> None:
        self._platform, self._combine = platform, combine
        self._pieces: list[tuple[int, int, Tensors]] = []

    def add(self, start: int, stop: int, tensors: Tensors) -> None:
        first = bisect.bisect_right(self._pieces, start, key=lambda piece: piece[1])
        last = bisect.bisect_left(self._pieces, stop, key=lambda piece: piece[0])
        found: list[tuple[int, int, Tensors]] = []
        at = start
        for piece in self._pieces[first:last]:
            if at < piece[0]:
                found.append((at, piece[0], self._cut(tensors, start, at, piece[0])))
            a, b = max(start, piece[0]), min(stop, piece[1])
            found += self._combined(piece, a, b, self._cut(tensors, start, a, b))
            at = b
        if at < stop:
            found.append((at, stop, self._cut(tensors, start, at, stop)))
        self._pieces[first:last] = found

    def whole(self, tokens: int, missing: Callable[[int], Tensors]) -> Tensors:
        parts, at = [], 0
        for start, stop, tensors in self._pieces:
            if at < start:
                parts.append(missing(start - at))
            parts.append(tensors)
            at = stop
        if at < tokens or not parts:
            parts.append(missing(tokens - at))
        return _joined(self._platform, parts, 2)

    def added_to(self, total: Tensors, tokens: int) -> Tensors:
        sums = _Pieces(self._platform, self._combine)
        sums._pieces = [(0, tokens, total)]
        for piece in self._pieces:
            sums.add(*piece)
        return _joined(self._platform, [tensors for _, _, tensors in sums._pieces], 2)

    def _combined(
        self, piece: tuple[int, int, Tensors], a: int, b: int, tensors: Tensors
    ) -> list[tuple[int, int, Tensors]]:
        """Return what `piece` becomes with `tensors` of its tokens `a` to `b` combined into it."""
        start, stop, known = piece
        own = self._cut(known, start, a, b)
        result = self._combine(own, tensors)
        if all(x is y for x, y in zip(result, own, strict=True)):
            return [piece]  # the combination is in its memory
        before = [(start, a, self._cut(known, start, start, a))] if start < a else []
        after = [(b, stop, self._cut(known, start, b, stop))] if b < stop else []
        return [*before, (a, b, result), *after]

    def _cut(self, tensors: Tensors, start: int, a: int, b: int) -> Tensors:
        """Return the tokens `a` to `b` of tensors that begin at token `start`."""
        return tuple(of_tokens(self._platform, x, a - start, b - start) for x in tensors)


def _joined(platform: Platform, parts: Sequence[Tensors], dim: int) -> Tensors:
    if len(parts) == 1:
        return parts[0]
    return tuple(platform.ops.cat(list(each), dim) for each in zip(*parts, strict=True))


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


class PartialAttention:
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
    """Return attention and its log-sum-exp, see `PartialAttention.total`."""
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
