"""Prepare the release of a package: version, changelog, ranges of siblings, wheel and sdist, tag.

python tools/release.py PACKAGE [major|minor|patch|X.Y.Z] [--write]

Without `--write` the release is built and checked in a copy, and the working tree does not change.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import workspace
from environments import Environment, SetupError
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

UNRELEASED = "## Unreleased"
_CHECKERS = ("twine>=6", "hatchling>=1.26")
_VERSION_IN_PROJECT = re.compile(r'^version = "(.+)"$', re.MULTILINE)
_VERSION_IN_MODULE = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Release:
    """A release in preparation.

    Attributes:
        version: version to release.
        folder: folder of the package, in the working tree with `--write`, else in a copy.
    """

    package: workspace.Package
    version: Version
    folder: Path

    @property
    def tag(self) -> str:
        return f"{self.package.name}-v{self.version}"


def next_version(current: Version, step: str, is_released: bool) -> Version:
    """Return the next version.

    Args:
        step: "major", "minor", "patch", or a version. "" is the current version if it is not released, else the next
            patch.
        is_released: True when the current version has a tag.

    Raises:
        SetupError: `step` is not valid, or the version would decrease.
    """
    if step == "" and not is_released:
        return current
    numbers = (*current.release, 0, 0)[:3]
    steps = {
        "major": (numbers[0] + 1, 0, 0),
        "minor": (numbers[0], numbers[1] + 1, 0),
        "patch": (numbers[0], numbers[1], numbers[2] + 1),
    }
    try:
        wanted = Version(".".join(map(str, steps[step or "patch"]))) if (step or "patch") in steps else Version(step)
    except InvalidVersion:
        raise SetupError(f"expected major, minor, patch or a version such as 0.2.0, got {step!r}") from None
    if wanted < current or (wanted == current and is_released):
        raise SetupError(f"{wanted} does not come after {current}, the version of today")
    return wanted


def range_problems(package: workspace.Package, version: Version) -> Iterator[str]:
    """Yield a line for each sibling whose requirement excludes the new version."""
    for other in workspace.packages().values():
        for requirement in map(Requirement, other.requirements):
            if requirement.name == package.name and not requirement.specifier.contains(version):
                yield (
                    f"{other.name} requires {requirement}, which does not admit {version}: widen the range in "
                    f"packages/{other.name}/pyproject.toml if its tests pass with it"
                )


def with_entries(changelog: str, version: Version, day: datetime.date) -> str:
    """Return the changelog with its section "Unreleased" renamed to `version`, and a new empty one above.

    Raises:
        SetupError: the section is missing or empty.
    """
    _, heading, rest = changelog.partition(f"{UNRELEASED}\n")
    if not heading or not rest.split("\n## ")[0].strip():
        raise SetupError(f"the changelog has nothing under {UNRELEASED!r}: say there what users will notice")
    return changelog.replace(f"{UNRELEASED}\n", f"{UNRELEASED}\n\n## {version} ({day.isoformat()})\n", 1)


def write_version(release: Release, day: datetime.date) -> None:
    """Write the version to pyproject.toml, `__init__.py` (if it has one) and the changelog in `release.folder`."""
    project = release.folder / "pyproject.toml"
    project.write_text(_VERSION_IN_PROJECT.sub(f'version = "{release.version}"', project.read_text(), count=1))
    module = release.folder / "src" / release.package.module / "__init__.py"
    module.write_text(_VERSION_IN_MODULE.sub(f'__version__ = "{release.version}"', module.read_text(), count=1))
    changelog = release.folder / "CHANGELOG.md"
    changelog.write_text(with_entries(changelog.read_text(), release.version, day))


def build_and_check(folder: Path, target: Path) -> list[Path]:
    """Build the wheel and the sdist of the package in `folder` into `target`, and check both with twine.

    Raises:
        SetupError: a build failed, or a package index would refuse the metadata.
    """
    python = Environment("release tools", requirements=_CHECKERS).prepare(workspace.NOX_FOLDER / "release")
    _run([str(python), "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(target)], folder)
    built = sorted(target.iterdir())
    _run([str(python), "-m", "twine", "check", "--strict", *map(str, built)], folder)
    return built


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SetupError(f"{' '.join(command[1:4])} failed in {folder}:\n{done.stdout}{done.stderr}")


def prepare(name: str, step: str, write: bool, scratch: Path) -> Iterator[str]:
    """Prepare a release, and yield a line for each result.

    Args:
        scratch: empty folder for the copy and its builds.

    Raises:
        SetupError: the release is not possible. The working tree is unchanged.
    """
    package = workspace.packages()[name]
    current = Version(package.version)
    tags = subprocess.run(["git", "tag", "--list"], cwd=workspace.ROOT, capture_output=True, text=True).stdout.split()
    version = next_version(current, step, f"{name}-v{current}" in tags)
    yield f"{name}: {current} -> {version}"
    problems = list(range_problems(package, version))
    if problems:
        raise SetupError("\n".join(problems))
    yield "siblings: every range admits it"
    copy = Release(package, version, scratch / name)
    shutil.copytree(package.folder, copy.folder, ignore=shutil.ignore_patterns("__pycache__", "dist"))
    write_version(copy, datetime.date.today())
    for built in build_and_check(copy.folder, scratch / "dist"):
        yield f"built and checked: {built.name} ({built.stat().st_size // 1024} KiB)"
    if write:
        write_version(Release(package, version, package.folder), datetime.date.today())
        yield "written: pyproject.toml, __init__.py, CHANGELOG.md"
    yield from _what_remains(copy, write)


def _what_remains(release: Release, write: bool) -> Iterator[str]:
    if not write:
        yield "dry run: nothing was written; repeat it with --write, commit, and tag the commit:"
    else:
        yield f'commit it ("{release.package.name} {release.version}"), and tag the commit:'
    yield f"    git tag --annotate {release.tag} --message '{release.package.name} {release.version}'"


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(prog="nox -s release --", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("package", choices=workspace.PACKAGES)
    parser.add_argument("step", nargs="?", default="", metavar="major|minor|patch|X.Y.Z")
    parser.add_argument("--write", action="store_true", help="change the working tree; without it nothing is changed")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hp-release-") as scratch:
        try:
            for line in prepare(chosen.package, chosen.step, chosen.write, Path(scratch)):
                print(line, flush=True)
        except SetupError as error:
            print(f"release: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
