"""The hooks with which MindSpore's platform serves hp-moe; loaded through the entry-point group `hp_moe`."""

from __future__ import annotations

from hp_dtensor.platform.interface import Platform
from hp_moe import GroupedMatmul, loop_grouped_matmul
from hp_moe.plugins import hookimpl


@hookimpl
def hp_grouped_matmul(platform: Platform) -> GroupedMatmul | None:
    """Return the loop of products for MindSpore's platform, whose CPU kernels have no grouped product; else None."""
    return loop_grouped_matmul if platform.name == "mindspore" else None
