"""The plugin manager of hp_moe."""

from __future__ import annotations

import functools

from hp_dtensor.platform.plugins import PluginManager, create_plugin_manager, hookimpl
from hp_moe import hookspecs

__all__ = ["hookimpl", "plugin_manager"]


@functools.cache
def plugin_manager() -> PluginManager:
    """Return hp_moe's plugin manager, created on first use."""
    return create_plugin_manager("hp_moe", hookspecs)
