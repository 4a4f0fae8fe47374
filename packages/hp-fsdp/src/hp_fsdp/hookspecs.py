"""Hook specifications of hp_fsdp (entry-point group `hp_fsdp`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform
    from hp_fsdp.communication import CommunicationRegistry
    from hp_fsdp.storage import ParameterStorage

hookspec = pluggy.HookspecMarker("hp")


@hookspec(firstresult=True)
def hp_fsdp_parameter(platform: Platform) -> ParameterStorage | None:
    """Called once per platform, by the first `fully_shard` on a mesh of that platform.

    Returns the platform's implementation of sharded parameters, or None where `platform` is not this
    plugin's. Since 0.1.
    """


@hookspec
def hp_fsdp_communication(registry: CommunicationRegistry) -> None:
    """Called once, when the first `fully_shard` resolves its communication.

    Adds named ways of gathering and reducing with `registry.add(name, factory)`, to be chosen by
    `fully_shard(..., communication=name)`. Since 0.1.
    """
