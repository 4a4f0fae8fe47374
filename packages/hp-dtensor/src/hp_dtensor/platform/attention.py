"""The attention part of `Platform`: attention of one block of keys with its log-sum-exp, gradients, and dropout.

`hp_dtensor.parallel.attention` decides which keys each query sees, and its `blockwise` merges the blocks. The default
implementations materialize the scores of one block in float32. A framework with flash attention kernels overrides them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

Tensor: TypeAlias = Any
Array: TypeAlias = np.ndarray[Any, Any]
LOWEST = -1e30
"""A finite number below every score: the row maximum where no key is visible. `-inf - -inf` would be NaN."""
TINY = 1e-30
"""Smallest divisor of a row: the sum of the weights is zero where no key is visible."""


class BlockScores(NamedTuple):
    """Scaling, soft cap, mask and dropout of the products of queries and keys of one block.

    Attributes:
        scale: factor on the products.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)` (Gemma 2, arXiv 2408.00118); None: no cap.
        is_causal: query i sees the keys up to i. The block must be square, and `mask` is ignored.
        mask: bool `[queries, keys]`, True where a query sees a key; None: all keys are visible.
        dropout: float32 `[batch, heads, queries, keys]`, factors on the entries of the softmax: 0 where they are
            dropped, else 1 / (1 - p); None: no dropout. The log-sum-exp is that without dropout.
    """

    scale: float
    soft_cap: float | None = None
    is_causal: bool = False
    mask: Tensor | None = None
    dropout: Tensor | None = None


class AttentionInterface:
    """The attention part of `Platform`.

    Tensors are plain: queries `[batch, heads, queries, head_dim]`, keys and values
    `[batch, key-value heads, keys, ...]`. Query head h reads key-value head `h // (heads / key-value heads)`.
    """

    if TYPE_CHECKING:
        ops: SimpleNamespace

        def dtype(self, name: str) -> Any: ...

        def dtype_name(self, dtype: Any) -> str: ...

        def from_numpy(self, array: np.ndarray[Any, Any], device: Any = None) -> Tensor: ...

    def route_attention(self, function: Callable[..., Any]) -> AbstractContextManager[Any]:
        """Call `function` instead of the framework's own scaled dot-product attention in the context, in this thread.

        It gets queries, keys, values, a mask or None, the probability of dropout, whether attention is causal, and a
        scale or None, and may return NotImplemented for the framework's own. By default only `hp_dtensor.attention` is
        routed.
        """
        return contextlib.nullcontext()

    def has_fused_attention(self, query: Tensor, value: Tensor) -> bool:
        """Return whether `ops.scaled_dot_product_attention` of such tensors never materializes the score matrix."""
        return self.has_fused_blocks(query, value)

    def has_fused_blocks(self, query: Tensor, value: Tensor) -> bool:
        """Return whether `attention_block` of such tensors never materializes scores, given no soft cap or dropout."""
        return False

    def fused_rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
        """Return `x` with its pairs (i, i + head_dim / 2) rotated, in one operation; None, the default, without one.

        Differentiable with respect to `x`.

        Args:
            x: `[batch, length, heads, head_dim]`, perhaps a DTensor.
            cos, sin: `[(batch,) length, 1, head_dim / 2]` in the dtype of `x`; replicated if `x` is a DTensor.
        """
        return None

    def dropout_factors(self, p: float, rows: Array, heads: Array, queries: Array, keys: Array) -> Tensor:
        """Return float32 `[rows, heads, queries, keys]`: 0 where an entry is dropped, else 1 / (1 - p).

        A framework that computes the factors on its device must return the same ones as `dropout_mask`.

        Args:
            rows: int64, the seed of each row of the batch.
            heads, queries, keys: int64, indices of the heads, and positions in the full sequence.
        """
        mask = dropout_mask(p, rows, heads, queries, keys)
        return self.from_numpy(
            mask.astype(np.float32) / np.float32(1 - p) if p < 1 else np.zeros(mask.shape, "float32")
        )

    def attention_block(self, query: Tensor, key: Tensor, value: Tensor, scores: BlockScores) -> tuple[Tensor, Tensor]:
        """Return the block's attention `[batch, heads, queries, width]` and log-sum-exp `[batch, heads, queries]`.

        The log-sum-exp is float32, or float64 for float64 queries. The attention has that dtype or that of the queries.
        A query that sees no key gets zeros and minus infinity.
        """
        ops = self.ops
        q, k, v = (self._accurate(x) for x in (query, key, value))
        s = self._masked_scores(q, k, scores)
        # The softmax relative to the row's maximum, so that no exponential overflows; `lse` undoes it.
        highest = ops.maximum(ops.amax(s, -1, True), LOWEST)
        p = ops.exp(ops.sub(s, highest))
        total = ops.sum(p, -1, True)
        # Dropout follows the softmax, so the divisor is the sum of all entries, including dropped ones.
        dropped = p if scores.dropout is None else ops.mul(p, self._factors(p, scores.dropout))
        out = ops.div(ops.matmul(dropped, ops.unsqueeze(v, 2)), ops.maximum(total, TINY))
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
        """Return the block's contributions to the gradients of queries, keys and values, in their shapes.

        Args:
            grad, out, lse: gradient, attention and log-sum-exp of these queries over *all* keys, not only the block's.
                `lse` is finite: each query sees a key of some block.
        """
        ops, groups = self.ops, _groups(query, key)
        q, k, v, grad, out = (self._accurate(x) for x in (query, key, value, grad, out))
        s, lse = self._masked_scores(q, k, scores), ops.reshape(lse, (*_grouped_shape(q, k), 1))
        # With the log-sum-exp over all keys, P = exp(S - lse), D = rowsum(dO * O) and dS = P * (dP - D) need no other
        # block (FlashAttention, arXiv 2205.14135, appendix B.2).
        p = ops.exp(ops.sub(s, lse))
        delta = ops.sum(ops.mul(grad, out), -1, True)
        grad, delta = (ops.reshape(x, (*_grouped_shape(q, k), x.shape[-1])) for x in (grad, delta))
        d_p, dropped = ops.matmul(grad, _transposed(ops, v)), p
        if scores.dropout is not None:
            # D stays as it is: rowsum(dO * O) equals rowsum(P * dP), with the factors contained in dP.
            factors = self._factors(p, scores.dropout)
            d_p, dropped = ops.mul(d_p, factors), ops.mul(p, factors)
        d_s = ops.mul(p, ops.sub(d_p, delta))
        if scores.soft_cap is not None:
            # d/dx cap * tanh(x / cap) = 1 - t ** 2, where t = tanh(x / cap) = s / cap.
            seen = ops.maximum(s, -scores.soft_cap)  # masked entries are -inf; d_s is 0 there, and 0 * inf would be NaN
            d_s = ops.mul(d_s, ops.sub(1.0, ops.square(ops.div(seen, scores.soft_cap))))
        d_s = ops.mul(d_s, scores.scale)
        rows = ops.reshape(q, (*_grouped_shape(q, k), q.shape[-1]))
        d_q = ops.reshape(ops.matmul(d_s, ops.unsqueeze(k, 2)), tuple(query.shape))
        # x^T y of `[batch, key-value heads, group, queries, ...]`. The query heads of a group share keys and values, so
        # their contributions are summed.
        products = [ops.matmul(ops.transpose(x, -2, -1), y) for x, y in ((d_s, rows), (dropped, grad))]
        d_k, d_v = (ops.squeeze(x, 2) if groups == 1 else ops.sum(x, 2) for x in products)
        return d_q, d_k, d_v

    def merge_blocks_in_place(self, one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Write the result of `hp_dtensor.parallel.attention.blockwise.merge_blocks` into `one`, and return `one`.

        Return None, the default, if `merge_blocks` shall compose the merge of `ops`.
        """
        return None

    def add_into(self, total: Tensor, x: Tensor) -> Tensor:
        """Return `total + x`. A framework that writes in place adds into `total` and returns it."""
        return self.ops.add(total, x)

    def accurate_tanh(self, x: Tensor) -> Tensor:
        """Return `tanh(x)` for the soft cap, accurate to a few units in the last place."""
        return self.ops.tanh(x)

    def _accurate(self, x: Tensor) -> Tensor:
        """Return half precision as float32: the merge of many blocks would add up their rounding errors."""
        is_wide = self.dtype_name(x.dtype) in ("float32", "float64")
        return x if is_wide else self.ops.cast(x, self.dtype("float32"))

    def _masked_scores(self, q: Tensor, k: Tensor, scores: BlockScores) -> Tensor:
        """Return the scores `[batch, key-value heads, group, queries, keys]`, minus infinity where masked."""
        ops = self.ops
        rows = ops.reshape(q, (*_grouped_shape(q, k), q.shape[-1]))
        s = ops.mul(ops.matmul(rows, _transposed(ops, k)), scores.scale)
        if scores.soft_cap is not None:
            s = ops.mul(self.accurate_tanh(ops.div(s, scores.soft_cap)), scores.soft_cap)
        mask = scores.mask
        if scores.is_causal:
            positions = ops.arange(q.shape[2], self.dtype("int64"))
            mask = ops.ge(ops.unsqueeze(positions, 1), ops.unsqueeze(positions, 0))
        # Infinite and not merely very low: the exponential is then exactly 0, also in a row whose other scores are low.
        return s if mask is None else ops.masked_fill(s, ops.logical_not(mask), -math.inf)

    def _factors(self, p: Tensor, dropout: Tensor) -> Tensor:
        """Return dropout factors in the shape and dtype of the grouped softmax entries `p`."""
        return self.ops.cast(self.ops.reshape(dropout, tuple(p.shape)), p.dtype)


def dropout_mask(p: float, rows: Array, heads: Array, queries: Array, keys: Array) -> Array:
    """Return the dropout mask of a softmax, bool `[rows, heads, queries, keys]`: False where an entry is dropped.

    The mask depends only on the row's seed and on the head, query and key indices, so it is the same in every sharding.
    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) is used as a counter-based generator: the number of (row, head)
    seeds the stream of its queries, that of (row, head, query) the stream of its keys. An entry is dropped if the top
    24 bits of its number, as a fraction, are below `p`.
    """
    # 24 bits fit the significand of a float32, so a framework may compare in float32 with the same result.
    threshold = np.uint64(round(p * 2**24))
    # O(rows * heads * queries * keys) time, so attention asks for the mask of one block at a time.
    mask = np.empty((len(rows), len(heads), len(queries), len(keys)), np.bool_)
    of_queries, of_keys = (stream_offsets(x) for x in (queries, keys))
    for row, seed in enumerate(np.asarray(rows, np.int64).view(np.uint64)):
        # One head at a time: the 64-bit numbers of all heads would need eight times the memory of the mask.
        for head, offset in enumerate(stream_offsets(heads)):
            # An array of one seed: sums and products of uint64 arrays wrap silently, those of NumPy scalars warn.
            of_head = mix(np.array([seed]) + offset)
            numbers = mix(mix(of_head + of_queries)[:, None] + of_keys)
            np.greater_equal(numbers >> np.uint64(40), threshold, out=mask[row, head])
    return mask


GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64: the increment of its counter, and the multipliers of its output function."""


def stream_offsets(indices: Array) -> Array:
    """Return the offsets of stream elements from the seed of a SplitMix64 stream, `(index + 1) * GAMMA`, as uint64."""
    return (np.asarray(indices, np.int64).view(np.uint64) + np.uint64(1)) * np.uint64(GAMMA)


def mix(z: Array) -> Array:
    """Apply the output function of SplitMix64 to uint64 numbers in place, and return them."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


def _groups(query: Tensor, key: Tensor) -> int:
    # A rank may hold no heads: a sharded head dimension leaves empty shards if ranks outnumber heads.
    return int(query.shape[1] // max(key.shape[1], 1))


def _grouped_shape(q: Tensor, k: Tensor) -> tuple[int, ...]:
    """Return `[batch, key-value heads, group, queries]`, the shape in which query heads meet the keys they share."""
    return (q.shape[0], k.shape[1], _groups(q, k), q.shape[2])


def _transposed(ops: SimpleNamespace, x: Tensor) -> Tensor:
    # The new dimension is broadcast over the query heads of a group, so keys are not repeated in memory.
    return ops.unsqueeze(ops.transpose(x, -2, -1), 2)
