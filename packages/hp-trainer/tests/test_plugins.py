"""Plugins register by name, and an error names the guilty one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pluggy
import pytest

from hp_dtensor.exceptions import RegistryError
from hp_dtensor.platform.plugins import PROJECT_NAME
from hp_dtensor.platform.registry import Registry
from hp_trainer import hookspecs, plugins
from hp_trainer.plugins import hookimpl
from hp_trainer.records import StepRecord
from hp_trainer.registries import fill_registries


@dataclass(frozen=True, kw_only=True)
class Options:
    size: int = 1


def manager_of(**plugins: object) -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    for name, plugin in plugins.items():
        manager.register(plugin, name=name)
    return manager


class Models:
    def __init__(self, name: str) -> None:
        self.name = name

    @hookimpl
    def hp_models(self, registry: Registry) -> None:
        registry.add(self.name, lambda options, platform: self.name, options=Options)


def test_every_plugin_registers_under_its_own_name() -> None:
    registries = fill_registries(manager_of(one=Models("a"), two=Models("b")))
    assert registries.models.names() == ["a", "b"]
    assert [registries.models.get(name).plugin for name in "ab"] == ["one", "two"]
    assert registries.models.get("b").build(Options(), None) == "b"


def test_a_name_registered_twice_names_both_plugins() -> None:
    with pytest.raises(RegistryError) as caught:
        fill_registries(manager_of(one=Models("a"), two=Models("a")))
    assert "model 'a' is registered by plugin" in str(caught.value)
    assert "'one'" in str(caught.value)
    assert "'two'" in str(caught.value)


def test_the_built_in_plugin_registers_through_the_same_hooks() -> None:
    registries = fill_registries(manager_of(hp_trainer=plugins))
    assert registries.datasets.names() == ["chat", "text"]
    assert {"expert_loads", "jsonl", "loss_curve", "progress"} <= {*registries.trackers.names()}
    assert "local" in registries.checkpoint_storages.names()


def test_life_cycle_hooks_receive_frozen_records_in_every_plugin() -> None:
    class Watcher:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        @hookimpl
        def hp_after_step(self, record: StepRecord) -> None:
            self.seen.append(record)

    first, second = Watcher(), Watcher()
    hooks = manager_of(first=first, second=second).hook
    record = StepRecord(step=1, learning_rate=0.1, tokens=8, samples=2, loss=1.5, seconds=2.0)
    hooks.hp_after_step(record=record)
    assert first.seen == second.seen == [record]
    assert record.tokens_per_second == 4.0
    with pytest.raises(AttributeError):
        record.loss = 0.0  # type: ignore[misc]


def test_every_hook_says_when_it_is_called_and_since_when() -> None:
    hooks = [value for name, value in vars(hookspecs).items() if name.startswith("hp_")]
    assert len(hooks) == 17
    assert all("Called" in hook.__doc__ and "Since 0." in hook.__doc__ for hook in hooks)
