"""Run tests across packages with each released version of each package beside the others of today.

python tools/compatibility.py [--full] [--write] [--platform torch|mindspore] [PACKAGE ...]

Every package is installed as a wheel: one at a released version, the others as they are today. The core of the tests is
the conformance suites, which each package ships, training with `fully_shard` and tensor parallelism, and expert
parallelism. `--full` runs all tests across packages, which takes hours. Tests of the released package itself are left
out, as they are about today's sources. With `--write`, docs/compatibility.md lists what passed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import workspace
from environments import SetupError
from packaging.requirements import Requirement
from packaging.version import Version

PAGE = workspace.ROOT / "docs" / "compatibility.md"
TEST_TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "fsspec>=2024.2")
# Reference models of the tests of all packages.
FULL_TOOLS = {"torch": ("transformers>=5.9,<6", "peft>=0.18"), "mindspore": ()}
CORE = ("tests/fsdp/test_fully_shard.py", "tests/moe/test_expert_parallel.py")
CONFORMANCE = {name: f"{name.replace('-', '_')}.testing.conformance" for name in workspace.COMPONENTS}

_HEAD = """\
# Versions that work together

Written by `nox -s compatibility -- --write`. Each row is one package at a released version. The other packages are
those of this commit, installed as wheels. The versions are those that the packages' ranges admit in both directions,
except releases that equal this commit. A version without a row has not been run.

The core of the tests is the conformance suites of hp-fsdp, hp-moe and hp-trainer (each layout trains as one rank, and a
resumed run equals one without a break), that of hp-dtensor with its own releases and with those of platforms,
`fully_shard` with data and tensor parallelism, and expert parallelism, on simulated and on real ranks. `--full` runs
all tests across packages. Tests of the released package itself are left out, except those it contains.

"""
_TABLE = """\
| framework | with | | tests | skipped | selection |
|---|---|---|---|---|---|
"""
_NONE = "The ranges of these packages admit only each other's newest releases.\n"


@dataclass(frozen=True)
class Result:
    """Outcome of the tests on a framework with one package at a released version."""

    framework: str
    package: str
    version: Version
    passed: int
    failed: int
    skipped: int
    is_full: bool

    @property
    def works(self) -> bool:
        return self.passed > 0 and not self.failed

    @property
    def row(self) -> str:
        """The row of the page."""
        verdict = "works" if self.works else "does not work"
        selection = "all" if self.is_full else "core"
        counts = f"{self.passed} passed, {self.failed} failed | {self.skipped} | {selection}"
        return f"| {self.framework} | {self.package} {self.version} | {verdict} | {counts} |"


def admitted(name: str, versions: Iterable[Version], others: Iterable[str]) -> list[Version]:
    """Return the versions of a package that fit the ranges of the packages `others`, and whose own ranges fit those."""
    siblings = [workspace.packages()[each] for each in others if each != name]
    ranges = [each.specifier for each in _siblings(siblings, name)]
    return [
        version
        for version in versions
        if all(each.contains(version) for each in ranges)
        and all(
            need.specifier.contains(sibling.version)
            for need in map(Requirement, released_requirements(name, version))
            for sibling in siblings
            if need.name == sibling.name
        )
    ]


def _siblings(packages: Iterable[workspace.Package], name: str) -> list[Requirement]:
    """Return the requirements of `packages` for the package `name`."""
    return [each for package in packages for each in map(Requirement, package.requirements) if each.name == name]


def released_requirements(name: str, version: Version) -> list[str]:
    """Return the requirements of a released package."""
    tag = workspace.release_tag(name, version)
    shown = ["git", "show", f"{tag}:packages/{name}/pyproject.toml"]
    text = subprocess.run(shown, cwd=workspace.ROOT, capture_output=True, text=True, check=True).stdout
    return list(tomllib.loads(text)["project"]["dependencies"])


def differs(name: str, version: Version) -> bool:
    """Return True unless the release has the sources and requirements of today."""
    contents = [f"packages/{name}/{each}" for each in ("src", "pyproject.toml")]
    command = ["git", "diff", "--quiet", str(workspace.release_tag(name, version)), "--", *contents]
    return subprocess.run(command, cwd=workspace.ROOT).returncode != 0


def selected(name: str, is_full: bool) -> list[str]:
    """Return the tests with package `name` at a released version: modules and paths, without those of the package."""
    own = f"tests/{name.removeprefix('hp-').replace('-', '_')}"
    if is_full:
        ignored = ("tests/house", "tests/engines", own)
        return [*CONFORMANCE.values(), "tests", *(f"--ignore={each}" for each in ignored)]
    # The suite of hp-dtensor, half of the time, depends on it and on a platform alone.
    is_below = name == "hp-dtensor" or workspace.packages()[name].framework is not None
    suites = [suite for package, suite in CONFORMANCE.items() if is_below or package != "hp-dtensor"]
    return [*suites, *(each for each in CORE if not each.startswith(f"{own}/"))]


def run_with(framework: str, name: str, version: Version, is_full: bool) -> Result:
    """Install `name` at a released version beside today's other packages, and run the tests on a framework.

    Raises:
        SetupError: pytest could not run.
    """
    wanted = (*workspace.COMPONENTS, f"hp-platform-{framework}")
    older = {name: workspace.wheel_at(workspace.packages()[name], version)}
    tools = (*TEST_TOOLS, *(FULL_TOOLS[framework] if is_full else ()))
    python = workspace.released(f"compatible-{framework}-{name}-{version}", wanted, older, tools)
    command = [str(python), "-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".", "-q", "--numprocesses=auto"]
    # MindSpore's idle threads spin.
    pinned = ["--hp-one-core"] if framework == "mindspore" else []
    start = time.monotonic()
    done = subprocess.run(
        [*command, "--dist=worksteal", *pinned, "--pyargs", *selected(name, is_full)],
        cwd=workspace.ROOT,
        env={**os.environ, "HP_PLATFORM": framework, "OMP_NUM_THREADS": "1", "GLOG_v": "3"},
        stdout=subprocess.PIPE,
        text=True,
    )
    summary = done.stdout.rstrip().rpartition("\n")[2]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", summary)}
    # Other statuses mean that pytest was interrupted or found nothing, whatever has passed before.
    if not counts or done.returncode not in (0, 1):
        print(done.stdout[-4000:])
        raise SetupError(f"the tests with {name} {version} did not run (exit status {done.returncode})")
    failed = counts.get("failed", 0) + counts.get("error", 0)
    result = Result(framework, name, version, counts.get("passed", 0), failed, counts.get("skipped", 0), is_full)
    print(result.row, f"{time.monotonic() - start:.0f} s", flush=True)
    if failed:
        print("\n".join(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))))
    return result


def combinations(names: Iterable[str], frameworks: Iterable[str]) -> Iterator[tuple[str, str, Version]]:
    """Yield the framework, package and version of each run."""
    for framework in frameworks:
        together = (*workspace.COMPONENTS, f"hp-platform-{framework}")
        for name in together:
            if name in names:
                versions = admitted(name, workspace.released_versions(name), together)
                yield from ((framework, name, version) for version in versions if differs(name, version))


def page(results: Iterable[Result], written: str, admitted_now: Iterable[tuple[str, str, Version]]) -> str:
    """Return the text of docs/compatibility.md.

    Args:
        written: the text before. Its rows that were not tested now stay if the ranges admit them.
        admitted_now: the runs that today's ranges admit.
    """
    results = list(results)
    tested = {(each.framework, each.package) for each in results}
    possible = {(framework, name, str(version)) for framework, name, version in admitted_now}
    rows = [line for line in written.splitlines() if re.match(r"\| (torch|mindspore) \|", line)]
    names = {row: tuple(row.split()[place] for place in (1, 3, 4)) for row in rows}
    others = [row for row in rows if names[row][:2] not in tested and names[row] in possible]
    rows = sorted([*others, *(each.row for each in results)])
    return _HEAD + (_TABLE + "\n".join(rows) + "\n" if rows else _NONE)


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status: 1 if a version that ranges admit does not work."""
    parser = argparse.ArgumentParser(prog="nox -s compatibility --", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="packages to install at released versions")
    parser.add_argument("--full", action="store_true", help="all tests across packages, which takes hours")
    parser.add_argument("--platform", choices=workspace.FRAMEWORKS, help="only on this framework")
    parser.add_argument("--write", action="store_true", help="write docs/compatibility.md")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.packages) - set(workspace.PACKAGES))
    if unknown:
        parser.error(f"expected packages among {', '.join(workspace.PACKAGES)}, got {', '.join(unknown)}")
    if not any(map(workspace.last_release, workspace.PACKAGES)):
        print(f"compatibility: this clone has no tags of releases. {workspace.TAGS_ADVICE}", file=sys.stderr)
        return 1
    frameworks = [chosen.platform] if chosen.platform else filter(workspace.has_wheels, workspace.FRAMEWORKS)
    cases = list(combinations(chosen.packages or workspace.PACKAGES, frameworks))
    results: list[Result] = []
    for case in [None, *cases]:
        try:
            results += [run_with(*case, is_full=chosen.full)] if case else []
        except SetupError as error:
            print(f"compatibility: {error}", file=sys.stderr)
            return 1
        # Before the first run too, as ranges may have changed.
        if chosen.write:
            possible = combinations(workspace.PACKAGES, workspace.FRAMEWORKS)
            PAGE.write_text(page(results, PAGE.read_text() if PAGE.is_file() else "", possible))
    return 0 if all(each.works for each in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
