"""Matrix products, and what is computed as one: linear layers, attention, distances, Einstein sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint

from hp_platform_mindspore.ops.cpu_kernels import pointwise, reductions, shapes
from hp_platform_mindspore.ops.cpu_kernels.empty import filled, is_empty, marked_as_saving
from hp_platform_mindspore.tensor.memory import share

F = mint.nn.functional


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply vectors, matrices or broadcast batches of matrices, as `torch.matmul`.

    MindSpore's gradient of products other than those of two matrices, or of two equal batches of them, fails if sizes
    are 1, and has the wrong shape if an operand is a vector; so every product is converted to one of these two.
    """
    if is_empty(x, y):
        return marked_as_saving(filled(0, _product_shape(x.shape, y.shape), x, y))
    if x.ndim == 1:
        return mint.squeeze(matmul(mint.unsqueeze(x, 0), y), -1 if y.ndim == 1 else -2)
    if y.ndim == 1:
        return mint.squeeze(matmul(x, mint.unsqueeze(y, 1)), -1)
    if x.ndim == y.ndim == 2:
        return mint.matmul(x, y)
    if y.ndim == 2:
        # A matrix for all batches is one product of two matrices, instead of one per batch.
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
        product = marked_as_saving(filled(0, (*x.shape[:-1], weight.shape[0]), x, weight))
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
    """Compute the distances of all rows of `x` from all rows of `y`; `compute_mode` is ignored."""
    if is_empty(x, y):  # the kernel's backward leaves the gradient of the non-empty operand unwritten
        batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        return marked_as_saving(filled(0, (*batch, x.shape[-2], y.shape[-2]), x, y))
    return mint.cdist(x, y, p)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    """Attend over `[batch, heads, length, width]`; with `enable_gqa` a key head serves several query heads."""
    if enable_gqa and key.shape[1] and query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = shapes.repeat_interleave(key, repeats, 1), shapes.repeat_interleave(value, repeats, 1)
    # A width of 0 would divide by zero; the scores are empty then.
    scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    scores = matmul(query * scale, mint.transpose(key, -2, -1))
    if is_causal:
        scores = pointwise.masked_fill(scores, _future(query.shape[-2], key.shape[-2]), float("-inf"))
    return matmul(F.softmax(scores, -1), value)


def _future(queries: int, keys: int) -> Tensor:
    """Return the mask `[queries, keys]` that is True for keys after the query's position."""
    return share(np.triu(np.ones((queries, keys), np.bool_), 1))


def einsum(equation: str, *operands: Any) -> Tensor:
    """Compute an Einstein sum as `torch.einsum`: any number of operands, multiplied from left to right."""
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    # Each operand is reduced to distinct names first; then pairs are multiplied as batches of matrices.
    terms, result = _letters(equation, [x.ndim for x in tensors])
    named = [_diagonals(x, term) for x, term in zip(tensors, terms, strict=True)]
    while len(named) > 1:
        (x, first), (y, second), *rest = named
        # Dimensions that no later operand and not the result need are summed in the product.
        later = {*result, *(letter for _, term in rest for letter in term)}
        named = [_product(x, first, y, second, later), *rest]
    x, names = named[0]
    x, names = _summed(x, names, set(result))
    return mint.permute(x, tuple(names.index(letter) for letter in result)) if names else x


def _letters(equation: str, ndims: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Return the names of every operand's dimensions and of the result's.

    Dimensions covered by `...` are named `.1`, `.2`, ... from the last, because broadcasting aligns them at the end.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ndims):
        raise ValueError(f"einsum: equation {equation!r} does not fit its {len(ndims)} operands")
    extra = max(ndim - len(term.replace("...", "")) for term, ndim in zip(terms, ndims, strict=True))
    if not arrow:
        once = sorted(letter for letter in set(left) if letter.isalpha() and left.count(letter) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    ends = len(right.replace("...", "")) + (extra if "..." in right else 0)
    return [_names(term, ndim) for term, ndim in zip(terms, ndims, strict=True)], _names(right, ends)


def _names(term: str, ndim: int) -> list[str]:
    before, dots, after = term.partition("...")
    between = ndim - len(before) - len(after) if dots else 0
    names = [*before, *(f".{i}" for i in range(between, 0, -1)), *after]
    if len(names) != ndim:
        raise ValueError(f"einsum: {term!r} does not fit an operand of {ndim} dimensions")
    return names


def _diagonals(x: Tensor, names: list[str]) -> tuple[Tensor, list[str]]:
    """Take diagonals until every name occurs once."""
    distinct = list(dict.fromkeys(names))
    if len(distinct) == len(names):
        return x, distinct
    shape = [x.shape[names.index(name)] for name in distinct]
    # Flat indices of the elements whose equally named coordinates agree.
    grids = np.indices(shape)
    indices = np.ravel_multi_index([grids[distinct.index(name)] for name in names], x.shape)
    return shapes.index_select(mint.reshape(x, (-1,)), 0, share(indices)), distinct


def _summed(x: Tensor, names: list[str], needed: set[str]) -> tuple[Tensor, list[str]]:
    """Sum over the dimensions that neither the result nor another operand has."""
    summed = tuple(i for i, name in enumerate(names) if name not in needed)
    return (reductions.total(x, summed) if summed else x), [name for name in names if name in needed]


def _product(x: Tensor, first: list[str], y: Tensor, second: list[str], later: set[str]) -> tuple[Tensor, list[str]]:
    """Multiply two operands as a batch of matrices; a dimension of one element is broadcast."""
    x, first = _without_broadcast(x, first, y, second)
    y, second = _without_broadcast(y, second, x, first)
    x, first = _summed(x, first, later | set(second))
    y, second = _summed(y, second, later | set(first))
    # Shared names are batch dimensions if needed later, else contracted.
    both = [name for name in first if name in second]
    batch = [name for name in both if name in later]
    inner = [name for name in both if name not in later]
    rows = [name for name in first if name not in second]
    columns = [name for name in second if name not in first]
    sizes = dict(zip(second, y.shape, strict=True)) | dict(zip(first, x.shape, strict=True))
    left = _matrices(x, first, batch, rows, inner, sizes)
    right = _matrices(y, second, batch, inner, columns, sizes)
    names = [*batch, *rows, *columns]
    return mint.reshape(matmul(left, right), tuple(sizes[name] for name in names)), names


def _without_broadcast(x: Tensor, names: list[str], y: Tensor, others: list[str]) -> tuple[Tensor, list[str]]:
    """Drop dimensions of one element that are larger in `y`: the product broadcasts them."""
    single = tuple(
        i for i, name in enumerate(names) if x.shape[i] == 1 and name in others and y.shape[others.index(name)] != 1
    )
    return (mint.squeeze(x, single) if single else x), [name for i, name in enumerate(names) if i not in single]


def _matrices(
    x: Tensor, names: list[str], batch: list[str], rows: list[str], columns: list[str], sizes: dict[str, int]
) -> Tensor:
    ordered = mint.permute(x, tuple(names.index(name) for name in (*batch, *rows, *columns))) if names else x
    return mint.reshape(ordered, tuple(math.prod(sizes[name] for name in group) for group in (batch, rows, columns)))


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
    "einsum": einsum,
}
