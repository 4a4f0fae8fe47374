"""Attention: one function on plain tensors and DTensors."""

from hp_dtensor.parallel.attention.dropout import AttentionDropout
from hp_dtensor.parallel.attention.function import attention
from hp_dtensor.parallel.attention.mask import AttentionMask

__all__ = ["AttentionDropout", "AttentionMask", "attention"]
