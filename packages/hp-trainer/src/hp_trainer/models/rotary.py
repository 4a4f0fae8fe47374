"""Rotary positions (arXiv 2104.09864): pairs (i, i + head_dim / 2) turn with the token's position."""

from __future__ import annotations

from typing import Any

import numpy

from hp_dtensor.api import replicate_like
from hp_dtensor.platform import Platform

Tensor = Any


class RotaryTables:
    """Cosines and sines by length, made once each."""

    def __init__(self, platform: Platform, head_dim: int, theta: float) -> None:
        self.platform = platform
        self.frequencies = theta ** (-numpy.arange(0, head_dim, 2) / head_dim)
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def of_length(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """float32 `[length, 1, head_dim / 2]` twice, replicated where `like` is distributed."""
        if length not in self._tables:
            angles = numpy.outer(numpy.arange(length), self.frequencies)[:, None, :]
            tables = (numpy.cos(angles), numpy.sin(angles))
            cos, sin = (self.platform.from_numpy(table.astype(numpy.float32)) for table in tables)
            self._tables[length] = cos, sin
        cos, sin = self._tables[length]
        return replicate_like(cos, like), replicate_like(sin, like)


def rotate(platform: Platform, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` `[batch, length, heads, head_dim]` turned, in float32; the result has `x`'s dtype."""
    ops = platform.ops
    first, second = ops.chunk(ops.cast(x, platform.dtype("float32")), 2, -1)
    turned = (
        ops.sub(ops.mul(first, cos), ops.mul(second, sin)),
        ops.add(ops.mul(second, cos), ops.mul(first, sin)),
    )
    return ops.cast(ops.cat(turned, -1), x.dtype)
