"""Hook specifications of hp_fsdp (entry-point group `hp_fsdp`)."""

from __future__ import annotations

import pluggy

from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.registry import Registry
from hp_fsdp.storage import ParameterStorage

hookspec = pluggy.HookspecMarker("hp")


@hookspec(firstresult=True)
def hp_fsdp_parameter(platform: Platform) -> ParameterStorage | None:
    """Return the implementation of sharded parameters on `platform`, or None if the plugin does not support it.

    Called once per platform, by the first `fully_shard` on a mesh of that platform. Since 0.1.
    """


@hookspec
def hp_fsdp_communication(registry: Registry) -> None:
    """Add communications with `registry.add(name, factory)`, which `fully_shard(communication=name)` selects.

    `factory(platform)` returns a `hp_fsdp.Communication`. Called once, when the first `fully_shard` resolves its
    communication. Since 0.1.
    """
