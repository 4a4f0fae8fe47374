"""The README of a folder is about the files that are there."""

import fnmatch
import re

import pytest

NAMED = re.compile(r"`([\w*]+\.py)`")
STEM = re.compile(r"`(\w+)`")
# Folders of these packages have a README wherever there are several modules, which names each of them.
COMPLETE = ("hp-dtensor", "hp-fsdp", "hp-platform-torch", "hp-platform-mindspore")


def readmes(root, packages):
    return sorted(path for name in packages for path in root.glob(f"packages/{name}/src/**/README.md"))


def named_in(readme):
    """Return the file names in backticks, and patterns of them such as `*_programs.py`."""
    return set(NAMED.findall(readme.read_text(encoding="utf-8")))


def stems_in(readme):
    """Return the words in backticks as file names, for lists of modules of one kind."""
    return {f"{stem}.py" for stem in STEM.findall(readme.read_text(encoding="utf-8"))}


def modules_in(folder):
    return {path.name for path in folder.glob("*.py")} - {"__init__.py"}


def test_every_file_that_a_readme_names_is_there(root):
    everywhere = {path.name for path in root.rglob("packages/**/*.py")} | {p.name for p in root.glob("*/*.py")}
    found = readmes(root, ["*"])
    assert len(found) > 30
    gone = [
        f"{readme.relative_to(root)}: {name}"
        for readme in found
        for name in sorted(named_in(readme))
        if not fnmatch.filter(everywhere, name)
    ]
    assert not gone, "\n".join(gone)


@pytest.mark.parametrize("package", COMPLETE)
def test_a_readme_names_every_module_of_its_folder(root, package):
    missing = [
        f"{readme.relative_to(root)}: {module}"
        for readme in readmes(root, [package])
        for module in sorted(modules_in(readme.parent))
        if not any(fnmatch.fnmatch(module, name) for name in named_in(readme) | stems_in(readme))
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("package", COMPLETE)
def test_a_folder_of_several_modules_has_a_readme_of_a_screen(root, package):
    source = root / "packages" / package / "src" / package.replace("-", "_")
    folders = [folder for folder in source.rglob("*/") if len(modules_in(folder)) > 3]
    without = [str(folder.relative_to(root)) for folder in folders if not (folder / "README.md").exists()]
    assert not without, without
    long = [str(r.relative_to(root)) for r in readmes(root, [package]) if len(r.read_text().splitlines()) > 62]
    assert not long, long
