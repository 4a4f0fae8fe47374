"""Registries of these tests: a model, a dataset and an optimizer without a framework."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pluggy
import pytest

from hp_dtensor.platform.plugins import PROJECT_NAME
from hp_trainer import builtin_plugin, hookspecs, plugins
from hp_trainer.config import AdamWConfig, setting
from hp_trainer.launch import platforms
from hp_trainer.plugins import hookimpl
from hp_trainer.registries import Registries, fill_registries

FOLDER = Path(__file__).parent
# Tests import helper modules by their names.
sys.path[:0] = [str(FOLDER), str(FOLDER / "cli")]


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    hidden_size: int = setting(64, help="width of the residual stream", minimum=1)
    num_attention_heads: int = setting(4, help="query heads", minimum=1)
    num_key_value_heads: int = setting(2, help="key-value heads", minimum=1)
    num_experts: int | None = setting(None, help="routed experts; null: a dense model", minimum=1)


class TinyPlugin:
    @hookimpl
    def hp_models(self, registry: Any) -> None:
        registry.add("tiny", lambda options, platform: None, options=TinyConfig)

    @hookimpl
    def hp_optimizers(self, registry: Any) -> None:
        for platform in ("torch", "mindspore"):
            registry.add("adamw", lambda *arguments: None, options=AdamWConfig, platform=platform)


@pytest.fixture(scope="session")
def registered() -> Registries:
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    manager.register(builtin_plugin, name="hp_trainer")
    manager.register(TinyPlugin(), name="tiny")
    return fill_registries(manager)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registries]:
    """The process's own plugin manager with the tiny plugin and no installed one; a platform called torch."""
    caches = (plugins.plugin_manager, plugins.registries, plugins.life_cycle)
    monkeypatch.setenv("HP_LOAD_PLUGINS", "")
    monkeypatch.delenv("HP_PLATFORM", raising=False)
    monkeypatch.setattr(platforms, "installed_platforms", lambda: ["torch"])
    for cache in caches:
        cache.cache_clear()
    plugins.plugin_manager().register(TinyPlugin(), name="tiny")
    yield plugins.registries()
    for cache in caches:
        cache.cache_clear()
