"""The packages of this repository, their wheels, and environments with some of them."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import environments
from environments import Environment, SetupError
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
NOX_FOLDER = ROOT / ".nox"

PACKAGES = (
    "hp-dtensor",
    "hp-fsdp",
    "hp-moe",
    "hp-trainer",
    "hp-platform-torch",
    "hp-platform-mindspore",
)
COMPONENTS = PACKAGES[:4]

# A shallow or copied clone often lacks tags.
TAGS_ADVICE = "Fetch the tags (git fetch --tags), or set them again: python3 run.py nox -s release -- --tags --write"

_BUILD = ("hatchling>=1.26", "editables")


# The tested frameworks. The requirement of torch also matches its CPU build, which pip prefers if a configured index
# has it. Otherwise, on Linux, pip installs gigabytes of CUDA packages.
FRAMEWORKS = {
    "torch": Environment(
        "torch",
        requirements=(os.environ.get("HP_TORCH", "torch==2.13.0"), "numpy>=1.22"),
        locked_as="framework-torch",
    ),
    "mindspore": Environment(
        "mindspore", requirements=("mindspore==2.10.0", "numpy<2"), locked_as="framework-mindspore"
    ),
}

# The first Python that the tested version of a framework has no wheels for.
_FIRST_WITHOUT_WHEELS = {"mindspore": (3, 13)}


class NoWheelsError(SetupError):
    """A framework has no wheels for this Python."""


@dataclass(frozen=True)
class Package:
    """A package of `packages/`, described by its pyproject.toml. `extras` are the requirements of all its extras."""

    name: str
    folder: Path
    version: str
    text: str
    requirements: tuple[str, ...]
    extras: tuple[str, ...]
    test_requirements: tuple[str, ...]

    @property
    def siblings(self) -> tuple[str, ...]:
        """Names of the required packages of this repository."""
        return _siblings(self.requirements)

    @property
    def needs(self) -> tuple[str, ...]:
        """Requirements that are not packages of this repository."""
        return tuple(each for each in self.requirements if Requirement(each).name not in PACKAGES)

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def framework(self) -> str | None:
        """The framework of a platform package, else None."""
        return self.name.removeprefix("hp-platform-") if self.name.startswith("hp-platform-") else None


def _siblings(requirements: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in (Requirement(each).name for each in requirements) if name in PACKAGES)


@functools.cache
def packages() -> dict[str, Package]:
    """Return the packages by name."""
    return {name: _load(ROOT / "packages" / name) for name in PACKAGES}


def _load(folder: Path) -> Package:
    text = (folder / "pyproject.toml").read_text()
    project = tomllib.loads(text)
    return Package(
        name=folder.name,
        folder=folder,
        version=project["project"]["version"],
        text=text,
        requirements=tuple(project["project"]["dependencies"]),
        extras=tuple(each for extra in project["project"].get("optional-dependencies", {}).values() for each in extra),
        test_requirements=tuple(project["dependency-groups"]["test"]),
    )


def closure(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return `names` and the siblings they require, in the order of `PACKAGES`."""
    wanted, waiting = set(), list(names)
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            waiting.extend(packages()[name].siblings)
    return tuple(name for name in PACKAGES if name in wanted)


@functools.cache
def wheels(kind: str) -> dict[str, Path]:
    """Build a wheel of every package, and return the wheels by name.

    Args:
        kind: "editable" for wheels that point to the sources, or "standard" for wheels as released.
    """
    built = {}
    for package in packages().values():
        folder = NOX_FOLDER / "wheels" / kind / package.name
        shutil.rmtree(folder, ignore_errors=True)
        built[package.name] = _build(package.folder, kind, folder)
    return built


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yield a temporary folder, which is deleted at the end, also where SIGTERM ends the process."""
    # As Ctrl-C: pytest would take SystemExit for the failure of one test, and go on.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
    finally:
        signal.signal(signal.SIGTERM, before)


def has_wheels(framework: str | None) -> bool:
    """Return True if the tested version of a framework has wheels for this Python, and for None."""
    return framework not in _FIRST_WITHOUT_WHEELS or sys.version_info < _FIRST_WITHOUT_WHEELS[framework]


def framework_sites(names: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the site-packages folders of the frameworks that the packages `names` need, installing missing ones.

    Raises:
        NoWheelsError: a framework has no wheels for this Python.
    """
    sites = []
    for name in names:
        framework = packages()[name].framework
        if framework:
            if not has_wheels(framework):
                release, *_ = FRAMEWORKS[framework].requirements
                raise NoWheelsError(f"{release} has no wheels for Python {'.'.join(map(str, sys.version_info[:2]))}")
            folder = NOX_FOLDER / f"framework-{framework}"
            FRAMEWORKS[framework].prepare(folder)
            sites.append(environments.site_packages(folder))
    return tuple(sites)


def development(name: str, wanted: tuple[str, ...], requirements: tuple[str, ...] = ()) -> Path:
    """Return the interpreter of an environment with the packages `wanted` from their sources, with requirements."""
    names = closure(wanted)
    # A framework is unpacked on one core, while another one builds the wheels and installs what is locked.
    with ThreadPoolExecutor() as pool:
        sites = pool.submit(framework_sites, names)
        environment = Environment(
            name,
            requirements=requirements,
            wheels=tuple(wheels("editable")[each] for each in names),
            fingerprint="".join(packages()[each].text for each in names),
            shared=sites.result,
            needs=tuple(dict.fromkeys(each for name in names for each in packages()[name].needs)),
            locked_as=name,
        )
        return environment.prepare(NOX_FOLDER / name)


def for_tests(name: str, tools: tuple[str, ...]) -> Path:
    """Return the interpreter of an environment with package `name`, its and its tests' requirements, and `tools`."""
    siblings, others = test_requirements(name)
    return development(f"tests-{name}", (name, *siblings), tuple(dict.fromkeys((*others, *tools))))


def test_requirements(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the requirements of the tests of package `name`: packages of this repository, and others."""
    wanted = packages()[name].test_requirements
    return _siblings(wanted), tuple(each for each in wanted if Requirement(each).name not in PACKAGES)


def released(
    name: str,
    wanted: tuple[str, ...],
    siblings: dict[str, Path] | None = None,
    requirements: tuple[str, ...] = (),
) -> Path:
    """Return the interpreter of a fresh environment with the packages `wanted`, installed as by a user.

    pip resolves their requirements; siblings are installed from wheels.

    Args:
        name: name of the environment.
        wanted: names of packages to install.
        siblings: wheels by package name; by default, those built from the sources.
        requirements: further requirements, such as those of tests.
    """
    built = {**wheels("standard"), **(siblings or {})}
    environment = Environment(
        name,
        requirements=(*wanted, *requirements),
        shared=functools.partial(framework_sites, closure(wanted)),
        constraints=tuple(f"{each} @ {wheel.as_uri()}" for each, wheel in built.items()),
    )
    return environment.prepare(NOX_FOLDER / "released" / name, fresh=True)


def outside(example: str, wanted: tuple[str, ...], requirements: tuple[str, ...]) -> Path:
    """Return the interpreter of a fresh environment with an example's wheel and the packages `wanted`, as by a user.

    Args:
        example: the name of a distribution, and of its folder in `examples/`.
        wanted: names of packages to install.
        requirements: further requirements, such as those of tests.
    """
    folder = NOX_FOLDER / "wheels" / "examples" / example
    shutil.rmtree(folder, ignore_errors=True)
    wheel = _build(ROOT / "examples" / example, "standard", folder)
    return released(f"outside-{example}", wanted, {example: wheel}, (example, *requirements))


def floor_wheels(name: str) -> dict[str, Path]:
    """Return the wheel of each sibling of package `name` and of its extras at the oldest allowed version."""
    floors = {}
    for requirement in map(Requirement, (*packages()[name].requirements, *packages()[name].extras)):
        if requirement.name in PACKAGES:
            (floor,) = (each.version for each in requirement.specifier if each.operator == ">=")
            floors[requirement.name] = wheel_at(packages()[requirement.name], Version(floor))
    return floors


def floor_advice(name: str, wheels: dict[str, Path]) -> str:
    """Return what to do where package `name` does not work with the oldest allowed siblings, which are `wheels`."""
    lines = [f"{name} does not work with the oldest siblings that packages/{name}/pyproject.toml allows (see above)."]
    for sibling, wheel in wheels.items():
        version = Version(wheel.name.split("-")[1])
        newest = next(reversed(released_versions(sibling)), None)
        if newest and newest > version:
            lines.append(f"  If it needs what {sibling} has since {newest}: write {sibling}>={newest} there.")
        if is_changed(sibling):
            lines.append(
                f"  If it needs what {sibling} has not released yet: release that first, and write its new version "
                f"there:\n    python3 run.py nox -s release -- {sibling} --write"
            )
    return "\n".join(lines)


def is_changed(name: str) -> bool:
    """Return True if the sources of a package differ from its newest release, or it has none."""
    tag = last_release(name)
    command = ["git", "diff", "--quiet", str(tag), "--", f"packages/{name}/src"]
    return tag is None or subprocess.run(command, cwd=ROOT).returncode != 0


def wheel_at(package: Package, version: Version) -> Path:
    """Return a wheel of a package at a version: built from its tag, or from the sources if it is not released.

    Raises:
        SetupError: the version is neither released nor that of the sources.
    """
    tag = release_tag(package.name, version)
    if tag is None and version == Version(package.version):
        return wheels("standard")[package.name]
    if tag is None:
        raise SetupError(
            f"{package.name} {version} is the oldest that a sibling allows, but there is no tag "
            f"{package.name}-v{version}.\n"
            f"  What to do: raise the floor to a version that was released, if it was not. {TAGS_ADVICE}"
        )
    folder = NOX_FOLDER / "wheels" / "released" / tag
    shutil.rmtree(folder, ignore_errors=True)
    return _build(unpack_release(package.name, tag, folder / "source"), "standard", folder / "wheel")


def unpack_release(name: str, tag: str, folder: Path) -> Path:
    """Write the sources of a released package into `folder`, and return the folder of the package in it."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["git", "archive", tag, f"packages/{name}"]
    archive = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder / "packages" / name


def released_versions(name: str) -> dict[Version, str]:
    """Return the tags of a package's releases, such as `hp-dtensor-v0.1.0`, by version in ascending order."""
    listed = subprocess.run(["git", "tag", "--list", f"{name}-v*"], cwd=ROOT, capture_output=True, text=True)
    tags = {Version(tag.removeprefix(f"{name}-v")): tag for tag in listed.stdout.split()}
    return dict(sorted(tags.items()))


def release_tag(name: str, version: Version) -> str | None:
    """Return the tag of a release, or None if the version is not released. Versions 0.1 and 0.1.0 are equal."""
    return released_versions(name).get(version)


def last_release(name: str) -> str | None:
    """Return the tag of a package's newest release, or None."""
    return next(reversed(released_versions(name).values()), None)


def _build(source: Path, kind: str, folder: Path) -> Path:
    python = Environment("build tools", requirements=_BUILD, locked_as="build").prepare(NOX_FOLDER / "build")
    command = [str(python), "-m", "hatchling", "build", "-t", f"wheel:{kind}", "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    if done.returncode:
        raise SetupError(f"building a wheel of {source} failed:\n{done.stdout}{done.stderr}")
    (wheel,) = folder.glob("*.whl")
    return wheel
