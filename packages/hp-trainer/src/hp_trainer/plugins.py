"""The plugin manager of hp_trainer: registries filled and life-cycle hooks resolved once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pluggy

from hp_dtensor.platform.plugins import create_plugin_manager, hookimpl
from hp_trainer import hookspecs
from hp_trainer.registry import Registry

__all__ = ["LifeCycle", "Registries", "hookimpl", "life_cycle", "plugin_manager", "registries"]


@dataclass(frozen=True)
class Registries:
    """One registry per kind of thing that a configuration names."""

    models: Registry
    datasets: Registry
    optimizers: Registry
    trackers: Registry
    checkpoint_storages: Registry


_KINDS = {
    "models": "model",
    "datasets": "dataset",
    "optimizers": "optimizer",
    "trackers": "tracker",
    "checkpoint_storages": "checkpoint storage",
}

Caller = Callable[[Any], None]


@dataclass(frozen=True)
class LifeCycle:
    """The life-cycle hooks, resolved: each takes its record. One that nobody implements does nothing."""

    before_run: Caller
    after_run: Caller
    before_step: Caller
    after_step: Caller
    before_evaluation: Caller
    after_evaluation: Caller
    before_checkpoint: Caller
    after_checkpoint: Caller
    on_error: Caller


@functools.cache
def plugin_manager() -> pluggy.PluginManager:
    """hp_trainer's manager, made on first use: the built-in plugin, then those installed.

    Raises:
        PluginError: a plugin does not import, or implements a hook that does not exist.
    """
    from hp_trainer import builtin_plugin

    manager = create_plugin_manager("hp_trainer", hookspecs)
    manager.register(builtin_plugin, name="hp_trainer")
    return manager


@functools.cache
def registries() -> Registries:
    """The registries, filled by every plugin."""
    return fill_registries(plugin_manager())


@functools.cache
def life_cycle() -> LifeCycle:
    """The life-cycle hooks of every plugin."""
    return resolve_life_cycle(plugin_manager())


def fill_registries(manager: pluggy.PluginManager) -> Registries:
    """Fresh registries, filled by the plugins of `manager`."""
    filled = Registries(**{name: Registry(kind) for name, kind in _KINDS.items()})
    for field in fields(Registries):
        _register_all(manager, f"hp_{field.name}", getattr(filled, field.name))
    return filled


def _register_all(manager: pluggy.PluginManager, hook: str, registry: Registry) -> None:
    """Call each plugin by itself, so that an entry knows who registered it."""
    plugins = manager.get_plugins()
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        others = [plugin for plugin in plugins if plugin is not implementation.plugin]
        with registry.registering(implementation.plugin_name):
            manager.subset_hook_caller(hook, remove_plugins=others)(registry=registry)


def resolve_life_cycle(manager: pluggy.PluginManager) -> LifeCycle:
    """The life-cycle hooks of `manager`, so that a step looks nothing up."""
    return LifeCycle(**{field.name: _caller(manager, f"hp_{field.name}") for field in fields(LifeCycle)})


def _caller(manager: pluggy.PluginManager, hook: str) -> Caller:
    caller = getattr(manager.hook, hook)
    if not caller.get_hookimpls():
        return _nothing
    return lambda record: caller(record=record)


def _nothing(record: Any) -> None:
    """The hook that nobody implements."""
