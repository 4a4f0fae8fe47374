"""Device meshes, placements, layouts, DTensor, sharding rules and redistribution, on any platform."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hp_dtensor.api import distribute_tensor, from_local, full_tensor, replicate_like
    from hp_dtensor.dtensor import DTensor
    from hp_dtensor.mesh import DeviceMesh, init_device_mesh
    from hp_dtensor.placements import Partial, Placement, RaggedShard, Replicate, Shard
    from hp_dtensor.platform import Platform
    from hp_dtensor.plugins import hookimpl
    from hp_dtensor.redistribute import plan_redistribute
    from hp_dtensor.selection import get_platform
    from hp_dtensor.spec import TensorSpec
    from hp_dtensor.world import ProcessGroup, World, current_world, fake_world, record_collectives

_HOMES = {
    "api": ("distribute_tensor", "from_local", "full_tensor", "replicate_like"),
    "dtensor": ("DTensor",),
    "mesh": ("DeviceMesh", "init_device_mesh"),
    "placements": ("Partial", "Placement", "RaggedShard", "Replicate", "Shard"),
    "platform": ("Platform",),
    "plugins": ("hookimpl",),
    "redistribute": ("plan_redistribute",),
    "selection": ("get_platform",),
    "spec": ("TensorSpec",),
    "world": ("ProcessGroup", "World", "current_world", "fake_world", "record_collectives"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Platform",
    "ProcessGroup",
    "RaggedShard",
    "Replicate",
    "Shard",
    "TensorSpec",
    "World",
    "current_world",
    "distribute_tensor",
    "fake_world",
    "from_local",
    "full_tensor",
    "get_platform",
    "hookimpl",
    "init_device_mesh",
    "plan_redistribute",
    "record_collectives",
    "replicate_like",
]


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that importing the package stays cheap."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
