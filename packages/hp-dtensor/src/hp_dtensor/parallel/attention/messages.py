"""Messages of several tensors: concatenated into one vector to be sent, split and reshaped on arrival."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hp_dtensor.platform.interface import Platform

Tensor = Any
Shape = tuple[int, ...]


def pack(platform: Platform, tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of one dtype into one contiguous vector."""
    flat = [platform.ops.reshape(platform.contiguous(x), (-1,)) for x in tensors]
    return flat[0] if len(flat) == 1 else platform.ops.cat(flat, 0)


def unpack(platform: Platform, message: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Split a vector made by `pack` into tensors of these shapes, views of it."""
    found, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        part = message if size == message.shape[0] else platform.ops.narrow(message, 0, start, size)
        found.append(platform.ops.reshape(part, shape))
        start += size
    return found


def numel(shapes: Sequence[Shape]) -> int:
    """Return the total number of elements of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def empty_message(platform: Platform, shapes: Sequence[Shape], dtype: Any) -> Tensor:
    """Return uninitialized memory for a message of tensors of these shapes."""
    return platform.empty((numel(shapes),), dtype)
