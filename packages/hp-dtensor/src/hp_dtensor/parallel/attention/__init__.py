"""Attention: one function on plain tensors and DTensors."""

from hp_dtensor.parallel.attention.function import attention
from hp_dtensor.parallel.attention.mask import AttentionMask

__all__ = ["AttentionMask", "attention"]
