"""Implementations of hp-moe's hooks for torch, loaded through the entry-point group `hp_moe`.

Importing this module imports no framework: a check of a configuration loads it for the names of the dispatchers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hp_dtensor.platform.interface import Platform
from hp_moe.plugins import hookimpl

if TYPE_CHECKING:
    from hp_moe import FusedExperts, GroupedMatmul


@hookimpl
def hp_grouped_matmul(platform: Platform) -> GroupedMatmul | None:
    """Return torch's grouped product; None for other platforms."""
    if platform.name != "torch":
        return None
    from hp_platform_torch.moe.operations import torch_grouped_matmul

    return torch_grouped_matmul


@hookimpl
def hp_fused_experts(platform: Platform) -> FusedExperts | None:
    """Return the fused experts of torch; None for other platforms."""
    if platform.name != "torch":
        return None
    from hp_platform_torch.moe.operations import torch_fused_experts

    return torch_fused_experts()


@hookimpl
def hp_wire_format(platform: Platform, name: str) -> Any | None:
    """Return the wire format `fp8` in torch's `float8_e4m3fn`; None for other platforms and names."""
    if platform.name != "torch" or name != "fp8":
        return None
    from hp_platform_torch.moe.operations import Float8Format

    return Float8Format()
