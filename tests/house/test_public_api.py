"""The lists of public names are right, and a change that breaks programs is found. Deprecated names leave in time."""

import ast
import shutil

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


def overdue(text, version):
    """Yield the names that were to be removed in `version` or before."""
    for node in ast.walk(ast.parse(text)):
        for decorator in getattr(node, "decorator_list", []):
            if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "deprecated":
                removal = next(each.value.value for each in decorator.keywords if each.arg == "removal")
                if workspace.Version(removal) <= workspace.Version(version):
                    yield node.name


def test_a_deprecated_name_is_found_when_its_removal_is_due():
    text = '@deprecated(since="0.2.0", removal="0.3.0", instead="`g`")\ndef f():\n    pass\n'
    assert (list(overdue(text, "0.2.9")), list(overdue(text, "0.3.0"))) == ([], ["f"])


@pytest.mark.parametrize("name", workspace.PACKAGES)
def test_no_removal_is_overdue(name):
    package = workspace.packages()[name]
    files = source_folder(package).rglob("*.py")
    assert [each for file in files for each in overdue(file.read_text(), package.version)] == []
