"""Tests are where CONTRIBUTING.md says: by what they need, and by the module that they test."""

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
