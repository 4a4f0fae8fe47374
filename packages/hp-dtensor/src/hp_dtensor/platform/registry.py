"""Registries of named objects from plugins: communications, token dispatchers, models, datasets, optimizers, trackers.

`fill_registry` calls the hook of each plugin separately, so that an entry and every error about it name the plugin.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import pluggy

from hp_dtensor.exceptions import HPError, RegistryError
from hp_dtensor.platform.plugins import call_each, origin_of


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Options of an entry without options."""


@dataclass(frozen=True)
class Entry:
    """One entry of a registry.

    Attributes:
        name: its name in configurations and arguments.
        build: creates the object. The registry's hook specification states its arguments.
        options: frozen, keyword-only dataclass with the schema of its options, without `name`.
        platform: name of the only supported platform. None: any platform.
        plugin: name of the plugin that registered it.
        origin: description of that plugin for messages: `plugin 'q8' of distribution 'hp-q8'`.
    """

    name: str
    build: Callable[..., Any]
    options: type
    platform: str | None
    plugin: str
    origin: str


class Registry:
    """Entries of one kind, by name and platform.

    Args:
        kind: the kind of entry for messages, such as `token dispatcher`.
        owner: the package that registers entries outside of `registering`.
        error: the exception for invalid names and entries.
    """

    def __init__(self, kind: str, owner: str, error: type[HPError] = RegistryError) -> None:
        self.kind = kind
        self.a_kind = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        self._error = error
        self._entries: dict[tuple[str, str | None], Entry] = {}
        self._plugin, self._origin = owner, f"plugin {owner!r}"

    def add(
        self,
        name: str,
        build: Callable[..., Any],
        *,
        options: type = NoOptions,
        platform: str | None = None,
    ) -> None:
        """Register an entry.

        Raises:
            RegistryError (or the registry's `error`): the name is not a string, `build` is not callable, the name is
                taken for this platform, `options` is not a dataclass, or the name has other options on another
                platform.
        """
        if not isinstance(name, str) or not callable(build):
            raise self._error(
                f"{self.kind} of {self._origin}: expected add(name, build) with a string and a callable, got "
                f"{name!r} and {build!r}"
            )
        if not (isinstance(options, type) and is_dataclass(options)):
            raise self._error(f"{self.kind} {name!r} of {self._origin}: options must be a dataclass, got {options!r}")
        for other in self._named(name):
            if other.platform == platform:
                raise self._error(
                    f"{self.kind} {name!r} is registered by {other.origin} and again by {self._origin}; "
                    "rename one of them"
                )
            # One schema for a name: a configuration is checked without its platform.
            if other.options is not options:
                raise self._error(
                    f"{self.kind} {name!r} has other options in {other.origin} than in {self._origin}; one name has "
                    "one schema on every platform"
                )
        self._entries[name, platform] = Entry(name, build, options, platform, self._plugin, self._origin)

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted({name for name, _ in self._entries})

    def options(self, name: str) -> type:
        """Return the options dataclass of a name, which is the same on every platform.

        Raises:
            RegistryError (or the registry's `error`): the name is unknown.
        """
        return self._require(name)[0].options

    def get(self, name: str, platform: str | None = None) -> Entry:
        """Return the entry for a platform, else the one for any platform.

        Raises:
            RegistryError (or the registry's `error`): the name is unknown (the message suggests the nearest one), or it
                has no entry for this platform.
        """
        entries = {entry.platform: entry for entry in self._require(name)}
        # An entry for one platform goes before the general one, so a framework may have its own faster version.
        entry = entries.get(platform) or entries.get(None)
        if entry is None:
            found = ", ".join(sorted(str(key) for key in entries))
            raise self._error(f"{self.kind} {name!r} exists for {found} only, not for platform {platform!r}")
        return entry

    def suggest(self, name: str) -> str:
        """Return the registered name closest to `name`, or an empty string if none is close."""
        return next(iter(difflib.get_close_matches(name, self.names(), n=1)), "")

    @contextlib.contextmanager
    def registering(self, plugin: str, origin: str | None = None) -> Iterator[Registry]:
        """Attribute the entries added inside the block to `plugin`, which messages describe as `origin`."""
        # Restored rather than reset, so that blocks may be nested.
        before = self._plugin, self._origin
        self._plugin, self._origin = plugin, origin or f"plugin {plugin!r}"
        try:
            yield self
        finally:
            self._plugin, self._origin = before

    def _named(self, name: str) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.name == name]

    def _require(self, name: str) -> list[Entry]:
        entries = self._named(name)
        if not entries:
            known = ", ".join(self.names()) or "none"
            nearest = self.suggest(name)
            hint = f". Did you mean {nearest!r}?" if nearest else ""
            raise self._error(f"no {self.kind} is called {name!r}; known: {known}{hint}")
        return entries


def fill_registry(registry: Registry, manager: pluggy.PluginManager, hook: str) -> Registry:
    """Call `hook(registry=registry)` of each plugin, so that entries name their plugin, and return the registry."""
    for plugin in call_each(manager, hook):
        with registry.registering(plugin.name, origin_of(manager, plugin.name)):
            plugin.call(registry=registry)
    return registry
