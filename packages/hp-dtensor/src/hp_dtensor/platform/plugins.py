"""Plugin managers: one per component, all with the same rules.

`HP_LOAD_PLUGINS` (comma-separated entry-point names or distributions; empty: none) limits what is loaded;
`HP_TRACE_PLUGINS=1` prints every hook call with its result to standard error.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from types import ModuleType

import pluggy

from hp_dtensor.exceptions import PluginError

PROJECT_NAME = "hp"
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


def create_plugin_manager(group: str, hookspecs: ModuleType) -> pluggy.PluginManager:
    """A manager with every wanted plugin of the entry-point `group` loaded and checked against `hookspecs`.

    Raises:
        PluginError: a plugin does not import, or implements a hook that `hookspecs` does not have.
    """
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    for entry_point in _wanted_entry_points(group):
        manager.register(_load(entry_point, group), name=entry_point.name)
    _reject_unknown_hooks(manager, group)
    if os.environ.get("HP_TRACE_PLUGINS") == "1":
        _trace(manager, group)
    return manager


@functools.cache
def plugin_manager() -> pluggy.PluginManager:
    """hp_dtensor's own manager, made on first use."""
    from hp_dtensor.platform import hookspecs

    return create_plugin_manager("hp_dtensor", hookspecs)


def _wanted_entry_points(group: str) -> Iterator[importlib.metadata.EntryPoint]:
    limit = os.environ.get("HP_LOAD_PLUGINS")
    wanted = None if limit is None else {name.strip() for name in limit.split(",") if name.strip()}
    distributions: dict[str, str] = {}
    for entry_point in sorted(importlib.metadata.entry_points(group=group), key=lambda e: e.name):
        name, distribution = entry_point.name, _distribution(entry_point)
        if wanted is not None and not wanted & {name, distribution}:
            continue
        # A distribution may be found twice, through several entries of sys.path.
        first = distributions.get(name)
        if first is None:
            distributions[name] = distribution
            yield entry_point
        elif first != distribution:
            raise PluginError(
                f"distributions {first!r} and {distribution!r} both have a plugin {name!r} in group {group!r}; "
                f"uninstall one, or set HP_LOAD_PLUGINS to the distribution wanted"
            )


def _distribution(entry_point: importlib.metadata.EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist is not None else "unknown distribution"


def _load(entry_point: importlib.metadata.EntryPoint, group: str) -> object:
    try:
        return entry_point.load()
    except Exception as error:
        raise PluginError(
            f"plugin {entry_point.name!r} of distribution {_distribution(entry_point)!r} (entry-point group "
            f"{group!r}, {entry_point.value}) does not import: {type(error).__name__}: {error}. Repair or "
            "uninstall it, or set HP_LOAD_PLUGINS to the plugins wanted."
        ) from error


def _reject_unknown_hooks(manager: pluggy.PluginManager, group: str) -> None:
    known = ", ".join(
        sorted(name for name in vars(manager.hook) if name.startswith("hp_") and _has_spec(manager, name))
    )
    unknown = [
        f"{implementation.plugin_name!r} implements {name!r}"
        for name in sorted(vars(manager.hook))
        if not name.startswith("_") and not _has_spec(manager, name)
        for implementation in getattr(manager.hook, name).get_hookimpls()
        if not implementation.optionalhook
    ]
    if unknown:
        raise PluginError(f"unknown hooks in group {group!r}: {'; '.join(unknown)}. Known hooks: {known}.")


def _has_spec(manager: pluggy.PluginManager, name: str) -> bool:
    return bool(getattr(manager.hook, name).has_spec())


def _trace(manager: pluggy.PluginManager, group: str) -> None:
    def before(name: str, implementations: object, arguments: object) -> None:
        print(f"[hp] {group}: {name}({arguments})", file=sys.stderr)

    def after(outcome: pluggy.Result[object], name: str, implementations: object, arguments: object) -> None:
        result = outcome.exception or outcome.get_result()
        print(f"[hp] {group}: {name} -> {result!r}", file=sys.stderr)

    manager.add_hookcall_monitoring(before, after)
