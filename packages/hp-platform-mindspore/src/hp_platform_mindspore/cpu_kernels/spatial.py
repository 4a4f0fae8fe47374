"""Convolutions, pooling and resizing of `[batch, channels, positions...]` with any number of spatial dimensions.

The CPU has kernels for few of them. All are a choice of windows, which is a gather, and a product or a reduction; or,
for resizing, a matrix for each dimension. So their gradients are those of gathers and products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint

from hp_platform_mindspore.cpu_kernels import basic as kernels
from hp_platform_mindspore.tensor.memory import HOST_DTYPES, numbers, share, store

Sizes = tuple[int, ...]
Pads = Sequence[tuple[int, int]]
Array = np.ndarray[Any, Any]


def per_dimension(value: Any, count: int) -> Sizes:
    """One number for each of `count` spatial dimensions."""
    items = (value,) if isinstance(value, (int, float)) else tuple(value)
    return items * count if len(items) == 1 else items


def windows(x: Tensor, counts: Sizes, kernel: Sizes, steps: Sizes, gaps: Sizes) -> Tensor:
    """`[batch, channels, windows..., positions inside...]` of an image that is padded already."""
    for i, (count, size, step, gap) in enumerate(zip(counts, kernel, steps, gaps, strict=True)):
        index = np.arange(count)[:, None] * step + np.arange(size) * gap
        x = kernels.index_select(x, 2 + 2 * i, share(index))
    inside = range(2, x.ndim, 2)
    return mint.permute(x, (0, 1, *inside, *(dim + 1 for dim in inside)))


def _counts(sizes: Sizes, kernel: Sizes, steps: Sizes, gaps: Sizes) -> Sizes:
    options = zip(sizes, kernel, steps, gaps, strict=True)
    return tuple((size - gap * (width - 1) - 1) // step + 1 for size, width, step, gap in options)


def _padded(x: Tensor, pads: Pads, value: float) -> Tensor:
    for dim, (before, after) in enumerate(pads, 2):
        parts = [x]
        for place, length in ((0, before), (2, after)):
            if length:
                shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
                parts.insert(place, kernels.full(shape, value, x.dtype))
        x = kernels.cat(parts, dim) if len(parts) > 1 else x
    return x


def _with_batch(operation: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Of one image without a batch dimension, too."""

    def of_any(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.ndim == count + 2:
            return operation(x, *args, **kwargs)
        result = operation(mint.unsqueeze(x, 0), *args, **kwargs)
        return tuple(mint.squeeze(y, 0) for y in result) if isinstance(result, tuple) else mint.squeeze(result, 0)

    return of_any


# Convolutions --------------------------------------------------------------------------------------------


def convolution(count: int) -> Callable[..., Tensor]:
    """`conv1d`, `conv2d` or `conv3d`."""

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
        x = _padded(x, _pads(padding, tuple(weight.shape[2:]), gaps), 0.0)
        return _with_bias(_convolved(x, weight, per_dimension(stride, count), gaps, groups), bias)

    return _with_batch(conv, count)


def _pads(padding: Any, kernel: Sizes, gaps: Sizes) -> Pads:
    """Before and after each dimension."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        spare = [gap * (size - 1) for gap, size in zip(gaps, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in spare]
    return [(pad, pad) for pad in per_dimension(padding, len(kernel))]


def _convolved(x: Tensor, weight: Tensor, steps: Sizes, gaps: Sizes, groups: int) -> Tensor:
    """Without padding: the weight times all windows, for each group of channels."""
    (batch, channels, *sizes), (out, into, *kernel) = x.shape, weight.shape
    counts = _counts(tuple(sizes), tuple(kernel), steps, gaps)
    picked = windows(x, counts, tuple(kernel), steps, gaps)
    positions, inside = math.prod(counts), math.prod(kernel)
    order = (0, 1, *range(2 + len(counts), picked.ndim), *range(2, 2 + len(counts)))
    columns = mint.reshape(mint.permute(picked, order), (batch, groups, channels // groups * inside, positions))
    filters = mint.reshape(weight, (groups, out // groups, into * inside))
    return mint.reshape(kernels.matmul(filters, columns), (batch, out, *counts))


def _with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else kernels.add(x, mint.reshape(bias, (1, -1, *[1] * (x.ndim - 2))))


def transposed_convolution(count: int) -> Callable[..., Tensor]:
    """`conv_transpose1d`, `2d` or `3d`: a convolution of the image with zeros between its positions."""

    def conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        options = [per_dimension(value, count) for value in (stride, padding, output_padding, dilation)]
        for dim, (width, *option) in enumerate(zip(weight.shape[2:], *options, strict=True), 2):
            x = _spaced(x, dim, width, *option)
        return _with_bias(_convolved(x, _turned(weight, groups), (1,) * count, options[3], groups), bias)

    return _with_batch(conv, count)


def _spaced(x: Tensor, dim: int, width: int, step: int, pad: int, extra: int, gap: int) -> Tensor:
    """Dimension `dim` with `step - 1` zeros between positions and as many around as a convolution needs."""
    size, reach = x.shape[dim], gap * (width - 1)
    length = (size - 1) * step - 2 * pad + reach + extra + 1
    place = np.arange(length + reach) - (reach - pad)
    filled = (place % step == 0) & (place >= 0) & (place < size * step)
    zero = kernels.zeros((*x.shape[:dim], 1, *x.shape[dim + 1 :]), x.dtype)
    return kernels.index_select(kernels.cat([x, zero], dim), dim, share(np.where(filled, place // step, size)))


def _turned(weight: Tensor, groups: int) -> Tensor:
    """`[in, out per group, ...]` as the `[out, in per group, ...]` of a convolution, reversed in space."""
    into, out, *kernel = weight.shape
    turned = mint.transpose(mint.reshape(weight, (groups, into // groups, out, *kernel)), 1, 2)
    turned = mint.reshape(turned, (groups * out, into // groups, *kernel))
    return mint.flip(turned, tuple(range(2, 2 + len(kernel))))


# Pooling -------------------------------------------------------------------------------------------------


def max_pooling(count: int) -> Callable[..., Any]:
    """`max_pool1d`, `2d` or `3d`; of equal values the first one counts."""

    def pool(
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        kernel, gaps = per_dimension(kernel_size, count), per_dimension(dilation, count)
        steps, pads = _steps(stride, kernel), per_dimension(padding, count)
        sizes = tuple(x.shape[2:])
        counts, around = _covered(sizes, kernel, steps, pads, gaps, ceil_mode)
        picked = windows(_padded(x, around, -math.inf), counts, kernel, steps, gaps)
        options = zip(counts, kernel, steps, gaps, pads, strict=True)
        coordinates = [np.arange(n)[:, None] * s + np.arange(k) * g - p for n, k, s, g, p in options]
        return _largest(picked, coordinates, sizes, return_indices)

    return _with_batch(pool, count)


def _steps(stride: Any, kernel: Sizes) -> Sizes:
    return kernel if stride in (None, (), []) else per_dimension(stride, len(kernel))


def _covered(
    sizes: Sizes, kernel: Sizes, steps: Sizes, pads: Sizes, gaps: Sizes, ceil_mode: bool
) -> tuple[Sizes, list[tuple[int, int]]]:
    """Numbers of windows, and the padding that they need; with `ceil_mode` also those that reach beyond the end."""
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
    """The first largest value of each window, and its place in the flattened image.

    Args:
        picked: `[batch, channels, windows..., positions inside...]`.
        coordinates: per dimension `[windows, positions inside]`, where in the image they are.
    """
    count = len(sizes)
    flat = mint.reshape(picked, (*picked.shape[: 2 + count], math.prod(picked.shape[2 + count :])))
    best = np.expand_dims(np.argmax(numbers(flat), axis=-1), -1)
    values = mint.squeeze(kernels.gather(flat, -1, share(best)), -1)
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
    """`avg_pool1d`, `2d` or `3d`."""

    def pool(
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        kernel, pads = per_dimension(kernel_size, count), per_dimension(padding, count)
        steps, gaps = _steps(stride, kernel), (1,) * count
        sizes = tuple(x.shape[2:])
        counts, around = _covered(sizes, kernel, steps, pads, gaps, ceil_mode)
        picked = windows(_padded(x, around, 0.0), counts, kernel, steps, gaps)
        sums = kernels.total(picked, tuple(range(2 + count, picked.ndim)))
        if divisor_override:
            return kernels.div(sums, divisor_override)
        edges = pads if count_include_pad else (0,) * count
        inside = [
            np.minimum(np.arange(n) * s - p + k, size + e) - np.maximum(np.arange(n) * s - p, -e)
            for n, s, p, k, size, e in zip(counts, steps, pads, kernel, sizes, edges, strict=True)
        ]
        return kernels.div(sums, share(_outer(inside).astype(HOST_DTYPES[x.dtype])))

    return _with_batch(pool, count)


def _outer(vectors: Sequence[Array]) -> Array:
    result = np.ones(())
    for vector in vectors:
        result = result[..., None] * vector
    return result


def _part(index: int, size: int, parts: int) -> tuple[int, int]:
    """Where a part of an adaptive pool begins and ends."""
    return index * size // parts, -(-(index + 1) * size // parts)


def adaptive_average_pooling(count: int) -> Callable[..., Tensor]:
    """`adaptive_avg_pool1d`, `2d` or `3d`: means over parts, one dimension after the other."""

    def pool(x: Tensor, output_size: Any) -> Tensor:
        for dim, parts in enumerate(_wanted(x, output_size, count), 2):
            size = x.shape[dim]
            matrix = np.zeros((parts, size))
            for i in range(parts):
                begin, end = _part(i, size, parts)
                matrix[i, begin:end] = 1 / (end - begin)
            x = _along(x, dim, matrix)
        return x

    return _with_batch(pool, count)


def _wanted(x: Tensor, output_size: Any, count: int) -> Sizes:
    given = (output_size,) * count if output_size is None or isinstance(output_size, int) else tuple(output_size)
    return tuple(size if n is None else n for n, size in zip(given, x.shape[2:], strict=True))


def _along(x: Tensor, dim: int, matrix: Array) -> Tensor:
    """The matrix times dimension `dim`."""
    weight = share(matrix.astype(HOST_DTYPES[x.dtype]))
    return mint.transpose(kernels.matmul(mint.transpose(x, dim, -1), mint.transpose(weight, 0, 1)), dim, -1)


def adaptive_max_pooling(count: int) -> Callable[..., Any]:
    """`adaptive_max_pool1d`, `2d` or `3d`."""

    def pool(x: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        sizes = tuple(x.shape[2:])
        coordinates = [_part_places(size, n) for size, n in zip(sizes, _wanted(x, output_size, count), strict=True)]
        picked = x
        for i, places in enumerate(coordinates):
            picked = kernels.index_select(picked, 2 + 2 * i, share(places))
        inside = range(2, picked.ndim, 2)
        picked = mint.permute(picked, (0, 1, *inside, *(dim + 1 for dim in inside)))
        return _largest(picked, coordinates, sizes, return_indices)

    return _with_batch(pool, count)


def _part_places(size: int, parts: int) -> Array:
    """`[parts, longest part]`: the positions of each part, its last one as often as it takes."""
    bounds = [_part(i, size, parts) for i in range(parts)]
    longest = max(end - begin for begin, end in bounds)
    return np.array([[min(begin + k, end - 1) for k in range(longest)] for begin, end in bounds])


# Resizing ------------------------------------------------------------------------------------------------


def interpolate(
    x: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
) -> Tensor:
    """Modes nearest, nearest-exact, linear, bilinear, trilinear, bicubic and area; one matrix per dimension."""
    count = x.ndim - 2
    scales = [None] * count if scale_factor is None else per_dimension(scale_factor, count)
    sizes = tuple(x.shape[2:])
    wanted = per_dimension(size, count) if size is not None else _scaled(sizes, scales)
    if mode == "area":
        return adaptive_average_pooling(count)(x, wanted)
    if mode not in _RESIZED:
        raise ValueError(f"interpolate: mode must be area or one of {', '.join(_RESIZED)}, got {mode!r}")
    known = [None] * count if recompute_scale_factor else scales
    for dim, (before, after, scale) in enumerate(zip(sizes, wanted, known, strict=True), 2):
        if align_corners and mode not in ("nearest", "nearest-exact"):
            places = np.arange(after) * ((before - 1) / max(1, after - 1))
        else:
            ratio = 1 / scale if scale else before / after
            shift = 0.0 if mode == "nearest" else 0.5
            places = (np.arange(after) + shift) * ratio - (shift if mode != "nearest-exact" else 0.0)
        x = _along(x, dim, _RESIZED[mode](places, before))
    return x


def _scaled(sizes: Sizes, scales: Sequence[Any]) -> Sizes:
    return tuple(math.floor(size * scale) for size, scale in zip(sizes, scales, strict=True))


def _nearest(places: Array, size: int) -> Array:
    return _weights([(np.floor(places + 1e-9), np.ones(len(places)))], size)


def _linear(places: Array, size: int) -> Array:
    places = np.maximum(places, 0)
    low = np.floor(places)
    return _weights([(low, 1 - (places - low)), (low + 1, places - low)], size)


def _cubic(places: Array, size: int) -> Array:
    """Cubic convolution with a = -0.75."""
    low = np.floor(places)
    t = places - low
    return _weights([(low + i, _cubic_weight(np.abs(t - i))) for i in (-1, 0, 1, 2)], size)


def _cubic_weight(d: Array) -> Array:
    a = -0.75
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    return np.where(d <= 1, near, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a)


def _weights(terms: Sequence[tuple[Array, Array]], size: int) -> Array:
    """`[after, before]` from positions before, kept inside the image, and their weights."""
    matrix = np.zeros((len(terms[0][0]), size))
    for places, weights in terms:
        inside = np.clip(places, 0, size - 1).astype(np.int64)
        np.add.at(matrix, (np.arange(len(places)), inside), weights)
    return matrix


_RESIZED: dict[str, Callable[[Array, int], Array]] = {
    "nearest": _nearest,
    "nearest-exact": _nearest,
    **dict.fromkeys(("linear", "bilinear", "trilinear"), _linear),
    "bicubic": _cubic,
}


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """With the statistics of the batch in training, which the running ones then move towards, in place."""
    channel = (1, -1, *[1] * (x.ndim - 2))
    if training:
        others = tuple(dim for dim in range(x.ndim) if dim != 1)
        mean = kernels.mean(x, others, True)
        centered = x - mean
        variance = kernels.mean(kernels.mul(centered, centered), others, True)
        count = math.prod(x.shape[dim] for dim in others)
        for kept, value in ((running_mean, mean), (running_var, variance * (count / max(1, count - 1)))):
            if kept is not None:
                store(kept, numbers(kept) * (1 - momentum) + numbers(value).reshape(kept.shape) * momentum)
    else:
        centered, variance = x - mint.reshape(running_mean, channel), mint.reshape(running_var, channel)
    result = kernels.mul(centered, mint.rsqrt(variance + eps))
    result = result if weight is None else kernels.mul(result, mint.reshape(weight, channel))
    return result if bias is None else kernels.add(result, mint.reshape(bias, channel))


KERNELS: dict[str, Callable[..., Any]] = {
    f"{name}{count}d": make(count)
    for count in (1, 2, 3)
    for name, make in (
        ("conv", convolution),
        ("conv_transpose", transposed_convolution),
        ("max_pool", max_pooling),
        ("avg_pool", average_pooling),
        ("adaptive_avg_pool", adaptive_average_pooling),
        ("adaptive_max_pool", adaptive_max_pooling),
    )
} | {"interpolate": interpolate, "batch_norm": batch_norm}
