"""The lists of public names are right, and a change that breaks programs is found. Deprecated names leave in time."""

import ast
import dataclasses
import json
import re
import shutil
import subprocess

import public_api
import pytest
import workspace
from public_api import NEXT, ListedNames, breaking_changes, listed_names, source_folder


@pytest.mark.parametrize("name", workspace.PACKAGES)
def test_all_public_names_are_listed(name):
    package = workspace.packages()[name]
    names = {name for name, _ in public_api.public_names(source_folder(package))}
    assert list(listed_names(package.folder).problems(names)) == [], "run `python tools/public_api.py --write`"


def test_problems_and_updates_of_a_list():
    listed = ListedNames({"a": "0.1.0", "b": "0.2.0"}, frozenset({"b", "c"}))
    assert list(listed.problems({"a", "d"})) == [
        "d is public and not listed",
        "b is listed and not public: a removal is a breaking change",
        "c is experimental and not listed under a version",
    ]
    updated = listed.updated({"a", "d"}, NEXT)
    assert updated == ListedNames({"a": "0.1.0", "d": NEXT}, frozenset())
    assert '[since]\n"0.1.0" = [\n    "a",\n]\n"next" = [\n    "d",\n]\n' in updated.as_toml()


EDITS = {
    ("hp_fsdp/__init__.py", "from hp_fsdp.plugins import get_storage\n", ""): "get_storage was removed",
    ("hp_fsdp/_hsdp.py", "def hsdp(", "def hsdp(first, /, "): "hp_fsdp._hsdp.hsdp: ",
    ("hp_fsdp/grad_scaler.py", "    def update(", "    def renew("): "hp_fsdp.grad_scaler.GradScaler.update: ",
    # Not public: a function in a private folder, and a private method.
    ("hp_fsdp/_engine/reduction.py", "def ", "def renamed_"): None,
    ("hp_fsdp/grad_scaler.py", "    def _unscale(", "    def _renamed("): None,
    # The constructor takes the same.
    (
        "hp_fsdp/memory.py",
        "@dataclass(frozen=True, slots=True)\nclass MemoryUse:",
        "class MemoryUse(NamedTuple):",
    ): None,
}


def test_changes_that_break_programs(tmp_path):
    source = source_folder(workspace.packages()["hp-fsdp"])
    shutil.copytree(source, tmp_path / "hp_fsdp", ignore=shutil.ignore_patterns("__pycache__"))
    for file, right, wrong in EDITS:
        text = (tmp_path / file).read_text()
        assert right in text
        (tmp_path / file).write_text(text.replace(right, wrong))
    found = breaking_changes("hp_fsdp", source.parent, tmp_path)
    assert {line.split(":")[0] for _, line in found} == {each.split(":")[0] for each in EDITS.values() if each}
    assert {name for name, _ in found} == {"get_storage", "hsdp", "GradScaler"}


def test_breaking_changes_need_a_fragment(tmp_path):
    package = dataclasses.replace(workspace.packages()["hp-platform-torch"], folder=tmp_path)
    (tmp_path / "src" / package.module).mkdir(parents=True)
    (tmp_path / "changes").mkdir()
    assert list(public_api.name_problems(package, [])) == []
    (tmp_path / "changes" / "+other.fixed.md").write_text("")
    changes = ["f was removed"]
    assert list(public_api.name_problems(package, changes)) == [
        "f was removed",
        "packages/hp-platform-torch/changes has no fragment +WHAT.breaking.md that says what users write instead",
    ]
    (tmp_path / "changes" / "+f.breaking.md").write_text("")
    assert list(public_api.name_problems(package, changes)) == []


@pytest.mark.parametrize("name", workspace.PACKAGES)
def test_names_are_listed_by_the_release_that_introduced_them(name, tmp_path):
    package = workspace.packages()[name]
    since = listed_names(package.folder).since
    listed = {each: version for each, version in since.items() if version != NEXT}
    releases = workspace.released_versions(name)
    if not releases:
        pytest.skip(f"{name} has no release, or this clone lacks the tags. {workspace.TAGS_ADVICE}")
    for version, tag in releases.items():
        released = workspace.unpack_release(name, tag, tmp_path / tag) / "src" / package.module
        until = {each for each, version_of_name in listed.items() if workspace.Version(version_of_name) <= version}
        assert until == {each for each, _ in public_api.public_names(released)} & since.keys(), tag


def hooks_of(source):
    """Return the docstring of each hook specification of a package, by name."""
    modules = [ast.parse(file.read_text()) for file in source.rglob("hookspecs.py")]
    found = [node for module in modules for node in module.body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_docstring(node) for node in found if node.decorator_list}


@pytest.mark.parametrize("name", workspace.PACKAGES)
def test_hooks_say_the_release_that_introduced_them(name, tmp_path):
    package = workspace.packages()[name]
    found = {hook: re.search(r"Since (\d[\d.]*\d)", text) for hook, text in hooks_of(source_folder(package)).items()}
    assert [hook for hook, match in found.items() if match is None] == []
    since = {hook: workspace.Version(match[1]) for hook, match in found.items()}
    for version, tag in workspace.released_versions(name).items():
        released = hooks_of(workspace.unpack_release(name, tag, tmp_path / tag) / "src" / package.module)
        assert {hook for hook in since if since[hook] <= version} == released.keys() & since.keys(), tag


def schema_keys(schema, definitions, prefix=""):
    """Yield the dotted name of each key that a schema of configurations has."""
    for name, value in schema.get("properties", {}).items():
        yield prefix + name
        target = definitions[value["$ref"].split("/")[-1]] if "$ref" in value else value
        yield from schema_keys(target, definitions, f"{prefix}{name}.")


def test_a_key_of_configurations_is_removed_by_a_breaking_version_only(root):
    tag = workspace.last_release("hp-trainer")
    if tag is None:
        pytest.skip(f"hp-trainer has no release, or this clone lacks the tags. {workspace.TAGS_ADVICE}")
    shown = ["git", "show", f"{tag}:docs/config.schema.json"]
    released = json.loads(subprocess.run(shown, cwd=root, capture_output=True, text=True, check=True).stdout)
    today = json.loads((root / "docs" / "config.schema.json").read_text())
    before, after = (set(schema_keys(each, each.get("$defs", {}))) for each in (released, today))
    assert len(before) > 100
    kinds = public_api.fragments(workspace.packages()["hp-trainer"]).values()
    assert not before - after or "breaking" in kinds, "a fragment says what replaces each removed key"


def test_deprecated_names_are_found_with_the_version_that_removes_them():
    text = """
@deprecated(since="0.2.0", removal="0.3.0", instead="`g`")
def f():
    pass
class A:
    @deprecation.deprecated(since="0.2.0", removal="1.0.0", instead="`g`")
    def method(self):
        pass
"""
    assert list(public_api.removals(text)) == [("f", "0.3.0"), ("method", "1.0.0")]


@pytest.mark.parametrize("name", workspace.PACKAGES)
def test_no_removal_is_overdue(name):
    package = workspace.packages()[name]
    found = [
        removal for file in source_folder(package).rglob("*.py") for removal in public_api.removals(file.read_text())
    ]
    assert [each for each, version in found if workspace.Version(version) <= workspace.Version(package.version)] == []
