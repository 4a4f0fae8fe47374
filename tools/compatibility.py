"""Run the tests across packages with each released version of each sibling.

python tools/compatibility.py [--write] [PACKAGE ...]

Every package is installed as a wheel: one at a released version, the others as they are today. The tests across
packages run on PyTorch, without those of the released package, which are about today's sources. With `--write`,
docs/compatibility.md lists what passed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import workspace
from environments import SetupError
from packaging.requirements import Requirement
from packaging.version import Version

PAGE = workspace.ROOT / "docs" / "compatibility.md"
FRAMEWORK = "torch"
TEST_TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "fsspec>=2024.2", "transformers>=5.9,<6")


@dataclass(frozen=True)
class Result:
    """Outcome of the tests with one package at a released version."""

    package: str
    version: Version
    passed: int
    failed: int

    @property
    def row(self) -> str:
        """The row of the page."""
        verdict = "works" if self.passed and not self.failed else "does not work"
        return f"| {self.package} {self.version} | {verdict} | {self.passed} passed, {self.failed} failed |"


def admitted(name: str) -> dict[Version, str]:
    """Return the tags of the released versions of a package that every sibling's range admits."""
    requirements = [Requirement(each) for package in workspace.packages().values() for each in package.requirements]
    ranges = [each.specifier for each in requirements if each.name == name]
    released = workspace.released_versions(name).items()
    return {version: tag for version, tag in released if all(each.contains(version) for each in ranges)}


def run_with(name: str, version: Version) -> Result:
    """Install `name` at a released version beside today's other packages, and run the tests across packages.

    Raises:
        SetupError: pytest could not run.
    """
    wanted = (*workspace.COMPONENTS, f"hp-platform-{FRAMEWORK}")
    older = {name: workspace.wheel_at(workspace.packages()[name], version)}
    python = workspace.released(f"compatible-{name}-{version}", wanted, older, TEST_TOOLS)
    command = [str(python), "-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".", "-q", "--numprocesses=auto"]
    left_out = ("house", "engines", name.removeprefix("hp-").replace("-", "_"))
    done = subprocess.run(
        [*command, "tests", *(f"--ignore=tests/{folder}" for folder in left_out)],
        cwd=workspace.ROOT,
        env={**os.environ, "HP_PLATFORM": FRAMEWORK, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout[-4000:])
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout[-300:])}
    # Other statuses mean that pytest was interrupted or found nothing, whatever has passed before.
    if not counts or done.returncode not in (0, 1):
        raise SetupError(f"the tests with {name} {version} did not run (exit status {done.returncode})")
    return Result(name, version, counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0))


def page(results: list[Result]) -> Iterator[str]:
    """Yield the lines of docs/compatibility.md."""
    yield "# Versions that work together"
    yield ""
    yield "Written by `nox -s compatibility -- --write`. Each row: one package at a released version, all others as"
    yield "they are in this commit, and the tests across packages on PyTorch, without the package's own."
    yield ""
    yield "| with | | tests |"
    yield "|---|---|---|"
    yield from (result.row for result in results)


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status: 1 if a version that ranges admit does not work."""
    parser = argparse.ArgumentParser(prog="nox -s compatibility --", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="packages to install at released versions")
    parser.add_argument("--write", action="store_true", help="write docs/compatibility.md")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.packages) - set(workspace.PACKAGES))
    if unknown:
        parser.error(f"expected packages among {', '.join(workspace.PACKAGES)}, got {', '.join(unknown)}")
    names = chosen.packages or [name for name in workspace.PACKAGES if name != "hp-platform-mindspore"]
    try:
        results = [run_with(name, version) for name in names for version in admitted(name)]
    except SetupError as error:
        print(f"compatibility: {error}", file=sys.stderr)
        return 1
    lines = list(page(results))
    print("\n".join(lines[7:]) or "nothing is released yet")
    if chosen.write:
        # Rows of packages that were not tested now are kept.
        written = PAGE.read_text().splitlines() if PAGE.is_file() else []
        tested = tuple(f"| {name} " for name in names)
        others = [row for row in written[7:] if not row.startswith(tested)]
        PAGE.write_text("\n".join([*lines[:7], *sorted([*others, *lines[7:]])]) + "\n")
    return 1 if any(result.failed or not result.passed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
