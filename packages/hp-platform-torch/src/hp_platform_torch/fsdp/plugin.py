"""Plugin for hp-fsdp, loaded through the entry-point group `hp_fsdp`.

Importing this module does not import torch. The first `fully_shard` on a torch mesh does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_dtensor.platform.plugins import hookimpl

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform
    from hp_fsdp.storage import ParameterStorage


@hookimpl
def hp_fsdp_parameter(platform: Platform) -> ParameterStorage | None:
    """Return the storage of sharded parameters on torch. None for other platforms."""
    if platform.name != "torch":
        return None
    from hp_platform_torch.fsdp.storage import TorchParameterStorage

    return TorchParameterStorage(platform)
