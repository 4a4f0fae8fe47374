"""The plugins of hp_fsdp: implementations of sharded parameters on platforms, and named communications."""

from __future__ import annotations

import functools

import pluggy

from hp_dtensor.exceptions import PlatformError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.plugins import create_plugin_manager
from hp_dtensor.platform.registry import Registry, fill_registry
from hp_fsdp import hookspecs
from hp_fsdp.communication import Communication
from hp_fsdp.exceptions import FullyShardError
from hp_fsdp.storage import ParameterStorage


@functools.cache
def plugin_manager() -> pluggy.PluginManager:
    """Load the plugins of the entry-point group `hp_fsdp`, on first use.

    Raises:
        PluginError: a plugin does not import, or implements a hook that does not exist.
    """
    return create_plugin_manager("hp_fsdp", hookspecs)


@functools.cache
def get_storage(platform: Platform) -> ParameterStorage:
    """Return the implementation of sharded parameters on `platform`, from an installed plugin.

    Raises:
        PlatformError: no plugin of the entry-point group `hp_fsdp` has one.

    Examples:
        >>> isinstance(get_storage(platform), ParameterStorage)
        True
    """
    found: ParameterStorage | None = plugin_manager().hook.hp_fsdp_parameter(platform=platform)
    if found is None:
        raise PlatformError(
            f"no plugin implements sharded parameters on platform {platform.name!r} (entry-point group 'hp_fsdp', "
            "hook 'hp_fsdp_parameter'); is its package installed, and not excluded by HP_LOAD_PLUGINS?"
        )
    return found


def get_communication(choice: str | Communication, platform: Platform) -> Communication:
    """Return the communication registered under a name, or the given `Communication` itself.

    Raises:
        FullyShardError: an unknown name, a factory that returns something else, or neither a name nor a
            `Communication`.
    """
    if isinstance(choice, Communication):
        return choice
    if isinstance(choice, str):
        entry = communications().get(choice, platform.name)
        built = entry.build(platform)
        if not isinstance(built, Communication):
            raise FullyShardError(
                f"communication {choice!r} of {entry.origin}: expected a class or function that returns a "
                f"Communication of the platform, got a {type(built).__name__}"
            )
        return built
    raise FullyShardError(f"communication: expected a name or a Communication, got {type(choice).__name__}")


@functools.cache
def communications() -> Registry:
    """Return the communications that plugins have registered (hook `hp_fsdp_communication`), and `"default"`."""
    registry = Registry("communication", "hp_fsdp", FullyShardError)
    registry.add("default", Communication)
    return fill_registry(registry, plugin_manager(), "hp_fsdp_communication")
