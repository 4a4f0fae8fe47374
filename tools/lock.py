"""The lock file: the releases in each environment of this repository, with the digests of their wheels.

`nox -s lock` writes `lock.toml` from the current environments. When an environment is created, pip installs exactly
these releases (`--no-deps`) and refuses wheels with other digests (`--require-hashes`). The lock applies to one
interpreter and system. On others, and after a change of requirements, pip resolves the requirements.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

LOCK_FILE = Path(__file__).with_name("lock.toml")

# Not locked: the configured index decides between the CPU and CUDA builds, which have different requirements. Its
# version is fixed by the requirement.
UNLOCKED = frozenset({"torch"})

_HEADER = """\
# Written by `nox -s lock`: what the environments consist of, and the digests of its wheels. torch is left out, as its
# CPU build comes from another index than those for CUDA.
"""


@dataclass(frozen=True)
class Lock:
    """Content of the lock file.

    Attributes:
        python: interpreter and system of the lock.
        packages: digests (`sha256:...`) by release (`name==version`).
        environments: requirements and releases of each environment, by name.
    """

    python: str
    packages: Mapping[str, tuple[str, ...]]
    environments: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]

    def requirements(self, environment: str, asked: Iterable[str]) -> list[str] | None:
        """Return the lines of a requirements file with digests for an environment.

        None if it is not locked, or was locked for other requirements or another system.
        """
        found = self.environments.get(environment)
        if self.python != this_python() or found is None or found[0] != tuple(sorted(set(asked))):
            return None
        return [" ".join([each, *(f"--hash={digest}" for digest in self.packages[each])]) for each in found[1]]


@functools.cache
def read_lock() -> Lock:
    """Return the lock. It is empty if there is no file, or with `HP_UNLOCKED=1`."""
    if os.environ.get("HP_UNLOCKED") == "1" or not LOCK_FILE.exists():
        return Lock("", {}, {})
    values = tomllib.loads(LOCK_FILE.read_text(encoding="utf-8"))
    environments = {
        name: (tuple(each["asked"]), tuple(each["installed"])) for name, each in values["environments"].items()
    }
    return Lock(values["python"], {name: tuple(found) for name, found in values["packages"].items()}, environments)


def this_python() -> str:
    """Return interpreter and system as in `cpython 3.11 linux x86_64`: wheels are the same for equal names."""
    version = ".".join(map(str, sys.version_info[:2]))
    return f"{sys.implementation.name} {version} {sys.platform} {platform.machine()}"


def write_lock(folders: Iterable[Path], pip: list[str]) -> None:
    """Lock the releases in the given environments.

    Args:
        folders: folders of environments, with stamps. Unlocked environments are skipped.
        pip: command that runs pip; its index provides the digests.
    """
    asked, installed = {}, {}
    for folder in folders:
        stamp = json.loads((folder / "stamp.json").read_text(encoding="utf-8"))
        if name := stamp["locked as"]:
            asked[name] = sorted({*stamp["requirements"], *stamp["needs"]})
            installed[name] = _installed(folder)
    releases = sorted({each for found in installed.values() for each in found})
    lines = [_HEADER, f"python = {json.dumps(this_python())}", "", "[packages]"]
    lines += [f"{json.dumps(name)} = {json.dumps(found)}" for name, found in _digests(releases, pip).items()]
    for name in sorted(asked):
        lines += ["", f"[environments.{json.dumps(name)}]"]
        for key, values in (("asked", asked[name]), ("installed", installed[name])):
            lines += [f"{key} = [", *(f"    {json.dumps(each)}," for each in values), "]"]
    LOCK_FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _installed(environment: Path) -> list[str]:
    """Return the releases in an environment, without packages of this repository and unlocked ones."""
    found = {}
    for folder in environment.glob("lib/python*/site-packages/*.dist-info"):
        name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        name = name.replace("_", "-").replace(".", "-").lower()
        if name not in UNLOCKED and not name.startswith("hp-"):
            found[name] = version
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def _digests(releases: list[str], pip: list[str]) -> dict[str, list[str]]:
    """Return the digests of the wheels that pip would install, by release."""
    waiting, digests = list(releases), {}
    while waiting:
        # One call of pip cannot resolve several releases of a package.
        batch = list({each.partition("==")[0]: each for each in waiting}.values())
        waiting = [each for each in waiting if each not in batch]
        command = [*pip, "install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--quiet"]
        done = subprocess.run([*command, "--report=-", *batch], stdout=subprocess.PIPE, text=True, check=True)
        for each in json.loads(done.stdout)["install"]:
            name = each["metadata"]["name"].replace("_", "-").replace(".", "-").lower()
            digest = each["download_info"]["archive_info"]["hashes"]["sha256"]
            digests[f"{name}=={each['metadata']['version']}"] = [f"sha256:{digest}"]
    return {each: digests[each] for each in releases}
