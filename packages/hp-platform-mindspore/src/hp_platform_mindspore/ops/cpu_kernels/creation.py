"""New tensors: constant, counted, one-hot, and random.

Random operations draw from the platform's generator on the host. MindSpore's own have several generators, and some have
no kernel on CPU; these follow `Platform.manual_seed` alone. All numbers are drawn in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hp_platform_mindspore.ops.cpu_kernels import pointwise
from hp_platform_mindspore.tensor.memory import HOST_DTYPES, encode, numbers, share

Number = int | float | bool


def zeros(shape: Sequence[int], dtype: Any) -> Tensor:
    return mint.zeros(tuple(shape), dtype=dtype)


def full(shape: Sequence[int], value: Number, dtype: Any) -> Tensor:
    return made(np.full(tuple(shape), value), dtype)


def made(values: Any, dtype: Any) -> Tensor:
    """Return a tensor with the values of an array or NumPy number, converted to `dtype`."""
    # bfloat16 is written as its bit pattern.
    return share(encode(values) if dtype == ms.bfloat16 else np.asarray(values, HOST_DTYPES[dtype]), dtype)


def one_hot(x: Tensor, num_classes: int) -> Tensor:
    """Return int64 `[*x.shape, num_classes]`, which is 1 at the class of each element.

    Raises:
        IndexError: a class is outside of `range(num_classes)`.
    """
    # Integers have no gradient, so the result is computed on the host.
    ids = numbers(x)
    check_classes("one_hot", ids, num_classes)
    return share((ids[..., None] == np.arange(num_classes)).astype(np.int64))


def check_classes(name: str, ids: np.ndarray[Any, Any], count: int) -> None:
    """Refuse ids outside of `range(count)`; MindSpore's own gathers take negative ones from the end.

    Raises:
        IndexError: there is such an id.
    """
    outside = ids[(ids < 0) | (ids >= count)]
    if count and outside.size:
        raise IndexError(f"{name}: expected ids from 0 to {count - 1}, got {outside[0]}")


Array = np.ndarray[Any, Any]
Generator = Callable[[], np.random.Generator]


def random_operations(generator: Generator) -> dict[str, Callable[..., Any]]:
    """Return the random operations by canonical name, all drawing from `generator()`.

    Those ending in an underscore return the values with which the first argument is to be overwritten.
    """
    filled = {
        "uniform_": lambda size, low=0.0, high=1.0: low + (high - low) * _uniform(generator(), size),
        "normal_": lambda size, mean=0.0, std=1.0: mean + std * _normal(generator(), size),
        "exponential_": lambda size, rate=1.0: generator().standard_exponential(size, np.float32) / rate,
        "log_normal_": lambda size, mean=1.0, std=2.0: np.exp(mean + std * _normal(generator(), size)),
        "geometric_": lambda size, p: generator().geometric(p, size),
        "bernoulli_": lambda size, p=0.5: _uniform(generator(), size) < _host(p),
    }
    return {
        **{name: _filling(draw) for name, draw in filled.items()},
        "dropout": _dropout(generator, None),
        **{f"dropout{count}d": _dropout(generator, 2) for count in (1, 2, 3)},
        "feature_dropout": _dropout(generator, 2),
        "random_": _filling_integers(generator),
        "rand_like": lambda x, *, dtype=None: made(_uniform(generator(), tuple(x.shape)), dtype or x.dtype),
        "randn_like": lambda x, *, dtype=None: made(_normal(generator(), tuple(x.shape)), dtype or x.dtype),
        "bernoulli": lambda x: made(_uniform(generator(), tuple(x.shape)) < numbers(x), x.dtype),
        "multinomial": _multinomial(generator),
    }


def _uniform(generator: np.random.Generator, size: Sequence[int]) -> Array:
    return generator.random(tuple(size), np.float32)


def _normal(generator: np.random.Generator, size: Sequence[int]) -> Array:
    return generator.standard_normal(tuple(size), np.float32)


def _host(value: Any) -> Any:
    return numbers(value) if isinstance(value, Tensor) else value


def _filling(draw: Callable[..., Array]) -> Callable[..., Tensor]:
    return lambda x, *args, **kwargs: made(draw(tuple(x.shape), *args, **kwargs), x.dtype)


def _filling_integers(generator: Generator) -> Callable[..., Tensor]:
    """Return `random_(to)` and `random_(from, to)`; without bounds it draws integers that the dtype holds exactly."""

    def drawn(x: Tensor, low: int = 0, high: int | None = None) -> Tensor:
        # One bound is the end, as in torch.
        begin, end = (0, low) if high is None and low else (low, high)
        return made(generator().integers(begin, _largest(x.dtype) if end is None else end, tuple(x.shape)), x.dtype)

    return drawn


def _largest(dtype: Any) -> int:
    # All integers up to 2 ** (bits of the significand) are exact; bool has two values.
    exact = {ms.float16: 2**11, ms.bfloat16: 2**8, ms.float32: 2**24, ms.float64: 2**53, ms.bool_: 2}
    return exact[dtype] if dtype in exact else int(np.iinfo(ms.dtype_to_nptype(dtype)).max)


def _dropout(generator: Generator, dims: int | None) -> Callable[..., Tensor]:
    """Return dropout of elements, or of entire channels: one number per index of the first `dims` dimensions."""

    def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout: the probability must be between 0 and 1, got {p}")
        if not training or p == 0:
            return pointwise.clone(x)
        shape = tuple(x.shape) if dims is None else (*x.shape[:dims], *[1] * (x.ndim - dims))
        # One number per element, or per channel, broadcast over the rest.
        mask = _uniform(generator(), shape) >= p
        return pointwise.mul(x, made(mask / (1 - p) if p < 1 else mask * 0.0, x.dtype))

    return dropout


def _multinomial(generator: Generator) -> Callable[..., Tensor]:
    """Return `multinomial` over rows of weights, which need not sum to one.

    Without replacement it takes the largest values of weight / exponential (Efraimidis and Spirakis, 2006).
    """

    def drawn(x: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
        weights = numbers(x).astype(np.float64)
        total = weights.sum(-1, keepdims=True)
        if (weights < 0).any() or not (total > 0).all():
            raise ValueError("multinomial: weights must not be negative, and some of each row positive")
        if replacement:
            numbers_drawn = generator().random((*weights.shape[:-1], num_samples, 1))
            return share((np.cumsum(weights / total, -1)[..., None, :] <= numbers_drawn).sum(-1))
        if ((weights > 0).sum(-1) < num_samples).any():
            raise ValueError(f"multinomial: fewer than {num_samples} positive weights in a row")
        # Sampling without replacement with probabilities proportional to the weights.
        scores = weights / generator().standard_exponential(weights.shape)
        return share(np.ascontiguousarray(np.argsort(-scores, axis=-1, kind="stable")[..., :num_samples]))

    return drawn


KERNELS: dict[str, Callable[..., Any]] = {
    "zeros": zeros,
    "ones": lambda shape, dtype: mint.ones(tuple(shape), dtype=dtype),
    "full": full,
    "arange": lambda end, dtype: made(np.arange(end), dtype),
    "zeros_like": ops.zeros_like,
    "ones_like": ops.ones_like,
    "full_like": lambda x, fill_value, *, dtype=None: full(tuple(x.shape), fill_value, dtype or x.dtype),
    "empty_like": lambda x, *, dtype=None: mint.empty(tuple(x.shape), dtype=dtype or x.dtype),
    "new_full": lambda x, size, fill_value, *, dtype=None: full(tuple(size), fill_value, dtype or x.dtype),
    "one_hot": one_hot,
}
