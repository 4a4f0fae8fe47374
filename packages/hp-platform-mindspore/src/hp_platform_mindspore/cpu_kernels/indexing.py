"""Picking elements by slices and by tensors of indices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops

from hp_platform_mindspore.cpu_kernels import pointwise
from hp_platform_mindspore.cpu_kernels.empty import is_empty, nothing
from hp_platform_mindspore.tensor.autograd import custom_function, is_recording
from hp_platform_mindspore.tensor.memory import share


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    dim %= x.ndim
    return _pick(x, dim, index, (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]))


def _pick(x: Tensor, dim: int, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    if math.prod(shape) and x.size:
        return ops.gather(x, index, dim)
    return nothing(x, shape)


def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return mint.gather(x, dim, index) if index.size and x.size else nothing(x, tuple(index.shape))


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return _pick(weight, 0, ids, (*ids.shape, *weight.shape[1:]))


def getitem(x: Tensor, index: Any) -> Tensor:
    """Index with integers, slices, None and Ellipsis, as NumPy does."""
    shape = np.broadcast_to(np.int8(0), x.shape)[index].shape
    if not math.prod(shape):
        return nothing(x, shape)
    if is_recording(x):
        x, index = _without_steps(x, index)
    return x[index]


def _without_steps(x: Tensor, index: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """Pick what slices with a step name, and return that and the rest of the index.

    The CPU's gradient fails for `x[:, ::2]`.
    """
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
        return custom_function(lambda t, v: pointwise.clone(t), lambda g: [g, ops.zeros_like(values)], x, values)
    return ops.tensor_scatter_update(x, mint.unsqueeze(index, -1), values)


KERNELS: dict[str, Callable[..., Any]] = {
    "index_select": index_select,
    "gather": gather,
    "index_put": index_put,
    "embedding": embedding,
}
