"""Rows in fewer bits on their way to the experts: blocks of a row, each with a scale."""

from __future__ import annotations

from typing import Any, Protocol

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import Platform
from hp_moe.exceptions import ExpertParallelError
from hp_moe.plugins import plugin_manager

Tensor = Any
BLOCK = 128


class WireFormat(Protocol):
    """A platform's way to write rows in 8 bits, as the hook `hp_wire_format` returns it."""

    def encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return int8 codes like `blocks`, float32 `[rows, blocks, width]`, and scales float32 `[rows, blocks, 1]`."""

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return float32 `[rows, blocks, width]`."""


class Int8Format:
    """Whole numbers from -127 to 127 times the largest magnitude of the block over 127; the error is half a step."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    def encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        ops = self.platform.ops
        scales = ops.div(ops.amax(ops.abs(blocks), 2, keepdim=True), 127.0)
        # A block of zeros has a scale of zero; any divisor does.
        steps = ops.div(blocks, ops.where(ops.gt(scales, 0.0), scales, ops.ones_like(scales)))
        # A cast cuts off: half a step away from zero rounds.
        half = ops.sub(ops.cast(ops.ge(steps, 0.0), steps.dtype), 0.5)
        return ops.cast(ops.add(steps, half), self.platform.dtype("int8")), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return self.platform.ops.mul(self.platform.ops.cast(codes, scales.dtype), scales)


def find_wire_format(platform: Platform, name: str) -> WireFormat:
    """Return the format of this name.

    Raises:
        CapabilityError: the platform has no such format.
        ExpertParallelError: there is no such name.
    """
    if name == "int8":
        return Int8Format(platform)
    if name != "fp8":
        raise ExpertParallelError(f"wire_format must be 'int8', 'fp8' or None, got {name!r}")
    found: WireFormat | None = plugin_manager().hook.hp_wire_format(platform=platform, name=name)
    if found is None:
        raise CapabilityError(f"platform {platform.name!r} has no wire format {name!r}; use 'int8' or None")
    return found


def block_width(dim: int) -> int:
    """Return the width of a row's blocks: 128, or the whole row where that does not divide it."""
    return BLOCK if dim % BLOCK == 0 else dim
