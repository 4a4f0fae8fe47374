"""Registries of these tests: a model, a dataset and an optimizer without a framework."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pluggy
import pytest
from pydantic import Field

from hp_dtensor.platform.plugins import PROJECT_NAME
from hp_trainer import hookspecs, plugins
from hp_trainer.config import section
from hp_trainer.launch import platforms
from hp_trainer.plugins import hookimpl
from hp_trainer.registries import Registries, fill_registries

FOLDER = Path(__file__).parent
# Tests import helper modules by their names.
sys.path[:0] = [str(FOLDER), str(FOLDER / "cli")]


@section
class TinyConfig:
    hidden_size: int = Field(64, ge=1, description="width of the residual stream")
    num_attention_heads: int = Field(4, ge=1, description="query heads")
    num_key_value_heads: int = Field(2, ge=1, description="key-value heads")
    num_experts: int | None = Field(None, ge=1, description="routed experts; null: a dense model")


class TinyPlugin:
    @hookimpl
    def hp_models(self, registry: Any) -> None:
        registry.add("tiny", lambda options, platform: None, options=TinyConfig)


@pytest.fixture(scope="session")
def registered() -> Registries:
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    manager.register(plugins, name="hp_trainer")
    manager.register(TinyPlugin(), name="tiny")
    return fill_registries(manager)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registries]:
    """The process's own plugin manager with the tiny plugin and no installed one; a platform called torch."""
    caches = (plugins.plugin_manager, plugins.registries)
    monkeypatch.setenv("HP_LOAD_PLUGINS", "")
    monkeypatch.delenv("HP_PLATFORM", raising=False)
    monkeypatch.setattr(platforms, "installed_platforms", lambda: ["torch"])
    # The platform is not there to be imported.
    monkeypatch.setattr(platforms, "report_import", lambda name: None)
    for cache in caches:
        cache.cache_clear()
    plugins.plugin_manager().register(TinyPlugin(), name="tiny")
    yield plugins.registries()
    for cache in caches:
        cache.cache_clear()
