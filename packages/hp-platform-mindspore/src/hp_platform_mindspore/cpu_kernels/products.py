"""Matrix products, and what is one product of matrices: linear layers, attention, distances."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor, mint

from hp_platform_mindspore.cpu_kernels import pointwise, shapes
from hp_platform_mindspore.cpu_kernels.empty import as_saved, filled, is_empty
from hp_platform_mindspore.tensor.memory import HOST_DTYPES, share

F = mint.nn.functional


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply vectors, matrices or broadcast batches of matrices, as `torch.matmul`.

    MindSpore's gradient of other products than those of two matrices, or of two equal batches of them, fails where
    sizes are 1, and has the wrong shape where an operand is a vector; so every product is made one of these two.
    """
    if is_empty(x, y):
        return as_saved(filled(0, _product_shape(x.shape, y.shape), x, y))
    if x.ndim == 1:
        return mint.squeeze(matmul(mint.unsqueeze(x, 0), y), -1 if y.ndim == 1 else -2)
    if y.ndim == 1:
        return mint.squeeze(matmul(x, mint.unsqueeze(y, 1)), -1)
    if x.ndim == y.ndim == 2:
        return mint.matmul(x, y)
    if y.ndim == 2:
        rows = mint.reshape(x, (-1, x.shape[-1]))
        return mint.reshape(mint.matmul(rows, y), (*x.shape[:-1], y.shape[-1]))
    if x.ndim == y.ndim == 3 and x.shape[0] == y.shape[0]:
        return mint.bmm(x, y)
    batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    product = mint.bmm(_batch_of(x, batch), _batch_of(y, batch))
    return mint.reshape(product, (*batch, *product.shape[-2:]))


def _batch_of(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Broadcast `x` to the batch shape and flatten that into one batch dimension."""
    return mint.reshape(shapes.expand(x, (*batch, *x.shape[-2:])), (-1, *x.shape[-2:]))


def _product_shape(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[int, ...]:
    batch = np.broadcast_shapes(x[:-2], y[:-2])
    return (*batch, *(x[-2:-1] if len(x) > 1 else ()), *(y[-1:] if len(y) > 1 else ()))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if is_empty(x, weight):
        product = as_saved(filled(0, (*x.shape[:-1], weight.shape[0]), x, weight))
        return product if bias is None else pointwise.add(product, bias)
    return F.linear(x, weight, bias)


def outer(x: Tensor, y: Tensor) -> Tensor:
    return pointwise.mul(mint.unsqueeze(x, 1), mint.unsqueeze(y, 0))


def added_product(addend: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = matmul(x, y)
    return pointwise.add(
        addend if beta == 1 else pointwise.mul(addend, beta), product if alpha == 1 else pointwise.mul(product, alpha)
    )


def cdist(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """Compute the distances of all rows of `x` from all rows of `y`; `compute_mode` has no effect on the result."""
    if is_empty(x, y):  # the kernel's backward leaves the other one's gradient unwritten
        batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        return as_saved(filled(0, (*batch, x.shape[-2], y.shape[-2]), x, y))
    return mint.cdist(x, y, p)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    """Attend over `[batch, heads, length, width]`; with `enable_gqa` a key head serves several query heads."""
    if enable_gqa and key.shape[1] and query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = shapes.repeat_interleave(key, repeats, 1), shapes.repeat_interleave(value, repeats, 1)
    scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    scores = matmul(query * scale, mint.transpose(key, -2, -1))
    if is_causal:
        scores = pointwise.masked_fill(scores, _future(query.shape[-2], key.shape[-2]), float("-inf"))
    return matmul(F.softmax(scores, -1), value)


def _future(queries: int, keys: int) -> Tensor:
    """Build the mask `[queries, keys]` that is True where a key comes after the query's position."""
    return share(np.triu(np.ones((queries, keys), np.bool_), 1))


def times_matrix(x: Tensor, dim: int, matrix: np.ndarray[Any, Any]) -> Tensor:
    """Multiply dimension `dim` of `x` by a constant host matrix `[size after, size before]`."""
    weight = share(matrix.astype(HOST_DTYPES[x.dtype]))
    return mint.transpose(matmul(mint.transpose(x, dim, -1), mint.transpose(weight, 0, 1)), dim, -1)


KERNELS: dict[str, Callable[..., Any]] = {
    "matmul": matmul,
    "bmm": matmul,
    "mm": matmul,
    "mv": matmul,
    "dot": lambda x, y: matmul(x, y),
    "linear": linear,
    "outer": outer,
    "ger": outer,
    "addmm": added_product,
    "baddbmm": added_product,
    "cdist": cdist,
    "scaled_dot_product_attention": scaled_dot_product_attention,
}
