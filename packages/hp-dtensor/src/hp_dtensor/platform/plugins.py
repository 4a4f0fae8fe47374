"""Plugin managers: each component has one, and all follow the same rules.

`HP_LOAD_PLUGINS` limits the plugins that are loaded: comma-separated names of entry points or distributions, where an
empty value means none. `HP_TRACE_PLUGINS=1` prints every hook call and its result to standard error.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pluggy

from hp_dtensor.exceptions import HPError, PlatformError, PluginError
from hp_dtensor.platform import hookspecs

PROJECT_NAME = "hp"
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


class PluginManager(pluggy.PluginManager):
    """pluggy's manager with errors that name the plugin, its distribution and the hook.

    Attributes:
        group: its entry-point group.
        distributions: plugin name -> its distribution, except for plugins registered in code.
    """

    def __init__(self, group: str, specs: ModuleType) -> None:
        super().__init__(PROJECT_NAME)
        self.group = group
        self.distributions: dict[str, str] = {}
        self.add_hookspecs(specs)

    def register(self, plugin: Any, name: str | None = None) -> str | None:
        """Register a plugin, so that errors of its hooks name it; unknown arguments raise a PluginError."""
        try:
            registered = super().register(plugin, name)
        except pluggy.PluginValidationError as error:
            problem = self._unknown_arguments(plugin) or str(error)
            raise PluginError(f"{origin_of(self, str(name))} (group {self.group!r}): {problem}") from error
        for caller in self.get_hookcallers(plugin) or ():
            for implementation in caller.get_hookimpls():
                # Wrappers are generators: their errors are raised after the call that creates them, where a guard would
                # not see them.
                if implementation.plugin is plugin and not (implementation.wrapper or implementation.hookwrapper):
                    # Wrapped once at registration and not at each call, because hooks are also called in hot code.
                    guarded = _guarded(implementation.function, f"{origin_of(self, str(registered))}", caller.name)
                    implementation.function = guarded  # type: ignore[misc]
        return registered

    def _unknown_arguments(self, plugin: Any) -> str | None:
        """Return a message about the first hook of `plugin` with arguments that the specification lacks."""
        for name in dir(plugin):
            spec = getattr(getattr(self.hook, name, None), "spec", None)
            if spec is None or self.parse_hookimpl_opts(plugin, name) is None:
                continue
            arguments = inspect.signature(getattr(plugin, name)).parameters.values()
            unknown = [x.name for x in arguments if x.default is x.empty and x.name not in spec.argnames]
            if unknown:
                known = ", ".join(spec.argnames)
                return f"hook {name} is called as {name}({known}), without {', '.join(map(repr, unknown))}"
        return None


def _guarded(function: Callable[..., Any], origin: str, hook: str) -> Callable[..., Any]:
    """Return a hook whose errors become `PluginError`s that name the plugin, but for `HPError`s, which get a note."""

    @functools.wraps(function)
    # By position only: pluggy has read the names of the arguments from the original function at registration.
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except HPError as error:
            error.add_note(f"raised by hook {hook}() of {origin}")
            raise
        except Exception as error:
            # The first frame is this one.
            frames = traceback.extract_tb(error.__traceback__)[1:]
            where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
            raise PluginError(f"{origin}: hook {hook}() raised {type(error).__name__}: {error}{where}") from error

    return call


def origin_of(manager: pluggy.PluginManager, plugin: str) -> str:
    """Return how messages name a plugin: `plugin 'q8' of distribution 'hp-q8'`."""
    distribution = getattr(manager, "distributions", {}).get(plugin)
    return f"plugin {plugin!r}" + (f" of distribution {distribution!r}" if distribution else "")


class PluginHook(NamedTuple):
    """One plugin's implementation of a hook.

    Attributes:
        name: name of the plugin.
        call: calls this implementation only, with the hook's arguments by keyword. It returns what pluggy returns for
            one plugin: a list of one result (empty for None), or the result itself if the hook is `firstresult`.
    """

    name: str
    call: Callable[..., Any]


def call_each(manager: pluggy.PluginManager, hook: str) -> Iterator[PluginHook]:
    """Yield every plugin's implementation of `hook`, in order of registration."""
    # `manager.hook` would call all of them and return bare results, from which no message could name the plugin.
    plugins = manager.list_name_plugin()
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        others = [plugin for _, plugin in plugins if plugin is not implementation.plugin]
        yield PluginHook(implementation.plugin_name, manager.subset_hook_caller(hook, remove_plugins=others))


def create_plugin_manager(group: str, specs: ModuleType) -> PluginManager:
    """Return a manager with the plugins of an entry-point group loaded and checked against `specs`.

    Raises:
        PluginError: a plugin cannot be imported, implements no hook or an unknown one, or has a hook with unknown
            arguments.
    """
    manager = PluginManager(group, specs)
    for entry_point in _wanted_entry_points(group):
        manager.distributions[entry_point.name] = _distribution(entry_point)
        manager.register(_load(entry_point, group), name=entry_point.name)
    _reject_unknown_hooks(manager, group)
    _reject_plugins_without_hooks(manager, group)
    if os.environ.get("HP_TRACE_PLUGINS") == "1":
        _trace(manager, group)
    return manager


@functools.cache
def plugin_manager() -> PluginManager:
    """Return the plugin manager of hp_dtensor, created on first use."""
    return create_plugin_manager("hp_dtensor", hookspecs)


def check_version(framework: str, minimum: tuple[int, int], beside: str = "") -> None:
    """Check from package metadata, without an import, that a platform's framework is installed.

    Args:
        minimum: the oldest supported release, as (major, minor).
        beside: further requirements for the pip command in the message, such as `"'numpy<2'"`.

    Raises:
        PlatformError: the framework is missing or too old.
    """
    wanted = f"{framework} >= {minimum[0]}.{minimum[1]}"
    install = f"'{wanted.replace(' ', '')}'" + (f" {beside}" if beside else "")
    # From metadata, because an old framework may fail while it is imported.
    try:
        found = importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        raise PlatformError(
            f"{framework} is not installed; the {framework} platform needs {wanted}: pip install {install}"
        ) from None
    if release_of(found) < minimum:
        raise PlatformError(
            f"{framework} {found} is too old; the {framework} platform needs {wanted}: pip install --upgrade {install}"
        )


def release_of(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as `2.11.0+cpu`."""
    major, minor, *_ = version.split(".")
    # The minor part may carry a suffix, as in `2.9dev` and `2.9rc1`.
    return int(major), int("".join(itertools.takewhile(str.isdigit, minor)) or 0)


def _wanted_entry_points(group: str) -> Iterator[importlib.metadata.EntryPoint]:
    """Yield the entry points of a group that `HP_LOAD_PLUGINS` admits, sorted by name."""
    limit = os.environ.get("HP_LOAD_PLUGINS")
    wanted = None if limit is None else {name.strip() for name in limit.split(",") if name.strip()}
    distributions: dict[str, str] = {}
    # Sorted, because their order follows the search path and the file system, and ranks must not differ in it.
    for entry_point in sorted(importlib.metadata.entry_points(group=group), key=lambda e: e.name):
        name, distribution = entry_point.name, _distribution(entry_point)
        if wanted is not None and not wanted & {name, distribution}:
            continue
        # The same distribution may be found twice, through several entries of sys.path.
        first = distributions.get(name)
        if first is None:
            distributions[name] = distribution
            yield entry_point
        elif first != distribution:
            raise PluginError(
                f"distributions {first!r} and {distribution!r} both have a plugin {name!r} in group {group!r}; "
                f"uninstall one, or set HP_LOAD_PLUGINS to the one to load"
            )


def _distribution(entry_point: importlib.metadata.EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist is not None else "unknown distribution"


def _load(entry_point: importlib.metadata.EntryPoint, group: str) -> object:
    try:
        return entry_point.load()
    except Exception as error:
        raise PluginError(
            f"plugin {entry_point.name!r} of distribution {_distribution(entry_point)!r} (entry-point group "
            f"{group!r}, {entry_point.value}) cannot be imported: {type(error).__name__}: {error}. Repair or "
            "uninstall it, or set HP_LOAD_PLUGINS to the plugins to load."
        ) from error


def _reject_plugins_without_hooks(manager: pluggy.PluginManager, group: str) -> None:
    for name, plugin in manager.list_name_plugin():
        if not manager.get_hookcallers(plugin):
            # The usual mistake: pluggy ignores a function of the right name without a mark.
            unmarked = [hook for hook in _known_hooks(manager) if callable(getattr(plugin, hook, None))]
            found = f" ({', '.join(unmarked)} is not marked)" if unmarked else ""
            raise PluginError(
                f"{origin_of(manager, name)} implements no hook of group {group!r}: expected a function with the name "
                f"of a hook marked @hookimpl (hp_dtensor.hookimpl), got none in {plugin!r}"
                f"{found}. Known hooks: {', '.join(_known_hooks(manager))}."
            )


def _known_hooks(manager: pluggy.PluginManager) -> list[str]:
    return sorted(name for name in vars(manager.hook) if name.startswith("hp_") and _has_spec(manager, name))


def _reject_unknown_hooks(manager: pluggy.PluginManager, group: str) -> None:
    known = ", ".join(_known_hooks(manager))
    unknown = [
        f"{origin_of(manager, implementation.plugin_name)} implements {name!r}"
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
    """Print every hook call and its result to standard error."""

    def before(name: str, implementations: object, arguments: object) -> None:
        print(f"[hp] {group}: {name}({arguments})", file=sys.stderr)

    def after(outcome: pluggy.Result[object], name: str, implementations: object, arguments: object) -> None:
        result = outcome.exception or outcome.get_result()
        print(f"[hp] {group}: {name} -> {result!r}", file=sys.stderr)

    manager.add_hookcall_monitoring(before, after)
