"""Quantization of float32 blocks to one byte per value and one scale per block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import Platform

Tensor = Any


class Codec(ABC):
    """A conversion of scaled float32 values to bytes, and back.

    Attributes:
        largest: the largest value that a byte can represent. Each block is scaled such that its largest value becomes
            this one.
        dtype_name: dtype of the bytes.
    """

    largest: float
    dtype_name: str

    def check(self, platform: Platform) -> None:
        """Raise `CapabilityError` if the platform does not support the conversion."""

    @abstractmethod
    def to_bytes(self, platform: Platform, scaled: Tensor) -> Tensor:
        """Round float32 values of at most `largest` to the nearest byte."""

    @abstractmethod
    def from_bytes(self, platform: Platform, data: Tensor) -> Tensor:
        """Return the values of bytes in float32."""

    def encode(self, platform: Platform, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize float32 blocks; return (bytes `[blocks, size]`, float32 scales `[blocks, 1]`).

        The scale of a block with a value that is not finite is not finite either.
        """
        ops = platform.ops
        peaks = ops.amax(ops.abs(blocks), 1, True)
        # A maximum may ignore a NaN, but a sum does not.
        peaks = ops.add(peaks, ops.mul(ops.sum(blocks, 1, True), 0.0))
        scales = ops.div(ops.where(ops.eq(peaks, 0.0), ops.ones_like(peaks), peaks), self.largest)
        return self.to_bytes(platform, ops.div(blocks, scales)), scales

    def decode(self, platform: Platform, data: Tensor, scales: Tensor) -> Tensor:
        """Return the float32 blocks of a result of `encode`."""
        return platform.ops.mul(self.from_bytes(platform, data), scales)


class Int8(Codec):
    """255 equal steps per block. The error is at most half a step: the block's largest absolute value / 254."""

    largest = 127.0
    dtype_name = "int8"

    def to_bytes(self, platform: Platform, scaled: Tensor) -> Tensor:
        ops = platform.ops
        # A cast truncates towards zero. Adding half a step before rounds to the nearest.
        half = ops.where(ops.ge(scaled, 0.0), ops.full((1, 1), 0.5, scaled.dtype), ops.full((1, 1), -0.5, scaled.dtype))
        return ops.cast(ops.add(scaled, half), platform.dtype("int8"))

    def from_bytes(self, platform: Platform, data: Tensor) -> Tensor:
        return platform.ops.cast(data, platform.dtype("float32"))


class Float8(Codec):
    """float8 e4m3: four bits of precision over 15 powers of two. Better for blocks of values of very different size."""

    largest = 448.0
    dtype_name = "uint8"

    def check(self, platform: Platform) -> None:
        if platform.name != "torch":
            raise CapabilityError(
                f"platform {platform.name!r} cannot convert to float8_e4m3fn; use Int8() (communication='int8') there"
            )

    def to_bytes(self, platform: Platform, scaled: Tensor) -> Tensor:
        import torch

        # The division may round up beyond the largest value, which would become NaN.
        return scaled.clamp(-self.largest, self.largest).to(torch.float8_e4m3fn).view(torch.uint8)

    def from_bytes(self, platform: Platform, data: Tensor) -> Tensor:
        import torch

        return data.view(torch.float8_e4m3fn).to(torch.float32)
