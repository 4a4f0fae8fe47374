"""Operations that compute every element from the elements at the same index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hp_platform_mindspore.ops.cpu_kernels.empty import (
    filled,
    is_empty,
    marked_if_saving,
    result_dtype,
    unless_empty,
    with_zero_gradient_if_empty,
)
from hp_platform_mindspore.tensor.autograd import linear_map
from hp_platform_mindspore.tensor.dtensor import detached
from hp_platform_mindspore.tensor.memory import FLOATING, HOST_DTYPES, converted, is_readable, numbers, share

F = mint.nn.functional
Number = int | float | bool


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
    """Return the empty result of two operands, with the shape to which they broadcast and their common dtype."""
    operands = [t for t in (x, y) if isinstance(t, Tensor)]
    shape = np.broadcast_shapes(*(t.shape for t in operands))
    return marked_if_saving(kernel, (x, y), {}, filled(0, shape, *operands, dtype=result_dtype(kernel, x, y)))


@with_zero_gradient_if_empty
def clamp(x: Tensor, min: Number | None = None, max: Number | None = None) -> Tensor:
    return mul(x, 1) if is_empty(x) else mint.clamp(x, min, max)


where = with_zero_gradient_if_empty(mint.where)


@with_zero_gradient_if_empty
def masked_fill(x: Tensor, mask: Tensor, value: Number) -> Tensor:
    return x.masked_fill(mask, value)


def cast(x: Tensor, dtype: Any) -> Tensor:
    """Convert to another dtype, on the CPU by NumPy: MindSpore takes twenty times as long for a small tensor."""
    source = x.dtype
    if source == dtype:
        return x
    if dtype not in HOST_DTYPES or not is_readable(x):
        return x.astype(dtype)
    if dtype not in FLOATING:
        return converted(numbers(x), dtype)
    return linear_map(x, lambda t: converted(numbers(t), dtype), lambda grad: converted(numbers(grad), source))


_HALF = (ms.float16, ms.bfloat16)


def widened(x: Tensor) -> Tensor:
    """Return `x`, or a 16-bit tensor as float32: squares overflow in float16, and sums lose digits in bfloat16."""
    return cast(x, ms.float32) if x.dtype in _HALF else x


def narrowed(x: Tensor, dtype: Any) -> Tensor:
    """Return `x`, computed from a `widened` operand of this dtype, in half precision if that operand was."""
    return cast(x, dtype) if dtype in _HALF else x


def clone(x: Tensor) -> Tensor:
    # The CPU has no Clone kernel. Multiplying by 1 copies every dtype but bool.
    return mint.logical_or(x, x) if x.dtype == ms.bool_ else mint.mul(x, 1)


def copysign(x: Tensor, y: Any) -> Tensor:
    # `signbit` distinguishes -0.0 from 0.0, which a comparison does not.
    negative = share(np.signbit(numbers(y) if isinstance(y, Tensor) else np.asarray(y)))
    size = mint.abs(x)
    return where(negative, mul(size, -1), size)


def fmin(x: Tensor, y: Tensor) -> Tensor:
    """Return the smaller of two elements, or the one that is a number."""
    a, b = numbers(x), numbers(y)
    return where(share((a <= b) | np.isnan(b)), x, y)


def float_power(x: Any, y: Any) -> Tensor:
    return power(*(v.astype(ms.float64) if isinstance(v, Tensor) else float(v) for v in (x, y)))


def floor_divide(x: Any, y: Any) -> Tensor:
    return x // y


def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    # inf - inf is NaN; the difference of equal values is 0.
    difference = masked_fill(sub(x, y), x == y, 0.0)
    return maximum(x, y) + mint.log1p(mint.exp(-mint.abs(difference)))


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    x = x if eps is None else clamp(x, eps, 1 - eps)
    return mint.log(div(x, 1 - x))


def logsigmoid(x: Tensor) -> Tensor:
    """Compute log(sigmoid(x)) without the overflow of the exponential."""
    return clamp(x, max=0.0) - mint.log1p(mint.exp(-mint.abs(x)))


def selu(x: Tensor) -> Tensor:
    """Compute SELU (arXiv 1706.02515), whose gradient MindSpore's own kernel gets wrong on CPU."""
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    # Clamped, so that the branch that `where` does not select cannot overflow: infinity times a zero gradient is NaN.
    below = mul(mint.expm1(clamp(x, max=0.0)), alpha)
    return mul(where(x > 0, x, below), scale)


def threshold(x: Tensor, threshold: float, value: float) -> Tensor:
    return masked_fill(x, x <= threshold, value)


KERNELS: dict[str, Callable[..., Any]] = {
    "add": add,
    "sub": sub,
    "mul": mul,
    "div": div,
    "pow": power,
    "maximum": maximum,
    "minimum": minimum,
    "gelu": lambda x, approximate="none": ops.gelu(x, approximate),
    "silu": F.silu,
    "relu": F.relu,
    "square": lambda x: x * x,
    "clamp": clamp,
    "clamp_min": lambda x, min: clamp(x, min, None),
    "clamp_max": lambda x, max: clamp(x, None, max),
    "where": where,
    "masked_fill": masked_fill,
    "cast": cast,
    "clone": clone,
    "detach": detached,
    "bitwise_not": lambda x: share(~numbers(x)),
    "copysign": copysign,
    "fmin": fmin,
    "float_power": float_power,
    "floor_divide": unless_empty(floor_divide, "floor_divide"),
    "leaky_relu": lambda x, negative_slope=0.01: where(x > 0, x, mul(x, negative_slope)),
    "logaddexp": logaddexp,
    "logit": logit,
    "logsigmoid": logsigmoid,
    "selu": selu,
    "threshold": threshold,
    "prelu": lambda x, weight: filled(0, x.shape, x, weight) if is_empty(x, weight) else F.prelu(x, weight),
    **{
        name: getattr(mint, name)
        for name in """
            eq ne lt le gt ge logical_and logical_or logical_not isfinite
            neg exp log sqrt rsqrt abs sin cos tanh sigmoid
        """.split()
    },
}
