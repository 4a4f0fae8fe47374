"""Dispatchers by name, and platforms' products, come through hooks; none of it needs a framework."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import hp_moe.dispatch.auto
import hp_moe.experts
import hp_moe.grouped_gemm
from hp_dtensor.platform.plugins import create_plugin_manager, hookimpl
from hp_moe import Dispatched, ExpertParallelError, hookspecs, loop_grouped_matmul


@pytest.fixture
def manager(monkeypatch):
    """A manager without the plugins of this environment, in place of the real one."""
    monkeypatch.setenv("HP_LOAD_PLUGINS", "")
    manager = create_plugin_manager("hp_moe", hookspecs)
    modules = (hp_moe.grouped_gemm, hp_moe.experts, hp_moe.dispatch.auto)
    caches = (
        hp_moe.grouped_gemm._implementation,
        hp_moe.experts._implementation,
        hp_moe.dispatch.auto.dispatchers,
    )
    for module in modules:
        monkeypatch.setattr(module, "plugin_manager", lambda: manager)
    for cache in caches:
        cache.cache_clear()
    yield manager
    for cache in caches:
        cache.cache_clear()


def test_a_plugin_answers_for_its_platform_only(manager):
    def product(x, weight, sizes):
        return "product"

    class Plugin:
        @hookimpl
        def hp_grouped_matmul(self, platform):
            return product if platform.name == "mine" else None

    manager.register(Plugin())
    mine, other = SimpleNamespace(name="mine"), SimpleNamespace(name="other")
    find = hp_moe.grouped_gemm._implementation.__wrapped__
    assert find(mine) is product
    assert find(other) is loop_grouped_matmul


class NamedPlatform:
    def __init__(self, name):
        self.name = name


def test_fused_experts_are_asked_for_once_per_platform_and_may_decline(manager):
    asked = []

    class Plugin:
        @hookimpl
        def hp_fused_experts(self, platform):
            asked.append(platform.name)
            return (lambda x, *args: x) if platform.name == "mine" else None

    manager.register(Plugin())

    def run(platform, rows, permutation="permutation"):
        sent = Dispatched(rows, SimpleNamespace(platform=platform), None, permutation)
        return hp_moe.experts.fused_experts(sent, (), False)

    mine, other = NamedPlatform("mine"), NamedPlatform("other")
    assert [run(mine, "rows"), run(mine, None), run(other, "rows")] == ["rows", None, None]
    assert run(mine, "rows in expert-major order", None) is None
    assert asked == ["mine", "other"]


def test_a_plugin_adds_a_dispatcher(manager):
    class Plugin:
        @hookimpl
        def hp_token_dispatcher(self, registry):
            registry.add("echo", lambda group, num_experts: (group, num_experts))

    manager.register(Plugin())
    assert hp_moe.dispatch.auto.dispatchers().get("echo").build("the group", 8) == ("the group", 8)


def test_an_unknown_dispatcher_names_those_there_are(manager):
    with pytest.raises(
        ExpertParallelError, match="no token dispatcher is called 'deep'; known: all_gather, all_to_all, "
    ):
        hp_moe.dispatch.auto.dispatchers().get("deep")
