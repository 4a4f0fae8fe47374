"""The plugin manager of hp_trainer, its registries and its life-cycle hooks, created once per process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pluggy

from hp_dtensor.platform.plugins import PluginManager, create_plugin_manager, hookimpl
from hp_trainer import builtin_plugin, hookspecs
from hp_trainer.registries import Registries, fill_registries

__all__ = ["LifeCycle", "hookimpl", "life_cycle", "plugin_manager", "registries", "resolve_life_cycle"]

Caller = Callable[[Any], None]


@dataclass(frozen=True)
class LifeCycle:
    """The life-cycle hooks as functions of their record. A hook that no plugin implements does nothing."""

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
def plugin_manager() -> PluginManager:
    """Return the plugin manager of hp_trainer, with the built-in plugin and all installed ones.

    Raises:
        PluginError: a plugin cannot be imported, or implements an unknown hook or one with other arguments.
    """
    manager = create_plugin_manager("hp_trainer", hookspecs)
    manager.register(builtin_plugin, name="hp_trainer")
    return manager


@functools.cache
def registries() -> Registries:
    """Return the registries with the components of every plugin."""
    return fill_registries(plugin_manager())


@functools.cache
def life_cycle() -> LifeCycle:
    """Return the life-cycle hooks of every plugin."""
    return resolve_life_cycle(plugin_manager())


def resolve_life_cycle(manager: pluggy.PluginManager) -> LifeCycle:
    """Return the life-cycle hooks of `manager`, resolved once so that a training step does no lookup."""
    return LifeCycle(**{field.name: _caller(manager, f"hp_{field.name}") for field in fields(LifeCycle)})


def _caller(manager: pluggy.PluginManager, hook: str) -> Caller:
    caller = getattr(manager.hook, hook)
    # A hook that no plugin implements costs a step one empty call.
    return (lambda record: caller(record=record)) if caller.get_hookimpls() else (lambda record: None)
