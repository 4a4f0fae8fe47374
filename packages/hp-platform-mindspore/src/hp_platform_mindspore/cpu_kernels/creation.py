"""New tensors: filled with a value, counted, or one-hot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hp_platform_mindspore.tensor.memory import HOST_DTYPES, encode, numbers, share

Number = int | float | bool


def zeros(shape: Sequence[int], dtype: Any) -> Tensor:
    return mint.zeros(tuple(shape), dtype=dtype)


def ones(shape: Sequence[int], dtype: Any) -> Tensor:
    return mint.ones(tuple(shape), dtype=dtype)


def full(shape: Sequence[int], value: Number, dtype: Any) -> Tensor:
    return made(np.full(tuple(shape), value), dtype)


def arange(end: int, dtype: Any) -> Tensor:
    return made(np.arange(end), dtype)


def made(values: np.ndarray[Any, Any], dtype: Any) -> Tensor:
    return share(encode(values) if dtype == ms.bfloat16 else values.astype(HOST_DTYPES[dtype]), dtype)


def one_hot(x: Tensor, num_classes: int) -> Tensor:
    ids = numbers(x)
    return share((ids[..., None] == np.arange(num_classes)).astype(np.int64))


def full_like(x: Tensor, fill_value: Any, *, dtype: Any = None) -> Tensor:
    return full(tuple(x.shape), fill_value, dtype or x.dtype)


def empty_like(x: Tensor, *, dtype: Any = None) -> Tensor:
    return mint.empty(tuple(x.shape), dtype=dtype or x.dtype)


def new_full(x: Tensor, size: Sequence[int], fill_value: Any, *, dtype: Any = None) -> Tensor:
    return full(tuple(size), fill_value, dtype or x.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    "zeros": zeros,
    "ones": ones,
    "full": full,
    "arange": arange,
    "zeros_like": ops.zeros_like,
    "ones_like": ops.ones_like,
    "full_like": full_like,
    "empty_like": empty_like,
    "new_full": new_full,
    "one_hot": one_hot,
}
