"""Tests are where CONTRIBUTING.md says: by what they need, and by the module that they test."""

import re
import sys

import pytest
from test_import_rules import COMPONENTS, PLATFORMS, ROOT, declared, folder, imports, project
from workspace import packages


def required(package):
    """The top-level modules that a package's own tests may import: of the package, its requirements and its tests'."""
    listed = packages()[package.replace("_", "-")].test_requirements
    own = {path.stem for path in (folder(package) / "tests").rglob("*.py")}
    return {package, "numpy", *sys.stdlib_module_names, *declared([*project(package)["dependencies"], *listed]), *own}


@pytest.mark.parametrize("package", [*COMPONENTS, *PLATFORMS])
def test_own_tests_of_a_package_import_only_what_it_requires(package):
    allowed = required(package)
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sorted((folder(package) / "tests").rglob("*.py"))
        for line, module, _ in imports(path.read_text())
        if module.split(".")[0] not in allowed
    ]
    assert not found, "\n".join(found)


def mirrored():
    """Yield (package, test file relative to `tests/PACKAGE`) for the tests across packages."""
    for package in (*COMPONENTS, *PLATFORMS):
        tests = ROOT / "tests" / package.removeprefix("hp_")
        yield from ((package, path.relative_to(tests)) for path in sorted(tests.rglob("test_*.py")))


def test_tests_across_packages_mirror_the_source():
    """A test file has the name of a module or package of its folder, and perhaps the aspect that it tests."""
    missing = []
    for package, path in mirrored():
        source = folder(package) / "src" / package / path.parent
        names = {each.stem.lstrip("_") for each in (source, *source.glob("*"))}
        name = path.stem.removeprefix("test_")
        if not source.is_dir() or not any(name == each or name.startswith(f"{each}_") for each in names):
            missing.append(f"tests/{package.removeprefix('hp_')}/{path}: no such module in {source.relative_to(ROOT)}")
    assert not missing, "\n".join(missing)


def test_modules_that_tests_import_by_name_have_different_names():
    """Ranks and tests import helpers by the names of their modules, wherever these are."""
    folders = [ROOT / "tests" / package.removeprefix("hp_") for package in (*COMPONENTS, *PLATFORMS)]
    files = [path for each in folders for path in each.rglob("*.py") if path.name != "conftest.py"]
    text = "".join(path.read_text() for path in files)
    imported = {*re.findall(r"^from (\w+) import", text, re.MULTILINE), *re.findall(r'"(\w+):\w+"', text)}
    stems = [path.stem for path in files]
    assert not [name for name in sorted(imported) if stems.count(name) > 1]
