"""Einstein sums, for which the CPU has no kernel, as products of matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint

from hp_platform_mindspore.cpu_kernels import indexing, products, reductions
from hp_platform_mindspore.tensor.memory import share


def einsum(equation: str, *operands: Any) -> Tensor:
    """Compute an Einstein sum as `torch.einsum`: any number of operands, multiplied from left to right."""
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    terms, result = _letters(equation, [x.ndim for x in tensors])
    named = [_diagonals(x, term) for x, term in zip(tensors, terms, strict=True)]
    while len(named) > 1:
        (x, first), (y, second), *rest = named
        later = {*result, *(letter for _, term in rest for letter in term)}
        named = [_product(x, first, y, second, later), *rest]
    x, names = named[0]
    x, names = _summed(x, names, set(result))
    return mint.permute(x, tuple(names.index(letter) for letter in result)) if names else x


def _letters(equation: str, ndims: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Return the names of every operand's dimensions and of the result's.

    Dimensions that `...` stands for are named `.1`, `.2`, ... from the last, as broadcasting lines them up.
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
    kept = list(dict.fromkeys(names))
    if len(kept) == len(names):
        return x, kept
    shape = [x.shape[names.index(name)] for name in kept]
    grids = np.indices(shape)
    places = np.ravel_multi_index([grids[kept.index(name)] for name in names], x.shape)
    return indexing.index_select(mint.reshape(x, (-1,)), 0, share(places)), kept


def _summed(x: Tensor, names: list[str], needed: set[str]) -> tuple[Tensor, list[str]]:
    """Sum over the dimensions that neither the result nor another operand has."""
    gone = tuple(i for i, name in enumerate(names) if name not in needed)
    return (reductions.total(x, gone) if gone else x), [name for name in names if name in needed]


def _product(x: Tensor, first: list[str], y: Tensor, second: list[str], later: set[str]) -> tuple[Tensor, list[str]]:
    """Multiply two operands as a batch of matrices; a dimension of one element is broadcast."""
    x, first = _without_broadcast(x, first, y, second)
    y, second = _without_broadcast(y, second, x, first)
    x, first = _summed(x, first, later | set(second))
    y, second = _summed(y, second, later | set(first))
    both = [name for name in first if name in second]
    batch = [name for name in both if name in later]
    inner = [name for name in both if name not in later]
    rows = [name for name in first if name not in second]
    columns = [name for name in second if name not in first]
    sizes = dict(zip(second, y.shape, strict=True)) | dict(zip(first, x.shape, strict=True))
    left = _matrices(x, first, batch, rows, inner, sizes)
    right = _matrices(y, second, batch, inner, columns, sizes)
    names = [*batch, *rows, *columns]
    return mint.reshape(products.matmul(left, right), tuple(sizes[name] for name in names)), names


def _without_broadcast(x: Tensor, names: list[str], y: Tensor, others: list[str]) -> tuple[Tensor, list[str]]:
    """Drop the dimensions of one element of which `y` has more: the product broadcasts them."""
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
    "einsum": einsum,
}
