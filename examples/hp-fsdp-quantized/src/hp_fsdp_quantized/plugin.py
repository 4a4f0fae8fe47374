"""The plugin of this package, which hp-fsdp finds through the entry-point group `hp_fsdp`."""

from __future__ import annotations

from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.plugins import hookimpl
from hp_dtensor.platform.registry import Registry
from hp_fsdp_quantized.codecs import Float8, Int8
from hp_fsdp_quantized.communication import QuantizedCommunication


@hookimpl
def hp_fsdp_communication(registry: Registry) -> None:
    """Register the communications `int8` and `fp8`."""
    registry.add("int8", _int8)
    registry.add("fp8", _fp8)


def _int8(platform: Platform) -> QuantizedCommunication:
    return QuantizedCommunication(platform, Int8())


def _fp8(platform: Platform) -> QuantizedCommunication:
    return QuantizedCommunication(platform, Float8())
