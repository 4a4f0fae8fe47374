"""The operations of `hp_dtensor.platform.ops` on plain tensors, from kernels that the CPU has, forward and backward.

Where an operation of torch has no kernel, or one that fails on an empty tensor, it is composed here. Indices
come from NumPy on the host: they have no gradient, and its order of ties is defined.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hp_platform_mindspore.cpu_kernels.empty import filled, is_empty, nothing, result_dtype, with_zero_gradient_if_empty
from hp_platform_mindspore.tensor.autograd import custom_function, is_recording
from hp_platform_mindspore.tensor.memory import HOST_DTYPES, encode, numbers, share

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


@with_zero_gradient_if_empty
def add(x: Any, y: Any) -> Tensor:
    return x + y


@with_zero_gradient_if_empty
def sub(x: Any, y: Any) -> Tensor:
    return x - y


@with_zero_gradient_if_empty
def mul(x: Any, y: Any) -> Tensor:
    return x * y


@with_zero_gradient_if_empty
def div(x: Any, y: Any, rounding_mode: str | None = None) -> Tensor:
    return x / y if rounding_mode is None else x // y if rounding_mode == "floor" else mint.trunc(x / y)


@with_zero_gradient_if_empty
def power(x: Any, y: Any) -> Tensor:
    return x**y


def maximum(x: Any, y: Any) -> Tensor:
    return _of_nothing(mint.maximum, x, y) if is_empty(x, y) else mint.maximum(x, y)


def minimum(x: Any, y: Any) -> Tensor:
    return _of_nothing(mint.minimum, x, y) if is_empty(x, y) else mint.minimum(x, y)


def _of_nothing(kernel: Callable[..., Any], x: Any, y: Any) -> Tensor:
    """Empty, of the operands' common shape."""
    operands = [t for t in (x, y) if isinstance(t, Tensor)]
    shape = np.broadcast_shapes(*(t.shape for t in operands))
    return filled(0, shape, *operands, dtype=result_dtype(kernel, x, y))


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return ops.gelu(x, approximate)


def square(x: Tensor) -> Tensor:
    return x * x


@with_zero_gradient_if_empty
def clamp(x: Tensor, min: Number | None = None, max: Number | None = None) -> Tensor:
    return mul(x, 1) if is_empty(x) else mint.clamp(x, min, max)


@with_zero_gradient_if_empty
def masked_fill(x: Tensor, mask: Tensor, value: Number) -> Tensor:
    return x.masked_fill(mask, value)


def cast(x: Tensor, dtype: Any) -> Tensor:
    return x if x.dtype == dtype else x.astype(dtype)


def clone(x: Tensor) -> Tensor:
    return mint.logical_or(x, x) if x.dtype == ms.bool_ else mint.mul(x, 1)


# Reductions ----------------------------------------------------------------------------------------------


def total(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    if is_empty(x):
        return filled(0, _reduced_shape(x, dim, keepdim), x, dtype=result_dtype(mint.sum, x))
    return mint.sum(x, dim=_all_dims(x, dim), keepdim=keepdim)


def mean(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    if is_empty(x):
        return filled(math.nan, _reduced_shape(x, dim, keepdim), x, dtype=result_dtype(mint.mean, x))
    return mint.mean(x, dim=_all_dims(x, dim), keepdim=keepdim)


def _reduced_shape(x: Tensor, dim: Dims, keepdim: bool) -> tuple[int, ...]:
    dims = _all_dims(x, dim)
    gone = {d % x.ndim for d in ((dims,) if isinstance(dims, int) else dims)}
    return tuple(1 if i in gone else size for i, size in enumerate(x.shape) if keepdim or i not in gone)


def _all_dims(x: Tensor, dim: Dims) -> int | tuple[int, ...]:
    if dim is None:
        return tuple(range(x.ndim))
    return dim if isinstance(dim, int) else tuple(dim)


def amax(x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    return mint.amax(x, dim if isinstance(dim, int) else tuple(dim), keepdim)


def amin(x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    return mint.amin(x, dim if isinstance(dim, int) else tuple(dim), keepdim)


def argmax(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return share(np.asarray(np.argmax(numbers(x), axis=dim, keepdims=keepdim), np.int64))


def logsumexp(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    if is_empty(x):
        return filled(-math.inf, _reduced_shape(x, dim, keepdim), x)
    return ops.logsumexp(x, dim, keepdim)


def cumsum(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    x = x if dtype is None else cast(x, dtype)
    return ops.cumsum(x, dim) if x.size else clone(x)


# Products ------------------------------------------------------------------------------------------------


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """As matrices or batches of matrices of equal shape: MindSpore's gradient of other products fails where sizes are
    1, and has other shapes than its operands where one is a vector.
    """
    if is_empty(x, y):
        return filled(0, _product_shape(x.shape, y.shape), x, y)
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
    """`x` broadcast to a batch of matrices, with one batch dimension."""
    return mint.reshape(expand(x, (*batch, *x.shape[-2:])), (-1, *x.shape[-2:]))


def _product_shape(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[int, ...]:
    batch = np.broadcast_shapes(x[:-2], y[:-2])
    return (*batch, *(x[-2:-1] if len(x) > 1 else ()), *(y[-1:] if len(y) > 1 else ()))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if is_empty(x, weight):
        product = filled(0, (*x.shape[:-1], weight.shape[0]), x, weight)
        return product if bias is None else add(product, bias)
    return F.linear(x, weight, bias)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    """Attention over `[batch, heads, length, width]`; with `enable_gqa` a key head serves several query heads."""
    if enable_gqa and key.shape[1] and query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = repeat_interleave(key, repeats, 1), repeat_interleave(value, repeats, 1)
    scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    scores = matmul(query * scale, mint.transpose(key, -2, -1))
    if is_causal:
        scores = masked_fill(scores, _future(query.shape[-2], key.shape[-2]), float("-inf"))
    return matmul(F.softmax(scores, -1), value)


def _future(queries: int, keys: int) -> Tensor:
    """True where a query must not look: at keys after its own position."""
    return share(np.triu(np.ones((queries, keys), np.bool_), 1))


# Normalization, losses, tables ---------------------------------------------------------------------------


def softmax(x: Tensor, dim: int) -> Tensor:
    if dim % max(x.ndim, 1) == x.ndim - 1:
        return F.softmax(x, dim)
    # Along another dimension the CPU's gradient is wrong for some shapes, [7, 1] among them.
    return mint.transpose(F.softmax(mint.transpose(x, dim, -1), -1), dim, -1)


def log_softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    x = x if dtype is None else cast(x, dtype)
    return ops.log_softmax(x, dim)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, computed in float32."""
    wide = x.astype(ms.float32) if x.dtype in LOW_PRECISION else x
    normalized = mul(wide, mint.rsqrt(mean(wide * wide, -1, keepdim=True) + eps))
    return mul(cast(normalized, x.dtype), weight)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Of classes, or of probabilities, which have the shape of the logits."""
    likelihood = log_softmax(logits, 1)
    if targets.ndim == logits.ndim:
        losses = -total(mul(likelihood, targets), 1)
    else:
        losses = -mint.squeeze(gather(likelihood, 1, mint.unsqueeze(cast(targets, ms.int64), 1)), 1)
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
    return mint.broadcast_to(x, target) if math.prod(target) else filled(0, target, x)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    if all(map(is_empty, tensors)):
        # mint.cat leaves out empty tensors, and here their lengths with them.
        shape = list(tensors[0].shape)
        shape[dim] = sum(x.shape[dim] for x in tensors)
        return filled(0, shape, *tensors)
    return mint.cat(list(tensors), dim)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    # ops.stack fails in backward on empty tensors.
    return cat([mint.unsqueeze(x, dim) for x in tensors], dim)


def split(x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    # The gradient of mint.split is wrong where that of a piece is a view, as that of cat's operands is.
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(mint.narrow(x, dim, start, size) for start, size in zip(starts, sizes, strict=False))


def chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """As torch: pieces of `ceil(size / chunks)`, the last smaller, perhaps fewer; `chunks` empty ones of nothing."""
    size = x.shape[dim]
    piece = max(1, -(-size // chunks))
    sizes = [min(piece, size - start) for start in range(0, size, piece)] or [0] * chunks
    return split(x, sizes, dim)


def repeat_interleave(x: Tensor, repeats: int, dim: int) -> Tensor:
    dim %= x.ndim
    shape = x.shape
    repeated = expand(mint.unsqueeze(x, dim + 1), (*shape[: dim + 1], repeats, *shape[dim + 1 :]))
    return mint.reshape(repeated, (*shape[:dim], shape[dim] * repeats, *shape[dim + 1 :]))


# Selection -----------------------------------------------------------------------------------------------


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    dim %= x.ndim
    return _pick(x, dim, index, (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]))


def _pick(x: Tensor, dim: int, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    if math.prod(shape) and x.size:
        return ops.gather(x, index, dim)
    return nothing(x, shape)


def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return mint.gather(x, dim, index) if index.size and x.size else nothing(x, tuple(index.shape))


def getitem(x: Tensor, index: Any) -> Tensor:
    """Basic indexing."""
    shape = np.broadcast_to(np.int8(0), x.shape)[index].shape
    if not math.prod(shape):
        return nothing(x, shape)
    if is_recording(x):
        x, index = _without_steps(x, index)
    return x[index]


def _without_steps(x: Tensor, index: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """What slices with a step pick, and the rest of the index: the CPU's gradient fails for `x[:, ::2]`."""
    items = index if isinstance(index, tuple) else (index,)
    dim, rest = 0, []
    for item in items:
        if item is Ellipsis:
            dim += x.ndim - sum(other is not None and other is not Ellipsis for other in items)
        elif item is not None:
            if isinstance(item, slice) and item.step not in (None, 1):
                x = index_select(x, dim, share(np.arange(*item.indices(x.shape[dim]))))
                item = slice(None)
            dim += 1
        rest.append(item)
    return x, tuple(rest)


def index_put(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    if is_empty(index, x):
        return custom_function(lambda t, v: clone(t), lambda g: [g, ops.zeros_like(values)], x, values)
    return ops.tensor_scatter_update(x, mint.unsqueeze(index, -1), values)


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """The `k` largest (or smallest), these first; of equal ones the lower index."""
    order = np.take(_order(x, dim, largest), np.arange(k), axis=dim)
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
    "maximum": maximum,
    "minimum": minimum,
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
        eq ne lt le gt ge logical_and logical_or neg exp log sqrt rsqrt abs sin cos tanh sigmoid isfinite
        logical_not transpose unsqueeze narrow
    """.split()
}
CPU |= {"where": with_zero_gradient_if_empty(mint.where)}


# On Ascend the kernels exist, and a value must not go through the host --------------------------------------


def _native_topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    values, indices = mint.topk(x, k, dim, largest, sorted)
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
