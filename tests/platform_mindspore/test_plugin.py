"""The plugins of this platform for the component packages."""

import importlib

import pytest


@pytest.mark.parametrize("package", ["hp_fsdp", "hp_moe", "hp_trainer"])
def test_each_package_loads_the_plugin_of_this_platform(package):
    manager = importlib.import_module(f"{package}.plugins").plugin_manager()
    plugin = manager.get_plugin("mindspore")
    assert plugin is not None
    assert manager.get_hookcallers(plugin)
