"""Rotary positions (arXiv 2104.09864): pairs (i, i + head_dim / 2) turn with the token's position."""

from __future__ import annotations

from typing import Any

import numpy

from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import replicate_like

Tensor = Any


class RotaryTables:
    """Cosines and sines by length, made once each."""

    def __init__(self, platform: Platform, head_dim: int, theta: float) -> None:
        self.platform = platform
        self.frequencies = theta ** (-numpy.arange(0, head_dim, 2) / head_dim)
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def of_length(self, length: int, like: Tensor) -> Rotation:
        """Return the rotation of positions 0 .. length, replicated where `like` is distributed."""
        if length not in self._tables:
            angles = numpy.outer(numpy.arange(length), self.frequencies)[:, None, :]
            tables = (numpy.cos(angles), numpy.sin(angles))
            cos, sin = (self.platform.from_numpy(table.astype(numpy.float32)) for table in tables)
            self._tables[length] = cos, sin
        cos, sin = self._tables[length]
        return Rotation(self.platform, replicate_like(cos, like), replicate_like(sin, like))


class Rotation:
    """Turns queries and keys.

    An object rather than two tensors, so that mixed precision, which casts a module's inputs, leaves the
    angles of far positions exact.
    """

    __slots__ = ("cos", "platform", "sin")

    def __init__(self, platform: Platform, cos: Tensor, sin: Tensor) -> None:
        self.platform, self.cos, self.sin = platform, cos, sin

    def __call__(self, x: Tensor) -> Tensor:
        """Turn `x` `[batch, length, heads, head_dim]`, in float32; the result has `x`'s dtype."""
        ops = self.platform.ops
        first, second = ops.chunk(ops.cast(x, self.platform.dtype("float32")), 2, -1)
        turned = (
            ops.sub(ops.mul(first, self.cos), ops.mul(second, self.sin)),
            ops.add(ops.mul(second, self.cos), ops.mul(first, self.sin)),
        )
        return ops.cast(ops.cat(turned, -1), x.dtype)
