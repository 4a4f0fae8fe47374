"""Plugin for hp-fsdp, loaded through the entry-point group `hp_fsdp`.

Importing this module does not import MindSpore. The first `fully_shard` on a MindSpore mesh does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_dtensor.platform.plugins import hookimpl

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform
    from hp_fsdp.storage import ParameterStorage


@hookimpl
def hp_fsdp_parameter(platform: Platform) -> ParameterStorage | None:
    """Return the storage of sharded parameters on MindSpore. None for other platforms."""
    if platform.name != "mindspore":
        return None
    from hp_platform_mindspore.fsdp.storage import MindSporeParameterStorage

    return MindSporeParameterStorage(platform)
