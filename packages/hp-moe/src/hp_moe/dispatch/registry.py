"""Token dispatchers by name: the built-in one and those of plugins."""

from __future__ import annotations

import functools
from collections.abc import Callable

from hp_dtensor.comm.world import ProcessGroup
from hp_moe.dispatch.all_to_all import AllToAllDispatcher
from hp_moe.dispatch.base import TokenDispatcher
from hp_moe.exceptions import ExpertParallelError
from hp_moe.plugins import plugin_manager

BuildDispatcher = Callable[[ProcessGroup, int], TokenDispatcher]


class DispatcherRegistry:
    """Token dispatchers by name."""

    def __init__(self) -> None:
        self._builders: dict[str, BuildDispatcher] = {}

    def add(self, name: str, build: BuildDispatcher) -> None:
        """Register `build(group, num_experts)`.

        Raises:
            ExpertParallelError: the name is taken.
        """
        if name in self._builders:
            raise ExpertParallelError(f"a token dispatcher called {name!r} is registered already")
        self._builders[name] = build

    def build(self, name: str, group: ProcessGroup, num_experts: int) -> TokenDispatcher:
        """The dispatcher called `name` for a group.

        Raises:
            ExpertParallelError: no dispatcher has that name.
        """
        if name not in self._builders:
            known = ", ".join(sorted(self._builders))
            raise ExpertParallelError(f"no token dispatcher is called {name!r}; known: {known}")
        return self._builders[name](group, num_experts)


@functools.cache
def dispatchers() -> DispatcherRegistry:
    """The built-in dispatchers and those of plugins."""
    registry = DispatcherRegistry()
    registry.add("all_to_all", AllToAllDispatcher)
    plugin_manager().hook.hp_token_dispatcher(registry=registry)
    return registry
