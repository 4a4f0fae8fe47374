"""Resizing of images, nearest and (bi)linear: one matrix product for each spatial dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor

from hp_dtensor.exceptions import CapabilityError
from hp_platform_mindspore.cpu_kernels import convolutions, products

Array = np.ndarray[Any, Any]
Sizes = tuple[int, ...]
MODES = ("nearest", "linear", "bilinear")


def interpolate(
    x: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
) -> Tensor:
    """Resize `[batch, channels, positions...]` to `size`, or by `scale_factor`; arguments are torch's.

    Raises:
        CapabilityError: a mode other than nearest, linear and bilinear.
    """
    if mode not in MODES:
        raise CapabilityError(
            f"interpolate with mode={mode!r} is not composed on MindSpore's CPU: use one of {', '.join(MODES)} there, "
            "or run on Ascend or on the torch platform"
        )
    count = x.ndim - 2
    scales = [None] * count if scale_factor is None else convolutions.per_dimension(scale_factor, count)
    sizes = tuple(x.shape[2:])
    wanted = convolutions.per_dimension(size, count) if size is not None else _scaled(sizes, scales)
    # torch computes positions with the given scale, not with the quotient of the rounded sizes, unless told otherwise.
    known = [None] * count if recompute_scale_factor else scales
    for dim, (before, after, scale) in enumerate(zip(sizes, wanted, known, strict=True), 2):
        ratio = 1 / scale if scale else before / after
        if mode == "nearest":
            matrix = _nearest(np.arange(after) * ratio, before)
        elif align_corners:
            matrix = _linear(np.arange(after) * ((before - 1) / max(1, after - 1)), before)
        else:
            matrix = _linear((np.arange(after) + 0.5) * ratio - 0.5, before)
        x = products.times_matrix(x, dim, matrix)
    return x


def _scaled(sizes: Sizes, scales: Sequence[Any]) -> Sizes:
    return tuple(math.floor(size * scale) for size, scale in zip(sizes, scales, strict=True))


def _nearest(places: Array, size: int) -> Array:
    return _weights([(np.floor(places + 1e-9), np.ones(len(places)))], size)


def _linear(places: Array, size: int) -> Array:
    places = np.maximum(places, 0)
    low = np.floor(places)
    return _weights([(low, 1 - (places - low)), (low + 1, places - low)], size)


def _weights(terms: Sequence[tuple[Array, Array]], size: int) -> Array:
    """Build the matrix `[positions after, positions before]` from pairs of positions before and their weights.

    Positions outside the image are moved to its edge.
    """
    matrix = np.zeros((len(terms[0][0]), size))
    for places, weights in terms:
        inside = np.clip(places, 0, size - 1).astype(np.int64)
        np.add.at(matrix, (np.arange(len(places)), inside), weights)
    return matrix


KERNELS: dict[str, Callable[..., Any]] = {"interpolate": interpolate}
