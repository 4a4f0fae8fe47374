"""Quantized communication for hp-fsdp."""

from hp_fsdp_quantized.codecs import Codec, Float8, Int8
from hp_fsdp_quantized.communication import QuantizedCommunication

__all__ = ["Codec", "Float8", "Int8", "QuantizedCommunication"]
