"""The operations that cannot be composed, and those that Paddle has faster, on plain tensors, recorded by Paddle.

The names and argument orders are those of `hp_dtensor.platform.interface.OP_SIGNATURES`. Many of Paddle's CPU kernels
lack small dtypes: half precision is computed in float32 and rounded, small integers in int64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle

from hp_platform_paddle.autograd import custom_function

Tensor = paddle.Tensor
Number = int | float | bool
Operand = Tensor | Number

HALF = (paddle.float16, paddle.bfloat16)
FLOATING = (paddle.float64, paddle.float32, *HALF)
SMALL_INTEGERS = (paddle.int16, paddle.int8, paddle.uint8)
_getitem = Tensor.__getitem__
# From narrow to wide, as tensors of two dtypes are promoted.
_ORDER = (paddle.uint8, paddle.int8, paddle.int16, paddle.int32, paddle.int64)


def widened(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func`, whose first argument is a tensor or a list of tensors, computed in a dtype that has a kernel."""

    @functools.wraps(func)
    def operation(x: Any, *args: Any) -> Any:
        dtype = x.dtype
        wide = _wide(dtype)
        return func(x, *args) if wide == dtype else func(x.cast(wide), *args).cast(dtype)

    return operation


def _wide(dtype: Any) -> Any:
    return paddle.float32 if dtype in HALF else paddle.int64 if dtype in SMALL_INTEGERS else dtype


def _kind(x: Operand) -> int:
    if not isinstance(x, Tensor):
        return 0 if isinstance(x, bool) else 1 if isinstance(x, int) else 2
    return 2 if x.dtype in FLOATING else 0 if x.dtype == paddle.bool else 1


def _common(x: Operand, y: Operand) -> Any:
    """Return the dtype of a result, as torch promotes: of tensors with dimensions, else of others, else of numbers.

    An operand of a lower kind (booleans, integers, floats) than the other does not count.
    """
    highest = max(_kind(x), _kind(y))
    tensors = [each for each in (x, y) if isinstance(each, Tensor) and _kind(each) == highest]
    found = {each.dtype for each in tensors if each.ndim} or {each.dtype for each in tensors}
    if len(found) == 1:
        return found.pop()
    if not found:
        return (paddle.bool, paddle.int64, paddle.float32)[highest]
    if highest == 2:
        return paddle.float64 if paddle.float64 in found else paddle.float32
    return paddle.int16 if found == {paddle.int8, paddle.uint8} else max(found, key=_ORDER.index)


def _operands(x: Operand, y: Operand, dtype: Any) -> tuple[Tensor, Tensor]:
    return tuple(each.cast(dtype) if isinstance(each, Tensor) else paddle.full([], each, dtype) for each in (x, y))  # type: ignore[return-value]


def _binary(func: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Operand, Operand], Tensor]:
    def operation(x: Operand, y: Operand) -> Tensor:
        dtype = _common(x, y)
        return func(*_operands(x, y, _wide(dtype))).cast(dtype)

    return operation


def _comparison(func: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Operand, Operand], Tensor]:
    return lambda x, y: func(*_operands(x, y, _wide(_common(x, y))))


def div(x: Operand, y: Operand) -> Tensor:
    dtype = _common(x, y)
    dtype = dtype if dtype in FLOATING else paddle.float32
    return paddle.divide(*_operands(x, y, _wide(dtype))).cast(dtype)


def where(condition: Tensor, x: Operand, y: Operand) -> Tensor:
    dtype = _common(x, y)
    a, b = _operands(x, y, _wide(dtype))
    # Paddle's `where` takes operands of equal shapes only to be differentiable in each.
    return paddle.where(condition, a, b).cast(dtype)


# Creation ------------------------------------------------------------------------------------------------


def full(shape: Sequence[int], value: Number, dtype: Any) -> Tensor:
    return paddle.full(list(shape), value, dtype)


def arange(end: int, dtype: Any) -> Tensor:
    return paddle.arange(end, dtype="int64").cast(dtype)


# Reductions ----------------------------------------------------------------------------------------------


def sum_(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    dtype = x.dtype if x.dtype in FLOATING else paddle.int64
    if dim is not None and not isinstance(dim, int) and not dim:
        dim = None
    wide = x.cast(_wide(dtype))
    return paddle.sum(wide, axis=list(dim) if isinstance(dim, tuple) else dim, keepdim=keepdim).cast(dtype)


def amax(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    return paddle.amax(x, axis=list(dim) if isinstance(dim, tuple) else dim, keepdim=keepdim)


def cumsum(x: Tensor, dim: int) -> Tensor:
    dtype = x.dtype if x.dtype in FLOATING else paddle.int64
    return paddle.cumsum(x.cast(_wide(dtype)), axis=dim).cast(dtype)


# Products ------------------------------------------------------------------------------------------------


def matmul(x: Tensor, y: Tensor) -> Tensor:
    dtype = _common(x, y)
    return paddle.matmul(*_operands(x, y, _wide(dtype))).cast(dtype)


# Shapes --------------------------------------------------------------------------------------------------


def same(x: Tensor) -> Tensor:
    """Return the values of `x` as the result of one operation, as where the shape changes.

    Paddle would return `x` itself. Shapes differ between ranks, and nodes of the graph must not: backward visits them
    in the order of their distance from the loss, and some communicate.
    """
    return x.reshape(x.shape) if 0 not in x.shape else x.clone()


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return paddle.transpose(x, order)


def expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    extra = len(shape) - x.ndim
    wanted = [x.shape[i - extra] if n == -1 else n for i, n in enumerate(shape)]
    return same(x) if wanted == list(x.shape) else paddle.expand(x, wanted)


def cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return paddle.concat(list(tensors), axis=dim)


def narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    if length == x.shape[dim]:
        return same(x)
    where: list[Any] = [slice(None)] * x.ndim
    where[dim] = slice(start, start + length)
    return x[tuple(where)]


def getitem(x: Tensor, index: Any) -> Tensor:
    """Return `x[index]`, first its slices and new dimensions, then its tensors.

    Paddle's gradient of both at once, as in `x[1:, None, rows]`, writes beyond its memory.
    """
    listed = [
        paddle.to_tensor(each) if isinstance(each, (list, np.ndarray)) else each
        for each in (index if isinstance(index, tuple) else (index,))
    ]
    known = all(each is None or each is Ellipsis or isinstance(each, (int, slice, Tensor)) for each in listed)
    if not known or not any(isinstance(each, Tensor) for each in listed):
        return _getitem(x, index)
    num_indexed = sum(
        each.ndim if isinstance(each, Tensor) and each.dtype == paddle.bool else 1
        for each in listed
        if each is not None and each is not Ellipsis
    )
    basic: list[Any] = []
    advanced: list[Any] = []
    for each in listed:
        if each is Ellipsis:
            basic += [slice(None)] * (x.ndim - num_indexed)
            advanced += [slice(None)] * (x.ndim - num_indexed)
        elif isinstance(each, Tensor):
            basic += [slice(None)] * (each.ndim if each.dtype == paddle.bool else 1)
            advanced.append(each)
        else:
            basic.append(each)
            advanced += [] if isinstance(each, int) else [slice(None)]
    present = [each for each in basic if each is not None]
    y = x if all(isinstance(each, slice) and each == slice(None) for each in present) else _getitem(x, tuple(present))
    if len(present) < len(basic):
        # Not in the same call, which misplaces them where there are integers too.
        sizes = iter([*y.shape])
        shape = [1 if each is None else next(sizes) for each in basic if not isinstance(each, int)]
        y = y.reshape([*shape, *sizes])
    if 0 in y.shape or any(isinstance(each, Tensor) and 0 in each.shape for each in advanced):
        return _nothing(y, tuple(advanced))
    # Of a tensor with other strides, the result may have another shape.
    return _getitem(y.contiguous(), tuple(advanced))


def _nothing(x: Tensor, index: tuple[Any, ...]) -> Tensor:
    """Return `x[index]`, which has no elements: Paddle gives it another shape."""
    where = tuple(each.numpy() if isinstance(each, Tensor) else each for each in index)
    shape = np.broadcast_to(np.False_, x.shape)[where].shape
    return custom_function(lambda x: paddle.zeros(shape, x.dtype), lambda gradient: paddle.zeros_like(x), x)


# Selection -----------------------------------------------------------------------------------------------


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return paddle.index_select(x, index, axis=dim)


def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return paddle.take_along_axis(x, index, axis=dim, broadcast=False)


def index_put(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return paddle.index_put(x, (index,), values.cast(x.dtype))


def argsort(x: Tensor, dim: int, stable: bool = True, descending: bool = False) -> Tensor:
    return paddle.argsort(x, axis=dim, descending=descending, stable=True)


KERNELS: dict[str, Callable[..., Any]] = {
    "full": full,
    "arange": arange,
    "add": _binary(paddle.add),
    "mul": _binary(paddle.multiply),
    "div": div,
    "maximum": _binary(paddle.maximum),
    "pow": _binary(paddle.pow),
    "eq": _comparison(paddle.equal),
    "lt": _comparison(paddle.less_than),
    "logical_and": paddle.logical_and,
    "logical_not": paddle.logical_not,
    **{name: widened(getattr(paddle, name)) for name in ("exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh")},
    "sigmoid": widened(paddle.nn.functional.sigmoid),
    "gelu": widened(paddle.nn.functional.gelu),
    "where": where,
    "cast": lambda x, dtype: x.cast(dtype),
    "clone": lambda x: x.clone(),
    "sum": sum_,
    "amax": widened(amax),
    "cumsum": cumsum,
    "matmul": matmul,
    "reshape": lambda x, shape: paddle.reshape(x, list(shape)),
    "transpose": transpose,
    "expand": expand,
    "cat": cat,
    "narrow": narrow,
    "index_select": widened(index_select),
    "gather": widened(gather),
    "index_put": widened(index_put),
    "argsort": argsort,
    # Not one of `OP_NAMES`: `x[...]` of users, and of the samples of the conformance suite.
    "getitem": getitem,
}
