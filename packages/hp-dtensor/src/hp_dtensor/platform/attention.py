"""Attention of a framework on one block: queries times keys with the logarithm of the sum, and its gradient.

Blocks are put together by `hp_dtensor.parallel.attention`, which decides what a query sees. The defaults hold the
scores of one block in float32; a framework with flash kernels overrides them.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

Tensor: TypeAlias = Any
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
    """

    scale: float
    soft_cap: float | None = None
    is_causal: bool = False
    mask: Tensor | None = None


class AttentionInterface:
    """The part of `Platform` that computes blocks of attention.

    Tensors are plain: queries `[batch, heads, queries, head_dim]`, keys and values
    `[batch, key-value heads, keys, ...]`. Query head h reads key-value head `h // (heads / key-value heads)`.
    """

    if TYPE_CHECKING:
        ops: SimpleNamespace

        def dtype(self, name: str) -> Any: ...

        def dtype_name(self, dtype: Any) -> str: ...

    def has_fused_attention(self, query: Tensor, value: Tensor) -> bool:
        """Return whether `ops.scaled_dot_product_attention` of such tensors holds no matrix of scores."""
        return self.has_fused_blocks(query, value)

    def has_fused_blocks(self, query: Tensor, value: Tensor) -> bool:
        """Return whether `attention_block` of such tensors holds no matrix of scores, where there is no soft cap."""
        return False

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
        out = ops.div(ops.matmul(p, ops.unsqueeze(v, 2)), ops.maximum(total, TINY))
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
        p = ops.exp(ops.sub(s, lse))
        delta = ops.sum(ops.mul(grad, out), -1, True)
        grad, delta = (ops.reshape(x, (*_grouped_shape(q, k), x.shape[-1])) for x in (grad, delta))
        d_s = ops.mul(p, ops.sub(ops.matmul(grad, _transposed(ops, v)), delta))
        if scores.soft_cap is not None:
            seen = ops.maximum(s, -scores.soft_cap)  # minus infinity where nothing is seen, where d_s is 0
            d_s = ops.mul(d_s, ops.sub(1.0, ops.square(ops.div(seen, scores.soft_cap))))
        d_s = ops.mul(d_s, scores.scale)
        rows = ops.reshape(q, (*_grouped_shape(q, k), q.shape[-1]))
        d_q = ops.reshape(ops.matmul(d_s, ops.unsqueeze(k, 2)), tuple(query.shape))
        d_k, d_v = (self._over_groups(x, y, groups) for x, y in ((d_s, rows), (p, grad)))
        return d_q, d_k, d_v

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

    def _causal_mask(self, size: int) -> Tensor:
        places = self.ops.arange(size, self.dtype("int64"))
        return self.ops.ge(self.ops.unsqueeze(places, 1), self.ops.unsqueeze(places, 0))

    def _over_groups(self, x: Tensor, y: Tensor, groups: int) -> Tensor:
        """Multiply `x` transposed by `y`, `[batch, key-value heads, group, queries, ...]`, and sum over the groups."""
        product = self.ops.matmul(self.ops.transpose(x, -2, -1), y)
        return self.ops.squeeze(product, 2) if groups == 1 else self.ops.sum(product, 2)


def _groups(query: Tensor, key: Tensor) -> int:
    return int(query.shape[1] // max(key.shape[1], 1))


def _grouped_shape(q: Tensor, k: Tensor) -> tuple[int, ...]:
    return (q.shape[0], k.shape[1], _groups(q, k), q.shape[2])


def _transposed(ops: SimpleNamespace, x: Tensor) -> Tensor:
    return ops.unsqueeze(ops.transpose(x, -2, -1), 2)
