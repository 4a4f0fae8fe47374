"""The plugin manager of hp_moe."""

from __future__ import annotations

import functools

from hp_dtensor.platform.plugins import PluginManager, create_plugin_manager, hookimpl

__all__ = ["hookimpl", "plugin_manager"]


@functools.cache
def plugin_manager() -> PluginManager:
    """Return hp_moe's plugin manager, made on first use.

    Raises:
        PluginError: a plugin does not import, or implements a hook that does not exist or
            with other arguments.
    """
    from hp_moe import hookspecs

    return create_plugin_manager("hp_moe", hookspecs)
