"""The operations that hp-dtensor cannot compose, on plain tensors. Each gradient is written beside its value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hp_platform_numpy.tape import Node, is_recording
from hp_platform_numpy.tensor import FLOATING, Array, Tensor

Number = int | float | bool
Operand = Tensor | Number
Link = tuple[Tensor, Callable[[Array], Array]]
"""A parent and how the gradient of the result becomes its own."""


def record(data: Any, dtype: str, *links: Link) -> Tensor:
    """Make a result, and record it in the tape where a floating parent needs a gradient."""
    made = Tensor(data, dtype)
    wanted = [(parent, vjp) for parent, vjp in links if parent.requires_grad]
    if wanted and is_recording() and dtype in FLOATING:
        made.node = Node([p for p, _ in wanted], lambda g: [np.asarray(vjp(g[0])) for _, vjp in wanted])
        made.requires_grad = True
    return made


def _data(x: Operand) -> Any:
    return x.data if isinstance(x, Tensor) else x


def _kind(x: Operand) -> int:
    dtype = x.dtype if isinstance(x, Tensor) else type(x).__name__
    return 2 if "float" in dtype else 0 if dtype == "bool" else 1


def _common(*operands: Operand) -> str:
    """Return the dtype of a result, as torch promotes: of tensors with dimensions, else of others, else of numbers.

    Operands of a lower kind (booleans, integers, floats) than the highest do not count.
    """
    highest = max(map(_kind, operands))
    tensors = [x for x in operands if isinstance(x, Tensor) and _kind(x) == highest]
    found = {x.dtype for x in tensors if x.data.ndim} or {x.dtype for x in tensors}
    if len(found) == 1:
        return found.pop()
    if not found:
        return ("bool", "int64", "float32")[highest]
    return np.result_type(*("float32" if dtype == "bfloat16" else dtype for dtype in found)).name


def _float(x: Tensor) -> str:
    return x.dtype if x.dtype in FLOATING else "float32"


def _sum_to(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Undo broadcasting."""
    extra = gradient.ndim - len(shape)
    axes = (*range(extra), *(i + extra for i, n in enumerate(shape) if n == 1 and gradient.shape[i + extra] != 1))
    return gradient.sum(axes).reshape(shape)


def _axis(x: Tensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    if dim is None or dim == ():
        return tuple(range(x.data.ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % x.data.ndim for d in dims)


# Creation ------------------------------------------------------------------------------------------------


def full(shape: Sequence[int], value: Number, dtype: str) -> Tensor:
    return Tensor(np.full(tuple(shape), value), dtype)


def arange(end: int, dtype: str) -> Tensor:
    return Tensor(np.arange(end), dtype)


# Pointwise -----------------------------------------------------------------------------------------------


def _binary(
    value: Callable[[Any, Any], Array],
    left: Callable[[Array, Any, Any, Array], Array],
    right: Callable[[Array, Any, Any, Array], Array],
    result_dtype: Callable[[Operand, Operand], str] = _common,
) -> Callable[[Operand, Operand], Tensor]:
    """`left` and `right` give the operands' gradients from (gradient, x, y, result)."""

    def operation(x: Operand, y: Operand) -> Tensor:
        a, b, dtype = _data(x), _data(y), result_dtype(x, y)
        result = np.asarray(value(a, b))
        links: list[Link] = []
        if isinstance(x, Tensor):
            links.append((x, lambda g: _sum_to(np.asarray(left(g, a, b, result)), a.shape)))
        if isinstance(y, Tensor):
            links.append((y, lambda g: _sum_to(np.asarray(right(g, a, b, result)), b.shape)))
        return record(result, dtype, *links)

    return operation


def _share(wins: Array, ties: Array) -> Array:
    return wins + 0.5 * ties


add = _binary(np.add, lambda g, x, y, r: g, lambda g, x, y, r: g)
mul = _binary(np.multiply, lambda g, x, y, r: g * y, lambda g, x, y, r: g * x)
div = _binary(
    np.divide,
    lambda g, x, y, r: g / y,
    lambda g, x, y, r: -g * r / y,
    lambda x, y: _common(x, y) if max(_kind(x), _kind(y)) == 2 else "float32",
)
pow_ = _binary(np.power, lambda g, x, y, r: g * y * np.power(x, y - 1), lambda g, x, y, r: g * r * np.log(x))
maximum = _binary(
    np.maximum, lambda g, x, y, r: g * _share(x > y, x == y), lambda g, x, y, r: g * _share(y > x, x == y)
)


def _to_bool(value: Callable[..., Array]) -> Callable[..., Tensor]:
    return lambda *operands: Tensor(value(*map(_data, operands)), "bool")


def _unary(value: Callable[[Array], Array], slope: Callable[[Array, Array], Array]) -> Callable[[Tensor], Tensor]:
    """`slope(x, result)` is the derivative."""

    def operation(x: Tensor) -> Tensor:
        result = np.asarray(value(x.data))
        return record(result, _float(x), (x, lambda g: g * slope(x.data, result)))

    return operation


_erf = np.vectorize(math.erf, otypes=[np.float64])
_phi = math.sqrt(0.5)


def _gelu_slope(x: Array, result: Array) -> Array:
    return 0.5 * (1 + _erf(x * _phi)) + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


exp = _unary(np.exp, lambda x, r: r)
log = _unary(np.log, lambda x, r: 1 / x)
sqrt = _unary(np.sqrt, lambda x, r: 0.5 / r)
sin = _unary(np.sin, lambda x, r: np.cos(x))
cos = _unary(np.cos, lambda x, r: -np.sin(x))
tanh = _unary(np.tanh, lambda x, r: 1 - r**2)
gelu = _unary(lambda x: x * 0.5 * (1 + _erf(x * _phi)), _gelu_slope)


def clone(x: Tensor) -> Tensor:
    return record(x.data.copy(), x.dtype, (x, lambda g: g))


def where(condition: Tensor, x: Operand, y: Operand) -> Tensor:
    a, b, chosen = _data(x), _data(y), condition.data
    links: list[Link] = []
    if isinstance(x, Tensor):
        links.append((x, lambda g: _sum_to(np.where(chosen, g, 0), a.shape)))
    if isinstance(y, Tensor):
        links.append((y, lambda g: _sum_to(np.where(chosen, 0, g), b.shape)))
    return record(np.where(chosen, a, b), _common(x, y), *links)


def cast(x: Tensor, dtype: str) -> Tensor:
    return record(x.data.astype("float32" if dtype == "bfloat16" else dtype), dtype, (x, lambda g: g))


# Reductions ----------------------------------------------------------------------------------------------


def sum_(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    axes, shape = _axis(x, dim), x.data.shape
    dtype = x.dtype if x.dtype in FLOATING else "int64"
    result = x.data.sum(axes, keepdims=True)
    saved = result.shape
    spread = lambda g: np.broadcast_to(g.reshape(saved), shape)  # noqa: E731
    return record(result if keepdim else result.squeeze(axes), dtype, (x, spread))


def amax(x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    axes = _axis(x, dim)
    result = x.data.max(axes, keepdims=True)
    hits = x.data == result
    spread = lambda g: g.reshape(result.shape) * hits / hits.sum(axes, keepdims=True)  # noqa: E731
    return record(result if keepdim else result.squeeze(axes), x.dtype, (x, spread))


def cumsum(x: Tensor, dim: int) -> Tensor:
    dtype = x.dtype if x.dtype in FLOATING else "int64"
    return record(x.data.cumsum(dim), dtype, (x, lambda g: np.flip(np.flip(g, dim).cumsum(dim), dim)))


# Products ------------------------------------------------------------------------------------------------


def matmul(x: Tensor, y: Tensor) -> Tensor:
    a, b = x.data, y.data
    if b.ndim == 1:
        product = matmul(x, reshape(y, (-1, 1)))
        return reshape(product, product.data.shape[:-1])
    if a.ndim == 1:
        product = matmul(reshape(x, (1, -1)), y)
        return reshape(product, (*product.data.shape[:-2], product.data.shape[-1]))
    return record(
        a @ b,
        _common(x, y),
        (x, lambda g: _sum_to(g @ b.swapaxes(-1, -2), a.shape)),
        (y, lambda g: _sum_to(a.swapaxes(-1, -2) @ g, b.shape)),
    )


# Shapes --------------------------------------------------------------------------------------------------


def _view(x: Tensor, result: Array, back: Callable[[Array], Array]) -> Tensor:
    return record(result, x.dtype, (x, back))


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    return _view(x, x.data.reshape(tuple(shape)), lambda g: g.reshape(x.data.shape))


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    return _view(x, x.data.swapaxes(dim0, dim1), lambda g: g.swapaxes(dim0, dim1))


def expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    extra = len(shape) - x.data.ndim
    wanted = tuple(x.data.shape[i - extra] if n == -1 else n for i, n in enumerate(shape))
    return _view(x, np.broadcast_to(x.data, wanted), lambda g: _sum_to(g, x.data.shape))


def cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    stops = np.cumsum([x.data.shape[dim] for x in tensors])[:-1]
    links = [(x, lambda g, i=i: np.split(g, stops, dim)[i]) for i, x in enumerate(tensors)]
    return record(np.concatenate([x.data for x in tensors], dim), _common(*tensors), *links)


def narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    where = [slice(None)] * x.data.ndim
    where[dim] = slice(start, start + length)
    return getitem(x, tuple(where))


# Selection -----------------------------------------------------------------------------------------------


def getitem(x: Tensor, index: Any) -> Tensor:
    where = tuple(map(_data, index)) if isinstance(index, tuple) else _data(index)

    def back(g: Array) -> Array:
        unsharded = np.zeros(x.data.shape, g.dtype)
        np.add.at(unsharded, where, g)
        return unsharded

    return _view(x, x.data[where], back)


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return getitem(x, (*(slice(None),) * (dim % x.data.ndim), index))


def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    where = list(np.indices(index.data.shape, sparse=True))
    where[dim] = index.data
    return getitem(x, tuple(where))


def index_put(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    rows = index.data
    result = x.data.copy()
    result[rows] = values.data

    def rest(g: Array) -> Array:
        saved = g.copy()
        saved[rows] = 0
        return saved

    return record(result, x.dtype, (x, rest), (values, lambda g: g[rows]))


def argsort(x: Tensor, dim: int, stable: bool = True, descending: bool = False) -> Tensor:
    if not descending:
        return Tensor(np.argsort(x.data, dim, kind="stable"), "int64")
    # Backwards twice, so that equal elements stay in order. The negative of some integers overflows.
    backwards = np.argsort(np.flip(x.data, dim), dim, kind="stable")
    return Tensor(np.flip(x.data.shape[dim] - 1 - backwards, dim), "int64")


KERNELS: dict[str, Callable[..., Any]] = {
    "full": full,
    "arange": arange,
    "add": add,
    "mul": mul,
    "div": div,
    "maximum": maximum,
    "pow": pow_,
    "eq": _to_bool(np.equal),
    "lt": _to_bool(np.less),
    "logical_and": _to_bool(np.logical_and),
    "logical_not": _to_bool(np.logical_not),
    "exp": exp,
    "log": log,
    "sqrt": sqrt,
    "sin": sin,
    "cos": cos,
    "tanh": tanh,
    "gelu": gelu,
    "where": where,
    "cast": cast,
    "clone": clone,
    "sum": sum_,
    "amax": amax,
    "cumsum": cumsum,
    "matmul": matmul,
    "reshape": reshape,
    "transpose": transpose,
    "expand": expand,
    "cat": cat,
    "narrow": narrow,
    "index_select": index_select,
    "gather": gather,
    "index_put": index_put,
    "argsort": argsort,
    # Not one of `OP_NAMES`: `x[...]` of users, and of the samples of the conformance suite.
    "getitem": getitem,
}
