"""Attention of one block of keys, computed by NumPy in the memory of the tensors.

A block of packed documents or of a ring is small, and an operation of MindSpore takes tens of microseconds, however
small its operands are. A block needs thirty operations; its gradient as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from mindspore import Tensor

from hp_dtensor.platform.attention import AttentionInterface, BlockScores
from hp_platform_mindspore.tensor.memory import numbers, share

Array = np.ndarray[Any, Any]


class HostAttention(AttentionInterface):
    """The default implementations of `AttentionInterface` on NumPy arrays."""

    ops = SimpleNamespace(
        add=np.add,
        sub=np.subtract,
        mul=np.multiply,
        div=np.divide,
        maximum=np.maximum,
        ge=np.greater_equal,
        logical_not=np.logical_not,
        exp=np.exp,
        log=np.log,
        tanh=np.tanh,
        square=np.square,
        matmul=np.matmul,
        reshape=np.reshape,
        transpose=np.swapaxes,
        unsqueeze=np.expand_dims,
        squeeze=np.squeeze,
        cast=np.asarray,
        arange=lambda stop, dtype: np.arange(stop, dtype=dtype),
        sum=lambda x, dim, keepdim=False: np.sum(x, dim, keepdims=keepdim),
        # A block without keys has minus infinity as its maximum.
        amax=lambda x, dim, keepdim=False: np.max(x, dim, keepdims=keepdim, initial=-np.inf),
        masked_fill=lambda x, mask, value: np.where(mask, x.dtype.type(value), x),
    )

    def dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(name)

    def dtype_name(self, dtype: np.dtype[Any]) -> str:
        return dtype.name


_HOST = HostAttention()
# A query that sees no key has minus infinity as its logarithm, and a scaled loss may have infinite gradients. A
# framework warns of neither.
_SILENT: Any = dict.fromkeys(("divide", "over", "invalid"), "ignore")


def block(query: Tensor, key: Tensor, value: Tensor, scores: BlockScores) -> tuple[Tensor, Tensor]:
    """Compute `Platform.attention_block` of CPU tensors."""
    with np.errstate(**_SILENT):
        return _tensors(_HOST.attention_block(*_arrays(query, key, value), _on_host(scores)))


def block_grad(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scores: BlockScores
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `Platform.attention_block_grad` of CPU tensors."""
    with np.errstate(**_SILENT):
        return _tensors(_HOST.attention_block_grad(*_arrays(grad, query, key, value, out, lse), _on_host(scores)))


def _arrays(*tensors: Tensor) -> list[Array]:
    return [numbers(x) for x in tensors]


def _on_host(scores: BlockScores) -> BlockScores:
    mask, dropout = (None if x is None else numbers(x) for x in (scores.mask, scores.dropout))
    return scores._replace(mask=mask, dropout=dropout)


def _tensors(arrays: Sequence[Array]) -> Any:
    return tuple(share(x) for x in arrays)
