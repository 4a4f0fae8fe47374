"""Convolutions of `[batch, channels, positions...]` in one and two spatial dimensions.

A convolution picks windows, which is a gather, and multiplies matrices, so its gradients are those of gathers and
products. MindSpore's own `Conv2D` on CPU fails on ranks that hold no sample and in grouped 1-d convolutions with bias,
and was three times slower when measured (16 x 16 x 32 x 32 with 32 filters of 3 x 3: 450 ms, 140 ms here).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint

from hp_platform_mindspore.cpu_kernels import creation, indexing, pointwise, products, shapes
from hp_platform_mindspore.tensor.memory import share

Sizes = tuple[int, ...]
Pads = Sequence[tuple[int, int]]


def per_dimension(value: Any, count: int) -> Sizes:
    """Return one number for each of `count` spatial dimensions."""
    items = (value,) if isinstance(value, (int, float)) else tuple(value)
    return items * count if len(items) == 1 else items


def windows(x: Tensor, counts: Sizes, kernel: Sizes, steps: Sizes, gaps: Sizes) -> Tensor:
    """Pick the windows of an image that is padded already: `[batch, channels, windows..., positions inside...]`."""
    for i, (count, size, step, gap) in enumerate(zip(counts, kernel, steps, gaps, strict=True)):
        index = np.arange(count)[:, None] * step + np.arange(size) * gap
        x = indexing.index_select(x, 2 + 2 * i, share(index))
    inside = range(2, x.ndim, 2)
    return mint.permute(x, (0, 1, *inside, *(dim + 1 for dim in inside)))


def _counts(sizes: Sizes, kernel: Sizes, steps: Sizes, gaps: Sizes) -> Sizes:
    options = zip(sizes, kernel, steps, gaps, strict=True)
    return tuple((size - gap * (width - 1) - 1) // step + 1 for size, width, step, gap in options)


def padded(x: Tensor, pads: Pads, value: float) -> Tensor:
    for dim, (before, after) in enumerate(pads, 2):
        parts = [x]
        for place, length in ((0, before), (2, after)):
            if length:
                shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
                parts.insert(place, creation.full(shape, value, x.dtype))
        x = shapes.cat(parts, dim) if len(parts) > 1 else x
    return x


def with_batch(operation: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Have `operation` take one image without a batch dimension, too."""

    def of_any(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.ndim == count + 2:
            return operation(x, *args, **kwargs)
        result = operation(mint.unsqueeze(x, 0), *args, **kwargs)
        return tuple(mint.squeeze(y, 0) for y in result) if isinstance(result, tuple) else mint.squeeze(result, 0)

    return of_any


def convolution(count: int) -> Callable[..., Tensor]:
    """Make `conv1d` or `conv2d`, with torch's arguments."""

    def conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        gaps = per_dimension(dilation, count)
        x = padded(x, _pads(padding, tuple(weight.shape[2:]), gaps), 0.0)
        return _with_bias(_convolved(x, weight, per_dimension(stride, count), gaps, groups), bias)

    return with_batch(conv, count)


def _pads(padding: Any, kernel: Sizes, gaps: Sizes) -> Pads:
    """Return the padding before and after each dimension."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        spare = [gap * (size - 1) for gap, size in zip(gaps, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in spare]
    return [(pad, pad) for pad in per_dimension(padding, len(kernel))]


def _convolved(x: Tensor, weight: Tensor, steps: Sizes, gaps: Sizes, groups: int) -> Tensor:
    """Convolve without padding: for each group of channels, the weight times all windows."""
    (batch, channels, *sizes), (out, into, *kernel) = x.shape, weight.shape
    counts = _counts(tuple(sizes), tuple(kernel), steps, gaps)
    picked = windows(x, counts, tuple(kernel), steps, gaps)
    positions, inside = math.prod(counts), math.prod(kernel)
    order = (0, 1, *range(2 + len(counts), picked.ndim), *range(2, 2 + len(counts)))
    columns = mint.reshape(mint.permute(picked, order), (batch, groups, channels // groups * inside, positions))
    filters = mint.reshape(weight, (groups, out // groups, into * inside))
    return mint.reshape(products.matmul(filters, columns), (batch, out, *counts))


def _with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else pointwise.add(x, mint.reshape(bias, (1, -1, *[1] * (x.ndim - 2))))


KERNELS: dict[str, Callable[..., Any]] = {
    "conv1d": convolution(1),
    "conv2d": convolution(2),
}
