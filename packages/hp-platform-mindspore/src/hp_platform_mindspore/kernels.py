"""The operations of `hp_dtensor.ops` on plain tensors, from kernels that the CPU has, forward and backward.

Where an operation of torch has no kernel, or one that fails on an empty tensor, it is composed here. Indices
come from NumPy on the host: they have no gradient, and its order of ties is defined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hp_platform_mindspore.autograd import custom_function, fresh_leaf
from hp_platform_mindspore.memory import HOST_DTYPES, encode, numbers, share

F = mint.nn.functional
Number = int | float | bool
Dims = int | Sequence[int] | None
LOW_PRECISION = (ms.float16, ms.bfloat16)


# Creation ------------------------------------------------------------------------------------------------


def zeros(shape: Sequence[int], dtype: Any) -> Tensor:
    return mint.zeros(tuple(shape), dtype=dtype)


def ones(shape: Sequence[int], dtype: Any) -> Tensor:
    return mint.ones(tuple(shape), dtype=dtype)


def full(shape: Sequence[int], value: Number, dtype: Any) -> Tensor:
    return _made(np.full(tuple(shape), value), dtype)


def arange(end: int, dtype: Any) -> Tensor:
    return _made(np.arange(end), dtype)


def _made(values: np.ndarray[Any, Any], dtype: Any) -> Tensor:
    return share(encode(values) if dtype == ms.bfloat16 else values.astype(HOST_DTYPES[dtype]), dtype)


# Pointwise -----------------------------------------------------------------------------------------------


def add(x: Any, y: Any) -> Tensor:
    return fresh_leaf(x) + fresh_leaf(y)


def sub(x: Any, y: Any) -> Tensor:
    return fresh_leaf(x) - fresh_leaf(y)


def mul(x: Any, y: Any) -> Tensor:
    return x * y


def div(x: Any, y: Any) -> Tensor:
    return x / y


def power(x: Any, y: Any) -> Tensor:
    return x**y


def gelu(x: Tensor) -> Tensor:
    return ops.gelu(x, approximate="none")


def square(x: Tensor) -> Tensor:
    return x * x


def clamp(x: Tensor, min: Number | None = None, max: Number | None = None) -> Tensor:
    return mint.clamp(x, min, max)


def masked_fill(x: Tensor, mask: Tensor, value: Number) -> Tensor:
    return x.masked_fill(mask, value)


def cast(x: Tensor, dtype: Any) -> Tensor:
    return x if x.dtype == dtype else x.astype(dtype)


def clone(x: Tensor) -> Tensor:
    return mint.logical_or(x, x) if x.dtype == ms.bool_ else mint.mul(x, 1)


# Reductions ----------------------------------------------------------------------------------------------


def total(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return mint.sum(x, dim=_all_dims(x, dim), keepdim=keepdim)


def mean(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return mint.mean(x, dim=_all_dims(x, dim), keepdim=keepdim)


def _all_dims(x: Tensor, dim: Dims) -> int | tuple[int, ...]:
    if dim is None:
        return tuple(range(x.ndim))
    return dim if isinstance(dim, int) else tuple(dim)


def amax(x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    return mint.amax(x, dim if isinstance(dim, int) else tuple(dim), keepdim)


def amin(x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    return mint.amin(x, dim if isinstance(dim, int) else tuple(dim), keepdim)


def argmax(x: Tensor, dim: int) -> Tensor:
    return share(np.asarray(np.argmax(numbers(x), axis=dim), np.int64))


def logsumexp(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return ops.logsumexp(x, dim, keepdim)


def cumsum(x: Tensor, dim: int) -> Tensor:
    return ops.cumsum(x, dim) if x.size else clone(x)


# Products ------------------------------------------------------------------------------------------------
#
# MindSpore's product over nothing is uninitialised memory, not zero: `[m, 0] @ [0, n]`, and so the gradient of a
# weight that met no row.


def matmul(x: Tensor, y: Tensor) -> Tensor:
    if 0 not in (*x.shape, *y.shape):
        return mint.matmul(x, y)
    return _product_over_nothing((*np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1]), x, y)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if 0 not in (*x.shape, *weight.shape):
        return F.linear(x, weight, bias)
    product = _product_over_nothing((*x.shape[:-1], weight.shape[0]), x, weight)
    return product if bias is None else add(product, bias)


def _product_over_nothing(shape: tuple[int, ...], x: Tensor, y: Tensor) -> Tensor:
    return custom_function(
        lambda x, y: zeros(shape, x.dtype), lambda grad: [ops.zeros_like(x), ops.zeros_like(y)], x, y
    )


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    """Attention over `[batch, heads, length, width]`; with `enable_gqa` a key head serves several query heads."""
    if enable_gqa and key.shape[1] and query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = repeat_interleave(key, repeats, 1), repeat_interleave(value, repeats, 1)
    scores = mint.matmul(query * (1.0 / math.sqrt(query.shape[-1])), mint.transpose(key, -2, -1))
    if is_causal:
        scores = scores.masked_fill(_future(query.shape[-2], key.shape[-2]), float("-inf"))
    return mint.matmul(F.softmax(scores, -1), value)


def _future(queries: int, keys: int) -> Tensor:
    """True where a query must not look: at keys after its own position."""
    return share(np.triu(np.ones((queries, keys), np.bool_), 1))


# Normalization, losses, tables ---------------------------------------------------------------------------


def softmax(x: Tensor, dim: int) -> Tensor:
    return F.softmax(x, dim)


def log_softmax(x: Tensor, dim: int) -> Tensor:
    return ops.log_softmax(x, dim)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, computed in float32."""
    wide = x.astype(ms.float32) if x.dtype in LOW_PRECISION else x
    normalized = wide * mint.rsqrt(mint.mean(wide * wide, dim=-1, keepdim=True) + eps)
    return cast(normalized, x.dtype) * weight


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    losses = -mint.squeeze(gather(log_softmax(logits, 1), 1, mint.unsqueeze(cast(targets, ms.int64), 1)), 1)
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        raise ValueError(f"cross_entropy: reduction must be mean, sum or none, got {reduction!r}")
    return total(losses) if reduction == "sum" else mean(losses)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return _pick(weight, 0, ids, (*ids.shape, *weight.shape[1:]))


# Shapes --------------------------------------------------------------------------------------------------


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    return mint.reshape(x, tuple(shape))


def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    return mint.permute(x, tuple(dims))


def squeeze(x: Tensor, dim: int | Sequence[int]) -> Tensor:
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return mint.squeeze(x, tuple(d for d in dims if x.shape[d] == 1)) if any(x.shape[d] == 1 for d in dims) else x


def expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    extra = len(shape) - x.ndim
    target = tuple(x.shape[i - extra] if size == -1 else size for i, size in enumerate(shape))
    return mint.broadcast_to(x, target)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return mint.cat(list(tensors), dim)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    # ops.stack fails in backward on empty tensors.
    return mint.cat([mint.unsqueeze(x, dim) for x in tensors], dim)


def split(x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    return mint.split(x, list(sizes), dim)


def chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """As torch: pieces of `ceil(size / chunks)`, the last one smaller, perhaps fewer than `chunks`."""
    size = x.shape[dim]
    piece = max(1, -(-size // chunks))
    sizes = [min(piece, size - start) for start in range(0, size, piece)] or [0]
    return mint.split(x, sizes, dim)


def repeat_interleave(x: Tensor, repeats: int, dim: int) -> Tensor:
    dim %= x.ndim
    shape = x.shape
    repeated = mint.broadcast_to(mint.unsqueeze(x, dim + 1), (*shape[: dim + 1], repeats, *shape[dim + 1 :]))
    return mint.reshape(repeated, (*shape[:dim], shape[dim] * repeats, *shape[dim + 1 :]))


# Selection -----------------------------------------------------------------------------------------------


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    dim %= x.ndim
    return _pick(x, dim, index, (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]))


def _pick(x: Tensor, dim: int, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    if math.prod(shape) and x.size:
        return ops.gather(x, index, dim)
    return _nothing(x, shape)


def _nothing(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An empty result of `x`, whose gradient is zero: the kernels' own backward fails on it."""
    if math.prod(shape):
        raise IndexError(f"indices into a tensor of shape {list(x.shape)}, which holds no element")
    return custom_function(lambda t: zeros(shape, t.dtype), lambda g: [ops.zeros_like(x)], x)


def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return mint.gather(x, dim, index) if index.size and x.size else _nothing(x, tuple(index.shape))


def index_put(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    if not index.size:
        return clone(x)
    return ops.tensor_scatter_update(x, mint.unsqueeze(index, -1), values)


def topk(x: Tensor, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
    """The `k` largest, largest first; of equal ones the lower index."""
    order = np.take(_order(x, dim, True), np.arange(k), axis=dim)
    indices = share(order)
    return gather(x, dim, indices), indices


def argsort(x: Tensor, dim: int = -1, stable: bool = True, descending: bool = False) -> Tensor:
    return share(_order(x, dim, descending))


def _order(x: Tensor, dim: int, descending: bool) -> np.ndarray[Any, Any]:
    """Indices (int64) that sort along `dim`, equal elements in their order."""
    values = numbers(x)
    if not descending:
        return np.argsort(values, axis=dim, kind="stable")
    backward = np.flip(np.argsort(np.flip(values, dim), axis=dim, kind="stable"), dim)
    return values.shape[dim] - 1 - backward if values.ndim else backward


def bincount(x: Tensor, minlength: int) -> Tensor:
    return share(np.bincount(numbers(x), minlength=minlength).astype(np.int64, copy=False))


def one_hot(x: Tensor, num_classes: int) -> Tensor:
    ids = numbers(x)
    return share((ids[..., None] == np.arange(num_classes)).astype(np.int64))


CPU: dict[str, Callable[..., Any]] = {
    "zeros": zeros,
    "ones": ones,
    "full": full,
    "arange": arange,
    "zeros_like": ops.zeros_like,
    "ones_like": ops.ones_like,
    "add": add,
    "sub": sub,
    "mul": mul,
    "div": div,
    "pow": power,
    "gelu": gelu,
    "silu": F.silu,
    "relu": F.relu,
    "square": square,
    "clamp": clamp,
    "masked_fill": masked_fill,
    "cast": cast,
    "clone": clone,
    "sum": total,
    "mean": mean,
    "amax": amax,
    "amin": amin,
    "argmax": argmax,
    "logsumexp": logsumexp,
    "cumsum": cumsum,
    "matmul": matmul,
    "bmm": matmul,
    "linear": linear,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "softmax": softmax,
    "log_softmax": log_softmax,
    "rms_norm": rms_norm,
    "cross_entropy": cross_entropy,
    "embedding": embedding,
    "reshape": reshape,
    "permute": permute,
    "squeeze": squeeze,
    "expand": expand,
    "cat": cat,
    "stack": stack,
    "split": split,
    "chunk": chunk,
    "repeat_interleave": repeat_interleave,
    "index_select": index_select,
    "gather": gather,
    "index_put": index_put,
    "topk": topk,
    "argsort": argsort,
    "bincount": bincount,
    "one_hot": one_hot,
} | {
    name: getattr(mint, name)
    for name in """
        maximum minimum eq ne lt le gt ge logical_and logical_or neg exp log sqrt rsqrt abs sin cos tanh sigmoid
        isfinite logical_not where transpose unsqueeze narrow
    """.split()
}


# On Ascend the kernels exist, and a value must not go through the host --------------------------------------


def _native_topk(x: Tensor, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
    values, indices = mint.topk(x, k, dim)
    return values, indices


def _native_argsort(x: Tensor, dim: int = -1, stable: bool = True, descending: bool = False) -> Tensor:
    return mint.sort(x, dim=dim, descending=descending, stable=stable)[1]


def _native_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.rms_norm(x, weight, eps)[0]


NATIVE: dict[str, Callable[..., Any]] = CPU | {
    "full": lambda shape, value, dtype: mint.full(tuple(shape), value, dtype=dtype),
    "arange": lambda end, dtype: mint.arange(end, dtype=dtype),
    "gelu": F.gelu,
    "argmax": mint.argmax,
    "logsumexp": mint.logsumexp,
    "cumsum": mint.cumsum,
    "log_softmax": F.log_softmax,
    "rms_norm": _native_rms_norm,
    "cross_entropy": lambda logits, targets, reduction="mean": F.cross_entropy(logits, targets, reduction=reduction),
    "embedding": F.embedding,
    "stack": lambda tensors, dim=0: mint.stack(list(tensors), dim),
    "index_select": mint.index_select,
    "topk": _native_topk,
    "argsort": _native_argsort,
    "bincount": lambda x, minlength: mint.bincount(x, minlength=minlength),
    "one_hot": F.one_hot,
}
