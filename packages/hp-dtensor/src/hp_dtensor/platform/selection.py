"""Which platform to use: an explicit argument, else `HP_PLATFORM`, else the only one installed."""

from __future__ import annotations

import functools
import os

from hp_dtensor.exceptions import PlatformError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.plugins import plugin_manager


def get_platform(name: str | Platform | None = None) -> Platform:
    """The platform called `name` (or `name` itself when it is one). Asked for by name, only its framework is imported.

    Raises:
        PlatformError: none is installed, several are and none was chosen, there is none of that name, or its
            framework is missing or too old.
    """
    if isinstance(name, Platform):
        return name
    wanted = name or os.environ.get("HP_PLATFORM") or None
    if wanted is not None:
        return _named(wanted)
    available, errors = _platforms()
    if len(available) == 1:
        return next(iter(available.values()))
    raise PlatformError(_no_choice(available, errors))


def _named(wanted: str) -> Platform:
    found = _load(wanted) if wanted in _plugins() else None
    if isinstance(found, Platform) and found.name == wanted:
        return found
    available, errors = _platforms()
    if wanted in available:
        return available[wanted]
    if wanted in errors:
        raise PlatformError(f"platform {wanted!r} is installed but cannot be used: {errors[wanted]}")
    if isinstance(found, Platform):
        raise PlatformError(f"plugin {wanted!r} gives a platform that calls itself {found.name!r}; ask for that name.")
    if plugin_manager().has_plugin(wanted):
        raise PlatformError(f"plugin {wanted!r} is installed but gives no platform: it has no @hookimpl hp_platform().")
    found_names = ", ".join(sorted(available)) or "none"
    raise PlatformError(f"platform {wanted!r} is not installed; found: {found_names}. Install hp-platform-{wanted}.")


def _no_choice(available: dict[str, Platform], errors: dict[str, str]) -> str:
    broken = "".join(f"\n  {name}: {reason}" for name, reason in sorted(errors.items()))
    if available:
        names = ", ".join(sorted(available))
        return f"several platforms are installed ({names}); choose one with HP_PLATFORM or platform=.{broken}"
    if errors:
        return f"no installed platform can be used:{broken}"
    return "no platform is installed; install hp-platform-torch or hp-platform-mindspore (pip install)."


def _platforms() -> tuple[dict[str, Platform], dict[str, str]]:
    """Usable platforms by name, and by plugin name the reason of each one that is not."""
    available: dict[str, Platform] = {}
    errors: dict[str, str] = {}
    for plugin in _plugins():
        found = _load(plugin)
        if isinstance(found, Platform):
            available[found.name] = found
        else:
            errors[plugin] = found
    return available, errors


def _plugins() -> list[str]:
    return [found.plugin_name for found in plugin_manager().hook.hp_platform.get_hookimpls()]


@functools.cache
def _load(plugin: str) -> Platform | str:
    """A plugin's platform, or why it cannot be used."""
    manager = plugin_manager()
    others = [found for name, found in manager.list_name_plugin() if name != plugin]
    try:
        results = manager.subset_hook_caller("hp_platform", others)()
    except PlatformError as error:
        return str(error)
    except ImportError as error:
        return f"its hp_platform() does not import: {type(error).__name__}: {error}"
    if len(results) == 1 and isinstance(results[0], Platform):
        return results[0]
    return f"its hp_platform() must return a Platform, got {results[0] if results else None!r}"
