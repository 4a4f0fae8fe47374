"""Throw-away distributions with plugins, found as installed ones are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hp_dtensor.platform import plugins, selection

# Tests and ranks import helper modules by their names.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def fresh_plugins(monkeypatch):
    """Nothing loaded yet, nothing chosen; as at the start of a process."""
    for name in ("HP_PLATFORM", "HP_LOAD_PLUGINS", "HP_TRACE_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    _forget()
    yield
    _forget()


@pytest.fixture
def install(tmp_path, monkeypatch, fresh_plugins):
    """`install("my-dist", {"name": "module"}, module="source")`: a distribution with entry points and modules.

    Plugins of this environment are not loaded, unless the test changes `HP_LOAD_PLUGINS` after.
    """
    installed = []

    def install(distribution, entry_points, group="hp_dtensor", **modules):
        folder = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{name} = {module}" for name, module in entry_points.items()]
        (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(source)
            monkeypatch.delitem(sys.modules, name, raising=False)
        installed.extend(entry_points)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("HP_LOAD_PLUGINS", ",".join(installed))
        _forget()

    return install


@pytest.fixture
def array_plugin(install):
    """The platform of bare arrays, installed, so that other processes find it."""
    install("hp-platform-array", {"array": "array_platform"})


def _forget():
    plugins.plugin_manager.cache_clear()
    selection._load.cache_clear()
