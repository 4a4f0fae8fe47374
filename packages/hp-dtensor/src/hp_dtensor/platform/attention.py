"""Attention of a framework on one block: queries times keys with the logarithm of the sum, and its gradient.

Blocks are put together by `hp_dtensor.parallel.attention`, which decides what a query sees. The defaults hold the
scores of one block in float32; a framework with flash kernels overrides them.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

Tensor: TypeAlias = Any
Array: TypeAlias = np.ndarray[Any, Any]
LOWEST = -1e30
"""Below every score, yet finite: the maximum of a row in which no key is seen."""
TINY = 1e-30
"""Divisor where the sum of such a row's weights is zero."""


class BlockScores(NamedTuple):
    """The scores of a block: `scale * q k`, capped if `soft_cap` is given, where a query sees the key.

    Attributes:
        scale: factor on the products.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)` (Gemma 2, arXiv 2408.00118); None: they stay.
        is_causal: query i sees the keys up to i; the block is a square.
        mask: bool `[queries, keys]`, True where a query sees a key; None: everywhere (or as `is_causal` says).
        dropout: float32 `[batch, heads, queries, keys]`, by which the entries of the softmax are multiplied: 0 where
            they are dropped, else 1 / (1 - p); None: nothing is dropped. The log-sum-exp does not know of it.
    """

    scale: float
    soft_cap: float | None = None
    is_causal: bool = False
    mask: Tensor | None = None
    dropout: Tensor | None = None


class AttentionInterface:
    """The part of `Platform` that computes blocks of attention.

    Tensors are plain: queries `[batch, heads, queries, head_dim]`, keys and values
    `[batch, key-value heads, keys, ...]`. Query head h reads key-value head `h // (heads / key-value heads)`.
    """

    if TYPE_CHECKING:
        ops: SimpleNamespace

        def dtype(self, name: str) -> Any: ...

        def dtype_name(self, dtype: Any) -> str: ...

        def from_numpy(self, array: np.ndarray[Any, Any], device: Any = None) -> Tensor: ...

    def has_fused_attention(self, query: Tensor, value: Tensor) -> bool:
        """Return whether `ops.scaled_dot_product_attention` of such tensors holds no matrix of scores."""
        return self.has_fused_blocks(query, value)

    def has_fused_blocks(self, query: Tensor, value: Tensor) -> bool:
        """Return whether `attention_block` of such tensors holds no matrix of scores, without cap and dropout."""
        return False

    def dropout_factors(self, p: float, rows: Array, heads: Array, queries: Array, keys: Array) -> Tensor:
        """Return float32 `[rows, heads, queries, keys]`: 0 where an entry is dropped, else 1 / (1 - p).

        A framework that computes them on its device gives the same ones as `kept_entries`.

        Args:
            rows: int64, the seed of each row of the batch.
            heads, queries, keys: int64, numbers of heads, and places in the whole sequence.
        """
        kept = kept_entries(p, rows, heads, queries, keys)
        return self.from_numpy(
            kept.astype(np.float32) / np.float32(1 - p) if p < 1 else np.zeros(kept.shape, "float32")
        )

    def attention_block(self, query: Tensor, key: Tensor, value: Tensor, scores: BlockScores) -> tuple[Tensor, Tensor]:
        """Return the block's attention `[batch, heads, queries, width]` and the log-sum-exp of its scores.

        The latter is `[batch, heads, queries]`, of float32 (of float64 where the queries are), as is the former, or
        of the queries' dtype. A query that sees no key gets zeros and minus infinity.
        """
        ops = self.ops
        q, k, v = (self._accurate(x) for x in (query, key, value))
        s = self._masked_scores(q, k, scores)
        highest = ops.maximum(ops.amax(s, -1, True), LOWEST)
        p = ops.exp(ops.sub(s, highest))
        total = ops.sum(p, -1, True)
        # Dropout comes after the softmax, which is divided by the sum of all entries, dropped ones too.
        kept = p if scores.dropout is None else ops.mul(p, self._factors(p, scores.dropout))
        out = ops.div(ops.matmul(kept, ops.unsqueeze(v, 2)), ops.maximum(total, TINY))
        lse = ops.add(highest, ops.log(total))
        return ops.reshape(out, (*query.shape[:3], value.shape[3])), ops.reshape(lse, tuple(query.shape[:3]))

    def attention_block_grad(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        scores: BlockScores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's contributions to the gradients of queries, keys and values.

        Args:
            grad, out, lse: of these queries' attention over *all* keys, not over the block's alone.
        """
        ops, groups = self.ops, _groups(query, key)
        q, k, v, grad, out = (self._accurate(x) for x in (query, key, value, grad, out))
        s, lse = self._masked_scores(q, k, scores), ops.reshape(lse, (*_grouped_shape(q, k), 1))
        # With the log-sum-exp over all keys, P = exp(S - lse), D = rowsum(dO * O) and dS = P * (dP - D) need no other
        # block (FlashAttention, arXiv 2205.14135, appendix B.2).
        p = ops.exp(ops.sub(s, lse))
        delta = ops.sum(ops.mul(grad, out), -1, True)
        grad, delta = (ops.reshape(x, (*_grouped_shape(q, k), x.shape[-1])) for x in (grad, delta))
        d_p, kept = ops.matmul(grad, _transposed(ops, v)), p
        if scores.dropout is not None:
            factors = self._factors(p, scores.dropout)
            d_p, kept = ops.mul(d_p, factors), ops.mul(p, factors)
        d_s = ops.mul(p, ops.sub(d_p, delta))
        if scores.soft_cap is not None:
            # s / cap is the hyperbolic tangent t, whose derivative is 1 - t ** 2.
            seen = ops.maximum(s, -scores.soft_cap)  # minus infinity where nothing is seen, where d_s is 0
            d_s = ops.mul(d_s, ops.sub(1.0, ops.square(ops.div(seen, scores.soft_cap))))
        d_s = ops.mul(d_s, scores.scale)
        rows = ops.reshape(q, (*_grouped_shape(q, k), q.shape[-1]))
        d_q = ops.reshape(ops.matmul(d_s, ops.unsqueeze(k, 2)), tuple(query.shape))
        d_k, d_v = (self._over_groups(x, y, groups) for x, y in ((d_s, rows), (kept, grad)))
        return d_q, d_k, d_v

    def merge_attention(self, one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Merge attention `[batch, heads, queries, width]` of the same queries over two sets of keys.

        Args:
            one, other: each with its log-sum-exp `[batch, heads, queries]`; both of float32, or of float64. A framework
                that writes in place may write into `one`, and returns its very tensors then.
        """
        ops = self.ops
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

    def add_into(self, total: Tensor, x: Tensor) -> Tensor:
        """Return `total + x`: in the memory of `total`, and `total` itself, where the framework writes in place."""
        return self.ops.add(total, x)

    def accurate_tanh(self, x: Tensor) -> Tensor:
        """Return the hyperbolic tangent, right to a few roundings, by which scores are capped."""
        return self.ops.tanh(x)

    def _accurate(self, x: Tensor) -> Tensor:
        is_wide = self.dtype_name(x.dtype) in ("float32", "float64")
        return x if is_wide else self.ops.cast(x, self.dtype("float32"))

    def _masked_scores(self, q: Tensor, k: Tensor, scores: BlockScores) -> Tensor:
        """Return the scores `[batch, key-value heads, group, queries, keys]`, minus infinity where nothing is seen."""
        ops = self.ops
        rows = ops.reshape(q, (*_grouped_shape(q, k), q.shape[-1]))
        s = ops.mul(ops.matmul(rows, _transposed(ops, k)), scores.scale)
        if scores.soft_cap is not None:
            s = ops.mul(self.accurate_tanh(ops.div(s, scores.soft_cap)), scores.soft_cap)
        mask = scores.mask if not scores.is_causal else self._causal_mask(q.shape[2])
        return s if mask is None else ops.masked_fill(s, ops.logical_not(mask), -math.inf)

    def _factors(self, p: Tensor, dropout: Tensor) -> Tensor:
        return self.ops.cast(self.ops.reshape(dropout, tuple(p.shape)), p.dtype)

    def _causal_mask(self, size: int) -> Tensor:
        places = self.ops.arange(size, self.dtype("int64"))
        return self.ops.ge(self.ops.unsqueeze(places, 1), self.ops.unsqueeze(places, 0))

    def _over_groups(self, x: Tensor, y: Tensor, groups: int) -> Tensor:
        """Multiply `x` transposed by `y`, `[batch, key-value heads, group, queries, ...]`, and sum over the groups."""
        product = self.ops.matmul(self.ops.transpose(x, -2, -1), y)
        return self.ops.squeeze(product, 2) if groups == 1 else self.ops.sum(product, 2)


def kept_entries(p: float, rows: Array, heads: Array, queries: Array, keys: Array) -> Array:
    """Return which entries of a softmax dropout keeps, bool `[rows, heads, queries, keys]`.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) as a counter-based generator: each step of row, head, query, key is
    a place in the stream whose seed is the number found so far. An entry is dropped if the first 24 bits of its number
    are below `p`.
    """
    threshold = np.uint64(round(p * 2**24))
    kept = np.empty((len(rows), len(heads), len(queries), len(keys)), np.bool_)
    of_queries, of_keys = (steps_of(x) for x in (queries, keys))
    for row, seed in enumerate(np.asarray(rows, np.int64).view(np.uint64)):
        for head, step in enumerate(steps_of(heads)):
            of_head = mixed(np.array([seed]) + step)
            numbers = mixed(mixed(of_head + of_queries)[:, None] + of_keys)
            np.greater_equal(numbers >> np.uint64(40), threshold, out=kept[row, head])
    return kept


GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64: the step of its counter, and the factors of its mixing."""


def steps_of(places: Array) -> Array:
    """Return how far places lie from the seed of their stream: multiples of its step, as uint64."""
    return (np.asarray(places, np.int64).view(np.uint64) + np.uint64(1)) * np.uint64(GAMMA)


def mixed(z: Array) -> Array:
    """Mix uint64 numbers in place, and return them."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


def _groups(query: Tensor, key: Tensor) -> int:
    return int(query.shape[1] // max(key.shape[1], 1))


def _grouped_shape(q: Tensor, k: Tensor) -> tuple[int, ...]:
    return (q.shape[0], k.shape[1], _groups(q, k), q.shape[2])


def _transposed(ops: SimpleNamespace, x: Tensor) -> Tensor:
    return ops.unsqueeze(ops.transpose(x, -2, -1), 2)
