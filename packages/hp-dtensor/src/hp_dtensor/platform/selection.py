"""`get_platform`: the platform of an argument, else of `HP_PLATFORM`, else the only installed one."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import os
from typing import Any

from hp_dtensor.exceptions import PlatformError, PluginError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.plugins import call_each, origin_of, plugin_manager


def get_platform(name: str | Platform | None = None) -> Platform:
    """Return the platform called `name`, or `name` itself if it is a platform.

    With a name, only that platform's framework is imported.

    Args:
        name: default: the value of `HP_PLATFORM`, else the only installed platform.

    Raises:
        PlatformError: no platform is installed, several are and none was chosen, the name is unknown (the message
            suggests the nearest one), or the framework is missing or too old.

    Examples:
        >>> get_platform().name in ("torch", "mindspore")
        True
    """
    if isinstance(name, Platform):
        return name
    # An empty variable counts as unset.
    wanted = name or os.environ.get("HP_PLATFORM") or None
    if wanted is not None:
        return _named(wanted, "" if name else "HP_PLATFORM: ")
    available, errors = _platforms()
    if len(available) == 1:
        return next(iter(available.values()))
    raise PlatformError(_no_choice(available, errors))


def platform_here() -> Platform | None:
    """Return the selected platform. If several could be meant, return the only one that has joined a job, else None."""
    try:
        return get_platform()
    except PlatformError:
        joined = [each for each in _platforms()[0].values() if each.world is not None]
        return joined[0] if len(joined) == 1 else None


def platform_of(module: Any, platform: Platform | str | None = None) -> Platform:
    """Return `platform` if given, else that of a module of `hp_dtensor.nn`, else the selected one (`get_platform`)."""
    if platform is None and isinstance(own := getattr(module, "platform", None), Platform):
        return own
    return get_platform(platform)


def platform_of_tensor(x: Any) -> Platform:
    """Return the platform of the framework that made the plain tensor `x`, else the selected one (`get_platform`)."""
    # All bases, because a user's subclass of a tensor is defined in the user's module. Names suffice, so no framework
    # is imported to find out.
    name = _framework_among(tuple(base.__module__.partition(".")[0] for base in type(x).__mro__))
    return get_platform() if name is None else _named(name, "")


@functools.cache
def _framework_among(roots: tuple[str, ...]) -> str | None:
    """Return the first of these top-level packages that is the name of a platform's plugin."""
    return next((root for root in roots if root in platform_plugins()), None)


def _named(wanted: str, source: str) -> Platform:
    """Return the platform called `wanted`. Error messages start with `source`, the origin of the name."""
    # The plugin of that name first: with two frameworks installed, importing the other one as well takes seconds.
    found = _load(wanted) if wanted in platform_plugins() else None
    if isinstance(found, Platform) and found.name == wanted:
        return found
    available, errors = _platforms()
    if wanted in available:
        return available[wanted]
    if wanted in errors:
        raise PlatformError(f"{source}platform {wanted!r} is installed but cannot be used: {errors[wanted]}")
    origin = origin_of(plugin_manager(), wanted)
    if isinstance(found, Platform):
        raise PlatformError(f"{source}{origin} provides a platform called {found.name!r}; use that name.")
    if plugin_manager().has_plugin(wanted):
        raise PlatformError(
            f"{source}{origin} is installed but provides no platform: it has no @hookimpl hp_platform()."
        )
    installed = sorted({*available, *errors})
    names = ", ".join(installed) or "none"
    nearest = difflib.get_close_matches(wanted, installed, n=1)
    install = f"Install its package, usually hp-platform-{wanted}.{_limit()}"
    hint = f"Did you mean {nearest[0]!r}?" if nearest else install
    raise PlatformError(f"{source}platform {wanted!r} is not installed; found: {names}. {hint}")


def _limit() -> str:
    """Return a sentence for messages if `HP_LOAD_PLUGINS` may exclude a platform that is installed, else nothing."""
    limit = os.environ.get("HP_LOAD_PLUGINS")
    return "" if limit is None else f" Only the plugins of HP_LOAD_PLUGINS={limit!r} are loaded."


def _no_choice(available: dict[str, Platform], errors: dict[str, str]) -> str:
    broken = "".join(f"\n  {name}: {reason}" for name, reason in sorted(errors.items()))
    if available:
        names = ", ".join(sorted(available))
        return f"several platforms are installed ({names}); choose one with HP_PLATFORM or platform=.{broken}"
    if errors:
        return f"no installed platform can be used:{broken}"
    return (
        "no platform is installed; install the package of your framework, usually hp-platform-FRAMEWORK (pip install; "
        f"from a clone: pip install ./packages/hp-platform-FRAMEWORK).{_limit()}"
    )


def _platforms() -> tuple[dict[str, Platform], dict[str, str]]:
    """Return the usable platforms by name, and the errors of the others by plugin name."""
    available: dict[str, Platform] = {}
    errors: dict[str, str] = {}
    for plugin in platform_plugins():
        found = _load(plugin)
        if isinstance(found, Platform):
            available[found.name] = found
        else:
            errors[plugin] = found
    return available, errors


def platform_plugins() -> list[str]:
    """Return the names of the plugins with a platform, by convention those of their frameworks' top-level packages."""
    return [found.plugin_name for found in plugin_manager().hook.hp_platform.get_hookimpls()]


def registrant_of(name: str) -> str | None:
    """Return how messages name the plugin with this name, or with a platform of this name, or None."""
    # From metadata, because `HP_LOAD_PLUGINS` hides plugins that are installed.
    for entry_point in importlib.metadata.entry_points(group="hp_dtensor", name=name):
        return f"plugin {name!r}" + (f" of distribution {entry_point.dist.name!r}" if entry_point.dist else "")
    loaded = ((plugin, _load(plugin)) for plugin in platform_plugins())
    named = (plugin for plugin, found in loaded if isinstance(found, Platform) and found.name == name)
    return next((origin_of(plugin_manager(), plugin) for plugin in named), None)


@functools.cache
def _load(plugin: str) -> Platform | str:
    """Return a plugin's platform, or the reason why it cannot be used."""
    # Cached, because the hook's specification promises one call, and importing a framework takes seconds.
    manager = plugin_manager()
    hook = next(each for each in call_each(manager, "hp_platform") if each.name == plugin)
    try:
        results = hook.call()
    # One broken platform must not make the others unusable. The reason is reported when it is asked for by name.
    except (PlatformError, PluginError) as error:
        return str(error)
    if len(results) == 1 and isinstance(results[0], Platform):
        return results[0]
    got = repr(results[0]) if results else "None"
    return f"{origin_of(manager, plugin)}: hook hp_platform() must return a Platform, got {got}"
