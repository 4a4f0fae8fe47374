"""Registries: names, options and platforms of entries, and errors that name who registered them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from hp_dtensor.exceptions import MeshError, RegistryError
from hp_dtensor.platform.plugins import create_plugin_manager, plugin_manager
from hp_dtensor.platform.registry import NoOptions, Registry, fill_registry


@dataclass(frozen=True, kw_only=True)
class Options:
    size: int = 1


def build():
    return "built"


def dispatchers():
    return Registry("dispatcher", "hp_moe")


ADDS = """
from hp_dtensor.platform.plugins import hookimpl

@hookimpl
def hp_sharding_rules(registry):
    registry.add({name!r}, lambda: {result!r})
"""


def install_entry(install, plugin, name):
    source = ADDS.format(name=name, result=plugin)
    install(f"{plugin}-dist", {plugin: f"{plugin}_module"}, **{f"{plugin}_module": source})


def test_plugins_fill_a_registry_each_under_its_name(install):
    install_entry(install, "one", "a")
    install_entry(install, "two", "b")
    registry = fill_registry(dispatchers(), plugin_manager(), "hp_sharding_rules")
    assert registry.names() == ["a", "b"]
    assert [registry.get(name).plugin for name in "ab"] == ["one", "two"]
    assert [registry.get(name).build() for name in "ab"] == ["one", "two"]
    assert registry.get("a").origin == "plugin 'one' of distribution 'one-dist'"


def test_a_name_registered_twice_names_both_plugins_and_distributions(install):
    install_entry(install, "one", "a")
    install_entry(install, "two", "a")
    with pytest.raises(RegistryError) as caught:
        fill_registry(dispatchers(), plugin_manager(), "hp_sharding_rules")
    assert str(caught.value) == (
        "dispatcher 'a' is registered by plugin 'one' of distribution 'one-dist' and again by plugin 'two' of "
        "distribution 'two-dist'; rename one of them"
    )


def test_a_plugin_registered_in_code_has_no_distribution(install):
    install_entry(install, "one", "a")
    from hp_dtensor.platform import hookspecs
    from hp_dtensor.platform.plugins import hookimpl

    class Plugin:
        @hookimpl
        def hp_sharding_rules(self, registry):
            registry.add("a", build)

    manager = create_plugin_manager("hp_dtensor", hookspecs)
    manager.register(Plugin(), name="mine")
    with pytest.raises(RegistryError, match="and again by plugin 'mine'; rename"):
        fill_registry(dispatchers(), manager, "hp_sharding_rules")


def test_what_a_package_adds_itself_is_its_own():
    registry = dispatchers()
    registry.add("all_to_all", build)
    assert registry.get("all_to_all").plugin == "hp_moe"
    message = "registered by plugin 'hp_moe' and again by plugin 'other'"
    with registry.registering("other"), pytest.raises(RegistryError, match=message):
        registry.add("all_to_all", build)
    registry.add("next", build)
    assert registry.get("next").plugin == "hp_moe"


def test_a_name_may_have_one_entry_per_platform_with_the_same_options():
    registry = Registry("optimizer", "hp_trainer")
    registry.add("adamw", lambda: "t", options=Options, platform="torch")
    registry.add("adamw", lambda: "m", options=Options, platform="mindspore")
    assert registry.names() == ["adamw"]
    assert registry.get("adamw", "mindspore").build() == "m"
    assert registry.options("adamw") is Options
    with pytest.raises(RegistryError, match="exists for mindspore, torch only, not for platform 'numpy'"):
        registry.get("adamw", "numpy")
    with pytest.raises(RegistryError, match="has other options"):
        registry.add("adamw", lambda: "n", options=NoOptions, platform="numpy")


def test_an_entry_for_any_platform_serves_those_without_their_own():
    registry = dispatchers()
    registry.add("m", lambda: "any")
    registry.add("m", lambda: "torch", platform="torch")
    assert (registry.get("m", "torch").build(), registry.get("m", "mindspore").build()) == ("torch", "any")


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    registry = dispatchers()
    with pytest.raises(RegistryError, match=r"^no dispatcher is called 'x'; known: none$"):
        registry.get("x")
    registry.add("all_to_all", build)
    registry.add("ring", build)
    with pytest.raises(RegistryError) as caught:
        registry.options("all_to_al")
    assert str(caught.value) == (
        "no dispatcher is called 'all_to_al'; known: all_to_all, ring. Did you mean 'all_to_all'?"
    )
    assert registry.suggest("rng") == "ring"
    assert registry.suggest("llama") == ""


def test_entries_are_checked():
    registry = dispatchers()
    with pytest.raises(RegistryError, match="options must be a dataclass, got <class 'int'>"):
        registry.add("m", build, options=int)
    with pytest.raises(RegistryError, match="options must be a dataclass, got Options"):
        registry.add("m", build, options=Options())
    message = re.escape("dispatcher of plugin 'hp_moe': expected add(name, build) with a string and a callable, got")
    with pytest.raises(RegistryError, match=message):
        registry.add(build, "m")


def test_a_registry_raises_the_error_of_its_package():
    registry = Registry("communication", "hp_fsdp", error=MeshError)
    with pytest.raises(MeshError, match="no communication is called 'x'"):
        registry.get("x")
