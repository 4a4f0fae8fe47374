"""Named things that plugins provide: models, datasets, optimizers, trackers, checkpoint storages."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

from hp_trainer.exceptions import RegistryError


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of an entry that has none."""


@dataclass(frozen=True)
class Entry:
    """One named thing.

    Attributes:
        name: what the configuration writes.
        build: makes it; its arguments are those that the registry's hook states.
        options: frozen, keyword-only dataclass: the schema of its section of the configuration, `name` aside.
        platform: name of the only platform it works on; None: any.
        plugin: who registered it.
    """

    name: str
    build: Callable[..., Any]
    options: type
    platform: str | None
    plugin: str


class Registry:
    """Entries of one kind, by name and, where they differ, by platform."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.a_kind = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        self._entries: dict[tuple[str, str | None], Entry] = {}
        self._plugin = "hp_trainer"

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
            RegistryError: the name is taken for this platform, `options` is no dataclass, or it differs from
                the options that the same name has on another platform.
        """
        if not is_dataclass(options):
            raise RegistryError(
                f"{self.kind} {name!r} of plugin {self._plugin!r}: options must be a dataclass, got {options!r}"
            )
        for other in self._named(name):
            if other.platform == platform:
                raise RegistryError(
                    f"{self.kind} {name!r} is registered by plugin {other.plugin!r} and again by "
                    f"{self._plugin!r}; rename one of them"
                )
            if other.options is not options:
                raise RegistryError(
                    f"{self.kind} {name!r} has other options in plugin {other.plugin!r} than in "
                    f"{self._plugin!r}; one name has one schema on every platform"
                )
        self._entries[name, platform] = Entry(name, build, options, platform, self._plugin)

    def names(self) -> list[str]:
        """Every name, sorted."""
        return sorted({name for name, _ in self._entries})

    def options(self, name: str) -> type:
        """The dataclass of a name's options, the same on every platform.

        Raises:
            RegistryError: the name is unknown.
        """
        return self._require(name)[0].options

    def get(self, name: str, platform: str | None = None) -> Entry:
        """The entry for a platform, else the one for any platform.

        Raises:
            RegistryError: the name is unknown, or there is none for this platform.
        """
        entries = {entry.platform: entry for entry in self._require(name)}
        entry = entries.get(platform) or entries.get(None)
        if entry is None:
            found = ", ".join(sorted(str(key) for key in entries))
            raise RegistryError(f"{self.kind} {name!r} exists for {found} only, not for platform {platform!r}")
        return entry

    def suggest(self, name: str) -> str:
        """The registered name closest to `name`, or nothing."""
        return next(iter(difflib.get_close_matches(name, self.names(), n=1)), "")

    @contextlib.contextmanager
    def registering(self, plugin: str) -> Iterator[Registry]:
        """Entries added inside the block belong to `plugin`."""
        before, self._plugin = self._plugin, plugin
        try:
            yield self
        finally:
            self._plugin = before

    def _named(self, name: str) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.name == name]

    def _require(self, name: str) -> list[Entry]:
        entries = self._named(name)
        if not entries:
            known = ", ".join(self.names()) or "none is registered"
            raise RegistryError(f"no {self.kind} is called {name!r}; known: {known}")
        return entries
