from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from training_runs import Lab

from hp_trainer.plugins import life_cycle, plugin_manager


@pytest.fixture
def lab(tmp_path: Path, hp_platform) -> Lab:
    """Runs in a temporary folder, on the platform under test."""
    return Lab(tmp_path, hp_platform)


@pytest.fixture
def plugged() -> Iterator[Callable[[object], None]]:
    """Registers a plugin with hp_trainer for the length of a test."""
    manager, added = plugin_manager(), []

    def plug(plugin: object) -> None:
        added.append(manager.register(plugin))
        life_cycle.cache_clear()

    yield plug
    for name in added:
        manager.unregister(name=name)
    life_cycle.cache_clear()
