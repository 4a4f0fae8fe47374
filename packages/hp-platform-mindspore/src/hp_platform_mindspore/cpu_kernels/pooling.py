"""Max, average and adaptive average pooling of `[batch, channels, positions...]` in one and two dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint

from hp_platform_mindspore.cpu_kernels import convolutions, indexing, pointwise, products, reductions
from hp_platform_mindspore.tensor.memory import HOST_DTYPES, numbers, share

Array = np.ndarray[Any, Any]
Sizes = tuple[int, ...]


def max_pooling(count: int) -> Callable[..., Any]:
    """Make `max_pool1d` or `max_pool2d`. Of equal values in a window the first one gets the gradient, as on torch."""

    def pool(
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        kernel, gaps = convolutions.per_dimension(kernel_size, count), convolutions.per_dimension(dilation, count)
        steps, pads = _steps(stride, kernel), convolutions.per_dimension(padding, count)
        sizes = tuple(x.shape[2:])
        counts, around = _covered(sizes, kernel, steps, pads, gaps, ceil_mode)
        picked = convolutions.windows(convolutions.padded(x, around, -math.inf), counts, kernel, steps, gaps)
        options = zip(counts, kernel, steps, gaps, pads, strict=True)
        coordinates = [np.arange(n)[:, None] * s + np.arange(k) * g - p for n, k, s, g, p in options]
        return _largest(picked, coordinates, sizes, return_indices)

    return convolutions.with_batch(pool, count)


def _steps(stride: Any, kernel: Sizes) -> Sizes:
    return kernel if stride in (None, (), []) else convolutions.per_dimension(stride, len(kernel))


def _covered(
    sizes: Sizes, kernel: Sizes, steps: Sizes, pads: Sizes, gaps: Sizes, ceil_mode: bool
) -> tuple[Sizes, list[tuple[int, int]]]:
    """Count the windows of each dimension, and the padding that they need.

    With `ceil_mode` a last window may reach beyond the padded end, unless it would begin there.
    """
    counts, around = [], []
    for size, width, step, pad, gap in zip(sizes, kernel, steps, pads, gaps, strict=True):
        reach = gap * (width - 1) + 1
        count = (size + 2 * pad - reach + (step - 1 if ceil_mode else 0)) // step + 1
        if ceil_mode and (count - 1) * step >= size + pad:
            count -= 1
        counts.append(count)
        around.append((pad, max(0, (count - 1) * step + reach - size - pad)))
    return tuple(counts), around


def _largest(picked: Tensor, coordinates: Sequence[Array], sizes: Sizes, with_places: bool) -> Any:
    """Return the first largest value of each window, and with `with_places` its place in the flattened image.

    Args:
        picked: `[batch, channels, windows..., positions inside...]`.
        coordinates: per dimension `[windows, positions inside]`, where in the image they are.
    """
    count = len(sizes)
    flat = mint.reshape(picked, (*picked.shape[: 2 + count], math.prod(picked.shape[2 + count :])))
    best = np.expand_dims(np.argmax(numbers(flat), axis=-1), -1)
    values = mint.squeeze(indexing.gather(flat, -1, share(best)), -1)
    if not with_places:
        return values
    places = np.zeros((), np.int64)
    for dim, places_of_dim in enumerate(coordinates):
        shape = [1] * (2 * count)
        shape[dim], shape[count + dim] = places_of_dim.shape
        places = places + places_of_dim.reshape(shape) * math.prod(sizes[dim + 1 :])
    places = np.broadcast_to(places.reshape(1, 1, *places.shape[:count], -1), flat.shape)
    return values, share(np.take_along_axis(places, best, -1)[..., 0])


def average_pooling(count: int) -> Callable[..., Tensor]:
    """Make `avg_pool1d` or `avg_pool2d`."""

    def pool(
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        kernel, pads = convolutions.per_dimension(kernel_size, count), convolutions.per_dimension(padding, count)
        steps, gaps = _steps(stride, kernel), (1,) * count
        sizes = tuple(x.shape[2:])
        counts, around = _covered(sizes, kernel, steps, pads, gaps, ceil_mode)
        picked = convolutions.windows(convolutions.padded(x, around, 0.0), counts, kernel, steps, gaps)
        sums = reductions.total(picked, tuple(range(2 + count, picked.ndim)))
        if divisor_override:
            return pointwise.div(sums, divisor_override)
        edges = pads if count_include_pad else (0,) * count
        inside = [
            np.minimum(np.arange(n) * s - p + k, size + e) - np.maximum(np.arange(n) * s - p, -e)
            for n, s, p, k, size, e in zip(counts, steps, pads, kernel, sizes, edges, strict=True)
        ]
        return pointwise.div(sums, share(_outer(inside).astype(HOST_DTYPES[x.dtype])))

    return convolutions.with_batch(pool, count)


def _outer(vectors: Sequence[Array]) -> Array:
    result = np.ones(())
    for vector in vectors:
        result = result[..., None] * vector
    return result


def _part(index: int, size: int, parts: int) -> tuple[int, int]:
    """Return the begin and the end of a part of an adaptive pool, which may share positions with its neighbours."""
    return index * size // parts, -(-(index + 1) * size // parts)


def adaptive_average_pooling(count: int) -> Callable[..., Tensor]:
    """Make `adaptive_avg_pool1d` or `2d`: means over parts, one dimension after the other."""

    def pool(x: Tensor, output_size: Any) -> Tensor:
        for dim, parts in enumerate(_wanted(x, output_size, count), 2):
            size = x.shape[dim]
            matrix = np.zeros((parts, size))
            for i in range(parts):
                begin, end = _part(i, size, parts)
                matrix[i, begin:end] = 1 / (end - begin)
            x = products.times_matrix(x, dim, matrix)
        return x

    return convolutions.with_batch(pool, count)


def _wanted(x: Tensor, output_size: Any, count: int) -> Sizes:
    given = (output_size,) * count if output_size is None or isinstance(output_size, int) else tuple(output_size)
    return tuple(size if n is None else n for n, size in zip(given, x.shape[2:], strict=True))


KERNELS: dict[str, Callable[..., Any]] = {
    "max_pool1d": max_pooling(1),
    "max_pool2d": max_pooling(2),
    "avg_pool1d": average_pooling(1),
    "avg_pool2d": average_pooling(2),
    "adaptive_avg_pool1d": adaptive_average_pooling(1),
    "adaptive_avg_pool2d": adaptive_average_pooling(2),
}
