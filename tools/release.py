"""Prepare releases: versions, changelogs, ranges of siblings, public names, wheels and sdists, commits and tags.

python tools/release.py                                                   the plan: what has changed, in what order
python tools/release.py PACKAGE [major|minor|patch|X.Y.Z] [--write]       one package
python tools/release.py --all [--write]                                   all packages that have changed
python tools/release.py --tags [--write]                                  tags that release commits lack

Without `--write` the release is built and checked in a copy, and the working tree does not change. With it, each
release becomes a commit and a tag. A pushed tag starts the workflow that publishes (docs/releases.md). A clone without
tags, such as one of CI, gets them back from the release commits.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import workspace
from environments import Environment, SetupError
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version
from public_api import NEXT, changes_since, fragments, name_problems, removals, source_folder

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


def next_version(current: Version, step: str, is_released: bool, is_breaking: bool = False) -> Version:
    """Return the next version.

    Args:
        step: "major", "minor", "patch", or a version. "" is the current version if it is not released, else the
            smallest step that the changes allow.
        is_released: True when the current version has a tag.
        is_breaking: True if a program for the current version may fail with the next one. Such a change takes a new
            second number while the first one is 0, and a new first number afterwards.

    Raises:
        SetupError: `step` is not valid, the version would decrease, or the step is too small for a breaking change.
    """
    if step == "" and not is_released:
        return current
    numbers = (*current.release, 0, 0)[:3]
    steps = {
        "major": (numbers[0] + 1, 0, 0),
        "minor": (numbers[0], numbers[1] + 1, 0),
        "patch": (numbers[0], numbers[1], numbers[2] + 1),
    }
    least = ("minor" if numbers[0] == 0 else "major") if is_breaking else "patch"
    try:
        wanted = Version(".".join(map(str, steps[step or least]))) if (step or least) in steps else Version(step)
    except InvalidVersion:
        raise SetupError(f"expected major, minor, patch or a version such as 0.2.0, got {step!r}") from None
    if wanted < current or (wanted == current and is_released):
        raise SetupError(f"{wanted} does not come after {current}, the version of today")
    if is_released and is_breaking and wanted < Version(".".join(map(str, steps[least]))):
        raise SetupError(
            f"{wanted} is too small a step from {current} for a breaking change: a {least} version is needed"
        )
    return wanted


def range_problems(package: workspace.Package, version: Version) -> Iterator[str]:
    """Yield a line for each requirement of a package, an extra, an example or a page that excludes the new version."""
    quoted = re.compile(rf'"({package.name}(?:\[[^]"]*\])?[<>=!~][^"]*)"')
    for pattern in ("packages/*/pyproject.toml", "examples/*/pyproject.toml", "docs/**/*.md"):
        for file in sorted(workspace.ROOT.glob(pattern)):
            for requirement in map(Requirement, quoted.findall(file.read_text(encoding="utf-8"))):
                if not requirement.specifier.contains(version):
                    yield (
                        f"{file.relative_to(workspace.ROOT)} requires {requirement}, which does not admit {version}: "
                        f"widen the range there if its tests pass with it"
                    )


def public_problems(package: workspace.Package, version: Version) -> Iterator[str]:
    """Yield a line for each problem of the public names, and each that is to be removed in `version` or before."""
    yield from name_problems(package, changes_since(package, workspace.last_release(package.name)))
    for file in sorted(source_folder(package).rglob("*.py")):
        for name, removal in removals(file.read_text(encoding="utf-8")):
            if Version(removal) <= version:
                where = f"packages/{package.name}/{file.relative_to(package.folder)}"
                yield f"{where}: {name} was to be removed in {removal}"


def write_version(release: Release, day: datetime.date) -> None:
    """Write the version to pyproject.toml, `__init__.py` (if it has one) and the changelog in `release.folder`.

    The changelog's section is assembled from the fragments, which are removed, unless the section exists.

    Raises:
        SetupError: there are no fragments, so users would not learn what has changed.
    """
    changelog = release.folder / "CHANGELOG.md"
    text = changelog.read_text()
    if f"## {release.version} (unreleased)" in text and fragments(release.package):
        folder = f"packages/{release.package.name}/changes"
        raise SetupError(
            f"{folder}: move the fragments to the section {release.version} of the changelog, which exists"
        )
    changelog.write_text(text.replace(f"## {release.version} (unreleased)", f"## {release.version} ({day})"))
    if f"## {release.version} (" not in text:
        if not set(fragments(release.package).values()) - {"misc"}:
            folder = f"packages/{release.package.name}/changes"
            raise SetupError(f"{folder} has no fragment: say there what users will notice")
        options = ("--yes", "--config", str(Path(__file__).with_name("towncrier.toml")), "--dir", str(release.folder))
        dated = ("--version", str(release.version), "--date", str(day))
        _run([sys.executable, "-m", "towncrier", "build", *options, *dated], release.folder)
        # towncrier leaves the kind that it does not know, which users are not shown.
        for name in fragments(release.package):
            (release.folder / "changes" / name).unlink(missing_ok=True)
    project = release.folder / "pyproject.toml"
    project.write_text(_VERSION_IN_PROJECT.sub(f'version = "{release.version}"', project.read_text(), count=1))
    module = release.folder / "src" / release.package.module / "__init__.py"
    module.write_text(_VERSION_IN_MODULE.sub(f'__version__ = "{release.version}"', module.read_text(), count=1))
    names = release.folder / "api.toml"
    if names.is_file():
        names.write_text(names.read_text().replace(f'"{NEXT}" =', f'"{release.version}" ='))


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
    version = planned_version(package, step)
    yield f"{name}: {package.version} -> {version}"
    problems = [*range_problems(package, version), *public_problems(package, version)]
    if write and _git("status", "--porcelain", "--", str(package.folder)):
        problems.append(
            f"packages/{name} has uncommitted changes: commit them first, as the release is a commit of its own"
        )
    if problems:
        raise SetupError("\n".join(problems))
    yield "siblings: every range admits it; public names: as the changelog says"
    copy = Release(package, version, scratch / name)
    shutil.copytree(package.folder, copy.folder, ignore=shutil.ignore_patterns("__pycache__", "dist"))
    write_version(copy, datetime.date.today())
    for built in build_and_check(copy.folder, scratch / f"{name}-dist"):
        yield f"built and checked: {built.name} ({built.stat().st_size // 1024} KiB)"
    if not write:
        yield f"dry run: nothing was written; with --write it becomes a commit and the tag {copy.tag}"
        return
    write_version(Release(package, version, package.folder), datetime.date.today())
    _git("add", "--all", str(package.folder))
    title = f"{name} {version}"
    # The first release of a package may find everything written already.
    # Only the package, whatever else the index contains.
    _git("commit", "--quiet", "--allow-empty", "--message", title, "--only", "--", str(package.folder))
    _git("tag", "--annotate", copy.tag, "--message", title)
    yield f"committed and tagged: push them by `git push origin HEAD {copy.tag}`"


def planned_version(package: workspace.Package, step: str = "") -> Version:
    """Return the version of the next release of a package.

    Raises:
        SetupError: as `next_version`, or the current version is released and its tag is missing.
    """
    current = Version(package.version)
    is_released = workspace.release_tag(package.name, current) is not None
    if not is_released and f"{package.name}-v{current}" in untagged_releases():
        raise SetupError(f"{package.name} {current} is released, but this clone lacks its tag. {workspace.TAGS_ADVICE}")
    return next_version(current, step, is_released, "breaking" in fragments(package).values())


def changed_packages() -> list[workspace.Package]:
    """Return the packages with changes that users notice, or without a release, each after those it requires."""
    return [
        package
        for package in workspace.packages().values()
        if set(fragments(package).values()) - {"misc"} or workspace.last_release(package.name) is None
    ]


def untagged_releases() -> dict[str, str]:
    """Return the commits of releases whose tag is missing in this clone, by the tag, oldest first.

    A release commit is titled by package and version, such as `hp-moe 0.2.0`, and contains that version.
    """
    missing = {}
    for line in _git("log", "--reverse", "--format=%H %s").splitlines():
        commit, _, title = line.partition(" ")
        name, _, version = title.partition(" ")
        if name in workspace.PACKAGES and re.fullmatch(r"[\d.]+", version):
            project = _git("show", f"{commit}:packages/{name}/pyproject.toml")
            written = _VERSION_IN_PROJECT.search(project)
            is_release = written is not None and written[1] == version
            if is_release and workspace.release_tag(name, Version(version)) is None:
                missing[f"{name}-v{version}"] = commit
    return missing


def restore_tags(write: bool) -> Iterator[str]:
    """Yield a line for each missing tag of a release, and set it with `write`."""
    missing = untagged_releases()
    for tag, commit in missing.items():
        if write:
            _git("tag", "--annotate", tag, commit, "--message", tag.replace("-v", " "))
        yield f"{tag} {commit[:12]}{' set' if write else ''}"
    if not missing:
        yield "every release commit has its tag"
    elif not write:
        yield "nothing was written; with --write the tags are set"


def plan() -> Iterator[str]:
    """Yield a line for each package: what a release of it would be, and what is in its way."""
    changed = changed_packages()
    for package in workspace.packages().values():
        last = workspace.last_release(package.name) or "not released"
        if package not in changed:
            edited = last != "not released" and _git("diff", "--name-only", last, "--", f"{package.folder}/src")
            hint = "nothing has changed"
            if edited:
                hint = (
                    "no user notices what has changed"
                    if fragments(package)
                    else "sources have changed without a fragment"
                )
            yield f"{package.name}: {last}; {hint}"
            continue
        version = planned_version(package)
        kinds = ", ".join(sorted(set(fragments(package).values()))) or "first release"
        yield f"{package.name}: {last} -> {version} ({kinds})"
        yield from (
            f"    {problem}" for problem in (*range_problems(package, version), *public_problems(package, version))
        )


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=workspace.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SetupError(f"git {' '.join(arguments[:2])} failed:\n{done.stderr}")
    return done.stdout.strip()


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    description, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="nox -s release --", description=description, epilog=usage, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("package", nargs="?", choices=workspace.PACKAGES, metavar="PACKAGE")
    parser.add_argument("step", nargs="?", default="", metavar="major|minor|patch|X.Y.Z")
    parser.add_argument("--all", action="store_true", help="release all packages that have changed")
    parser.add_argument("--tags", action="store_true", help="list the tags that release commits lack, or set them")
    parser.add_argument("--write", action="store_true", help="commit and tag; without it nothing is changed")
    chosen = parser.parse_args(arguments)
    requested = sum((bool(chosen.package), chosen.all, chosen.tags))
    if requested > 1 or (chosen.write and not requested):
        parser.error("expected a package, or --all or --tags without one")
    with workspace.scratch_folder("hp-release-") as scratch:
        try:
            if chosen.tags:
                print("\n".join(restore_tags(chosen.write)))
                return 0
            names = [package.name for package in changed_packages()] if chosen.all else [chosen.package]
            for name in names:
                for line in plan() if name is None else prepare(name, chosen.step, chosen.write, scratch):
                    print(line, flush=True)
        except SetupError as error:
            print(f"release: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
