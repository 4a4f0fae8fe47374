"""Token dispatchers by name: the built-in one and those of plugins."""

from __future__ import annotations

import functools

from hp_dtensor.platform.registry import Registry, fill_registry
from hp_moe.dispatch.all_gather import AllGatherDispatcher
from hp_moe.dispatch.all_to_all import AllToAllDispatcher
from hp_moe.dispatch.auto import AutoDispatcher
from hp_moe.dispatch.copy_per_expert import CopyPerExpertDispatcher
from hp_moe.exceptions import ExpertParallelError
from hp_moe.plugins import plugin_manager


@functools.cache
def dispatchers() -> Registry:
    """Return the registry of token dispatchers, filled on first use.

    An entry's `build(group, num_experts)` makes the `TokenDispatcher` of a process group.
    """
    registry = Registry("token dispatcher", "hp_moe", ExpertParallelError)
    registry.add("all_to_all", AllToAllDispatcher)
    registry.add("copy_per_expert", CopyPerExpertDispatcher)
    registry.add("all_gather", AllGatherDispatcher)
    for name in ("int8", "fp8"):
        registry.add(f"all_to_all_{name}", functools.partial(AllToAllDispatcher, wire_format=name))
    registry.add("auto", AutoDispatcher)
    return fill_registry(registry, plugin_manager(), "hp_token_dispatcher")
