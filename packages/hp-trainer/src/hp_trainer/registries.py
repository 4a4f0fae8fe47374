"""Registries of what a configuration or a command names: models, datasets, optimizers, trackers, storages."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pluggy

from hp_dtensor.platform.registry import Registry, fill_registry


@dataclass(frozen=True)
class Registries:
    """One registry per kind of thing that is chosen by name; each is filled by the hook `hp_<field>`."""

    models: Registry
    datasets: Registry
    optimizers: Registry
    trackers: Registry
    checkpoint_storages: Registry
    checkpoint_formats: Registry


_KINDS = {
    "models": "model",
    "datasets": "dataset",
    "optimizers": "optimizer",
    "trackers": "tracker",
    "checkpoint_storages": "checkpoint storage",
    "checkpoint_formats": "checkpoint format",
}


def fill_registries(manager: pluggy.PluginManager) -> Registries:
    """Make fresh registries and let every plugin of `manager` add to them.

    Raises:
        RegistryError: a plugin registers a name that is taken, or something that cannot be built.
    """
    made = {name: Registry(kind, "hp_trainer") for name, kind in _KINDS.items()}
    return Registries(
        **{field.name: fill_registry(made[field.name], manager, f"hp_{field.name}") for field in fields(Registries)}
    )
