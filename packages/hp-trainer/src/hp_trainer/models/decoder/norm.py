"""Normalization of the decoder."""

from __future__ import annotations

from typing import Any

from hp_dtensor.parallel import nn
from hp_trainer.models.decoder.config import DecoderConfig

Tensor = Any


class UnitOffsetRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, as Gemma does, so that weights near 0 change little."""

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.ops.add(self.weight, 1.0), self.eps)


def build_norm(config: DecoderConfig, dim: int) -> Any:
    """Return the normalization over a last dimension of width `dim` that the configuration asks for."""
    kind = UnitOffsetRMSNorm if config.norm_unit_offset else nn.RMSNorm
    return kind(dim, config.rms_norm_eps)
