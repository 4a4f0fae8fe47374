"""Plugins and the choice of a platform, with distributions made for the test."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hp_dtensor.exceptions import MeshError, PlatformError, PluginError
from hp_dtensor.platform import __main__ as template
from hp_dtensor.platform.plugins import create_plugin_manager, plugin_manager, release_of
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.rules.tables import rule_registry

PLATFORM = """
import array_platform
from hp_dtensor.platform.plugins import hookimpl

class Platform(array_platform.ArrayPlatform):
    name = {name!r}

@hookimpl
def hp_platform():
    print("made", {name!r})
    return Platform()
"""
UNUSABLE = """
from hp_dtensor.exceptions import PlatformError
from hp_dtensor.platform.plugins import hookimpl

@hookimpl
def hp_platform():
    raise PlatformError("frame 1.0 is too old; needs frame >= 2")
"""
HOOK = """
from hp_dtensor.platform.plugins import hookimpl

@hookimpl
def hp_platform():
    {body}
"""
WITHOUT_PLATFORM = """
from hp_dtensor.platform.plugins import hookimpl

@hookimpl
def hp_sharding_rules(registry):
    registry.append("rule")
"""
MISSPELT = """
from hp_dtensor.platform.plugins import hookimpl

@hookimpl
def hp_platfrom():
    return None
"""


def install_platform(install, name):
    install(f"hp-platform-{name}", {name: f"{name}_module"}, **{f"{name}_module": PLATFORM.format(name=name)})


# Loading -------------------------------------------------------------------------------------------------


def test_hooks_of_all_plugins_are_called(install):
    install("first-rules", {"first": "first_rules"}, first_rules=WITHOUT_PLATFORM)
    install("second-rules", {"second": "second_rules"}, second_rules=WITHOUT_PLATFORM)
    registry = []
    plugin_manager().hook.hp_sharding_rules(registry=registry)
    assert registry == ["rule", "rule"]


def test_each_group_has_its_own_manager(install):
    install("fsdp-plugin", {"other": "other_module"}, group="hp_fsdp", other_module=WITHOUT_PLATFORM)
    from hp_dtensor.platform import hookspecs

    assert [name for name, _ in create_plugin_manager("hp_fsdp", hookspecs).list_name_plugin()] == ["other"]
    assert plugin_manager().list_name_plugin() == []


def test_a_plugin_that_does_not_import_is_named_with_its_distribution(install):
    install("broken-dist", {"broken": "broken_module"}, broken_module="import no_such_framework")
    with pytest.raises(PluginError) as caught:
        plugin_manager()
    assert str(caught.value) == (
        "plugin 'broken' of distribution 'broken-dist' (entry-point group 'hp_dtensor', broken_module) cannot be "
        "imported: ModuleNotFoundError: No module named 'no_such_framework'. Repair or uninstall it, or set "
        "HP_LOAD_PLUGINS to the plugins to load."
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_any_error_at_import_is_the_plugins(install):
    install("broken-dist", {"broken": "broken_module"}, broken_module="raise ZeroDivisionError('oops')")
    with pytest.raises(PluginError, match=r"'broken' of distribution 'broken-dist'.*ZeroDivisionError: oops"):
        plugin_manager()


def test_unknown_hooks_are_refused_with_the_known_ones(install):
    install("misspelt-dist", {"misspelt": "misspelt_module"}, misspelt_module=MISSPELT)
    with pytest.raises(PluginError) as caught:
        plugin_manager()
    assert str(caught.value) == (
        "unknown hooks in group 'hp_dtensor': plugin 'misspelt' of distribution 'misspelt-dist' implements "
        "'hp_platfrom'. Known hooks: hp_driver_files, hp_may_have_accelerators, hp_platform, hp_sharding_rules."
    )


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = 1", ""),
        ("def hp_sharding_rules(registry): ...", " (hp_sharding_rules is not marked)"),
        (
            "import pluggy\nhookimpl = pluggy.HookimplMarker('other')\n@hookimpl\ndef hp_platform(): ...",
            " (hp_platform is not marked)",
        ),
    ],
    ids=["nothing", "unmarked", "marked for another project"],
)
def test_a_plugin_without_hooks_is_told_as_such(install, source, found):
    install("empty-dist", {"empty": "empty_module"}, empty_module=source)
    with pytest.raises(PluginError) as caught:
        plugin_manager()
    message = re.sub(r"<module .*?>", "<module>", str(caught.value))
    assert message == (
        "plugin 'empty' of distribution 'empty-dist' implements no hook of group 'hp_dtensor': expected a function "
        "with the name of a hook marked @hookimpl (hp_dtensor.hookimpl), got none in <module>"
        f"{found}. Known hooks: hp_driver_files, hp_may_have_accelerators, hp_platform, hp_sharding_rules."
    )


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        ("hp_sharding_rules(rules)", "hp_sharding_rules(registry), without 'rules'"),
        ("hp_sharding_rules(registry, first, more=1, last=2)", "hp_sharding_rules(registry), without 'first'"),
        ("hp_platform(a, b)", "hp_platform(), without 'a', 'b'"),
    ],
)
def test_a_misnamed_argument_names_plugin_distribution_and_hook(install, hook, problem):
    source = f"from hp_dtensor.platform.plugins import hookimpl\n@hookimpl\ndef {hook}: ...\n"
    install("odd-dist", {"odd": "odd_rules"}, odd_rules=source)
    with pytest.raises(PluginError) as caught:
        plugin_manager()
    name = hook.partition("(")[0]
    assert str(caught.value) == (
        f"plugin 'odd' of distribution 'odd-dist' (group 'hp_dtensor'): hook {name} is called as {problem}"
    )


def test_a_hook_that_raises_is_named_with_plugin_and_distribution(install):
    source = WITHOUT_PLATFORM.replace('append("rule")', "no_such_method()")
    install("odd-dist", {"odd": "odd_rules"}, odd_rules=source)
    with pytest.raises(PluginError) as caught:
        plugin_manager().hook.hp_sharding_rules(registry=[])
    raised = "hook hp_sharding_rules() raised AttributeError: 'list' object has no attribute 'no_such_method'"
    who = re.escape(f"plugin 'odd' of distribution 'odd-dist': {raised}")
    found = re.fullmatch(rf"{who} \((\S+):(\d+)\)", str(caught.value))
    assert found is not None, caught.value
    assert "no_such_method" in Path(found[1]).read_text().splitlines()[int(found[2]) - 1]
    assert not caught.value.needs_traceback


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("'add', 'input other', print", "ValueError: operation 'add' already has a sharding rule"),
        ("'odd.gate', 'input', '... -> ...'", "TypeError: rule of 'odd.gate': expected the signature as a string"),
        ("'odd.gate', ['input'], print", "TypeError: rule of 'odd.gate': expected the signature as a string"),
    ],
    ids=["taken", "no rule", "no text"],
)
def test_a_rule_that_cannot_be_registered_names_the_plugin(install, call, problem):
    source = WITHOUT_PLATFORM.replace('registry.append("rule")', f"registry.register({call})")
    install("odd-dist", {"odd": "odd_rules"}, odd_rules=source)
    rule_registry.cache_clear()
    who = "plugin 'odd' of distribution 'odd-dist': hook hp_sharding_rules() raised "
    with pytest.raises(PluginError, match=re.escape(who + problem)):
        rule_registry()
    rule_registry.cache_clear()


def test_an_error_raised_on_purpose_in_a_hook_keeps_its_type_and_gets_a_note(install):
    source = WITHOUT_PLATFORM.replace(
        'registry.append("rule")', "from hp_dtensor.exceptions import MeshError; raise MeshError('no mesh')"
    )
    install("odd-dist", {"odd": "odd_rules"}, odd_rules=source)
    with pytest.raises(MeshError) as caught:
        plugin_manager().hook.hp_sharding_rules(registry=[])
    assert str(caught.value) == "no mesh"
    assert caught.value.__notes__ == ["raised by hook hp_sharding_rules() of plugin 'odd' of distribution 'odd-dist'"]


def test_two_distributions_may_not_have_one_name(install):
    install("one-dist", {"same": "one_module"}, one_module="x = 1")
    install("two-dist", {"same": "two_module"}, two_module="x = 2")
    with pytest.raises(PluginError, match="'one-dist' and 'two-dist' both have a plugin 'same'"):
        plugin_manager()


@pytest.mark.parametrize(
    ("limit", "loaded"),
    [("first", ["first"]), ("second-rules", ["second"]), (" second , first ", ["first", "second"]), ("", [])],
)
def test_what_is_loaded_can_be_limited(install, monkeypatch, limit, loaded):
    install("first-rules", {"first": "first_rules"}, first_rules=WITHOUT_PLATFORM)
    install("second-rules", {"second": "second_rules"}, second_rules=WITHOUT_PLATFORM)
    install("broken-dist", {"broken": "broken_module"}, broken_module="import no_such_framework")
    monkeypatch.setenv("HP_LOAD_PLUGINS", limit)
    assert [name for name, _ in plugin_manager().list_name_plugin()] == loaded


def test_calls_are_traced_on_demand(install, monkeypatch, capsys):
    install_platform(install, "arrow")
    monkeypatch.setenv("HP_TRACE_PLUGINS", "1")
    platform = get_platform("arrow")
    plugin_manager().hook.hp_sharding_rules(registry=["mine"])
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "[hp] hp_dtensor: hp_platform({})",
        f"[hp] hp_dtensor: hp_platform -> [{platform!r}]",
        "[hp] hp_dtensor: hp_sharding_rules({'registry': ['mine']})",
        "[hp] hp_dtensor: hp_sharding_rules -> []",
    ]


def test_nothing_is_traced_otherwise(install, capsys):
    install_platform(install, "arrow")
    get_platform("arrow")
    assert capsys.readouterr().err == ""


# Choosing a platform -------------------------------------------------------------------------------------


def test_the_only_platform_is_chosen_and_made_once(install, capsys):
    install_platform(install, "arrow")
    assert get_platform().name == "arrow"
    assert get_platform() is get_platform("arrow")
    assert capsys.readouterr().out == "made arrow\n"


def test_a_platform_is_its_own_choice(install):
    install_platform(install, "arrow")
    platform = get_platform("arrow")
    assert get_platform(platform) is platform


def test_an_argument_comes_before_the_environment(install, monkeypatch):
    install_platform(install, "arrow")
    install_platform(install, "bow")
    monkeypatch.setenv("HP_PLATFORM", "bow")
    assert get_platform().name == "bow"
    assert get_platform("arrow").name == "arrow"


def test_only_the_platform_asked_for_is_made(install, capsys):
    install_platform(install, "arrow")
    install_platform(install, "bow")
    get_platform("bow")
    assert capsys.readouterr().out == "made bow\n"


def test_a_plugin_may_have_another_name_than_its_platform(install):
    install("odd-dist", {"odd": "odd_module"}, odd_module=PLATFORM.format(name="arrow"))
    assert get_platform("arrow").name == "arrow"


@pytest.mark.parametrize("loaded", [True, False])
def test_a_template_needs_a_name_that_no_installed_plugin_has(install, monkeypatch, capsys, tmp_path, loaded):
    install_platform(install, "arrow")
    install("odd-dist", {"odd": "odd_module"}, odd_module=PLATFORM.format(name="bow"))
    if not loaded:
        monkeypatch.setenv("HP_LOAD_PLUGINS", "")
    # The plugin's name, and the name of a platform whose plugin has another name.
    taken = {"arrow": "plugin 'arrow' of distribution 'hp-platform-arrow'"}
    if loaded:
        taken["bow"] = "plugin 'odd' of distribution 'odd-dist'"
    for name, owner in taken.items():
        with pytest.raises(SystemExit):
            template.main(["new", name, "--to", str(tmp_path / name)])
        assert f"'{name}' is the name of {owner}; choose another NAME" in capsys.readouterr().err
        assert not (tmp_path / name).exists()
    assert template.main(["new", "sling", "--to", str(tmp_path / "sling")]) == 0


@pytest.mark.usefixtures("install")
def test_no_platform_at_all(monkeypatch):
    monkeypatch.setenv("HP_LOAD_PLUGINS", "")
    with pytest.raises(PlatformError, match=r"no platform is installed; install .* hp-platform-FRAMEWORK") as caught:
        get_platform()
    assert str(caught.value).endswith(" Only the plugins of HP_LOAD_PLUGINS='' are loaded.")


def test_a_platform_that_the_limit_excludes(install, monkeypatch):
    install_platform(install, "torch")
    monkeypatch.setenv("HP_LOAD_PLUGINS", "torhc")
    with pytest.raises(PlatformError) as caught:
        get_platform("torch")
    assert str(caught.value) == (
        "platform 'torch' is not installed; found: none. Install its package, usually hp-platform-torch. "
        "Only the plugins of HP_LOAD_PLUGINS='torhc' are loaded."
    )


def test_several_and_none_chosen(install):
    install_platform(install, "bow")
    install_platform(install, "arrow")
    with pytest.raises(PlatformError, match=re.escape("several platforms are installed (arrow, bow); choose one with")):
        get_platform()


def test_a_platform_that_is_not_installed(install):
    install_platform(install, "arrow")
    with pytest.raises(PlatformError) as caught:
        get_platform("bow")
    assert str(caught.value) == (
        "platform 'bow' is not installed; found: arrow. Install its package, usually hp-platform-bow. "
        "Only the plugins of HP_LOAD_PLUGINS='arrow' are loaded."
    )


def test_a_misspelt_platform_is_told_the_nearest_name(install, monkeypatch):
    install_platform(install, "arrow")
    monkeypatch.setenv("HP_PLATFORM", "arow")
    with pytest.raises(PlatformError) as caught:
        get_platform()
    assert str(caught.value) == "HP_PLATFORM: platform 'arow' is not installed; found: arrow. Did you mean 'arrow'?"


def test_a_framework_that_is_too_old(install):
    install("hp-platform-frame", {"frame": "frame_module"}, frame_module=UNUSABLE)
    with pytest.raises(PlatformError, match=r"'frame' is installed but cannot be used: frame 1.0 is too old"):
        get_platform("frame")
    with pytest.raises(PlatformError, match=r"no installed platform can be used:\n  frame: frame 1.0 is too old"):
        get_platform()


def test_an_unusable_platform_does_not_hide_a_usable_one(install):
    install("hp-platform-frame", {"frame": "frame_module"}, frame_module=UNUSABLE)
    install_platform(install, "arrow")
    assert get_platform().name == "arrow"
    install_platform(install, "bow")
    with pytest.raises(PlatformError, match=r"several platforms .*\n  frame: frame 1.0 is too old"):
        get_platform()


def test_a_hook_that_returns_no_platform(install):
    source = "from hp_dtensor.platform.plugins import hookimpl\n@hookimpl\ndef hp_platform():\n    return 'arrow'\n"
    install("odd-dist", {"odd": "odd_module"}, odd_module=source)
    with pytest.raises(
        PlatformError, match=re.escape("'odd-dist': hook hp_platform() must return a Platform, got 'arrow'")
    ):
        get_platform("odd")


def test_a_framework_that_does_not_import_names_the_platform(install):
    body = HOOK.format(body="import no_such_framework")
    install("hp-platform-frame", {"frame": "frame_module"}, frame_module=body)
    reason = r"'frame' is installed but cannot be used: .*hook hp_platform\(\) raised ModuleNotFoundError: .*'no_such"
    with pytest.raises(PlatformError, match=reason):
        get_platform("frame")
    install_platform(install, "arrow")
    assert get_platform().name == "arrow"


def test_a_plugin_without_platform_is_not_said_to_be_missing(install):
    install("some-rules", {"rules": "rules_module"}, rules_module=WITHOUT_PLATFORM)
    with pytest.raises(
        PlatformError, match=r"'rules' of distribution 'some-rules' is installed but provides no platform"
    ):
        get_platform("rules")


def test_a_platform_asked_for_by_its_plugins_name(install):
    install("some-arrows", {"bow": "arrow_module"}, arrow_module=PLATFORM.format(name="arrow"))
    with pytest.raises(PlatformError, match=r"'bow' of distribution 'some-arrows' provides a platform called 'arrow'"):
        get_platform("bow")


def test_choosing_by_name_imports_no_other_framework(install):
    install_platform(install, "arrow")
    install("hp-platform-heavy", {"heavy": "heavy_plugin"}, heavy_plugin=HEAVY, heavy_framework="x = 1")
    sys.modules.pop("heavy_framework", None)
    get_platform("arrow")
    assert "heavy_framework" not in sys.modules


HEAVY = """
from hp_dtensor.platform.plugins import hookimpl

@hookimpl
def hp_platform():
    import heavy_framework
    raise AssertionError("not asked for")
"""


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.11.0+cpu", (2, 11)), ("2.9rc1", (2, 9)), ("2.10dev20260101", (2, 10)), ("3.0", (3, 0)), ("2.dev1", (2, 0))],
)
def test_the_release_of_a_version_leaves_its_suffix_out(version, release):
    assert release_of(version) == release
