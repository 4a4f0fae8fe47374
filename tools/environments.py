"""Virtual environments that are created once, and again only when their contents have changed.

nox reuses an environment without checking its contents. Here a stamp in the environment's folder records the
interpreter, the requirements and the packages' metadata: a second run installs nothing, and no change is missed. A
framework of several gigabytes is installed once, in its own environment, and shared with the others through a path
file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lock

STAMP = "stamp.json"
# Read once: an edit during a run must not invalidate environments that are in use.
_MADE_BY = hashlib.sha256(Path(__file__).read_bytes() + Path(lock.__file__).read_bytes()).hexdigest()

_ADVICE = (
    (
        r"DO NOT MATCH THE HASHES",
        "the package index has other files than those that tools/lock.toml was written for",
        "do not install them unless you know why; HP_UNLOCKED=1 in the environment goes by versions alone",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError",
        "the package index answered with a certificate that this machine does not trust",
        "if your network has its own authority, name its file: export PIP_CERT=/path/to/authority.pem",
    ),
    (
        r"NewConnectionError|ConnectTimeoutError|Read ?timed ?out|ProxyError|ConnectionResetError"
        r"|Connection broken|Connection refused|Max retries|Network is unreachable"
        r"|[Nn]ame resolution|Name or service not known",
        "the package index could not be reached",
        "check the network, and a proxy or a mirror where one is needed (https_proxy, PIP_INDEX_URL,"
        " `pip config list`), then run the same command again: it goes on where it stopped",
    ),
    (
        r"No space left on device",
        "the disk is full",
        "free some space (both frameworks together take about 7 GB) and run the same command again",
    ),
    (
        r"No matching distribution found|Could not find a version",
        "the package index has no release that fits this Python and this machine",
        "compare the requirement above with your Python version, system and processor; "
        "a mirror may also lag behind (`pip config list` shows which index is in use)",
    ),
    (
        r"Permission denied",
        "a folder cannot be written",
        "check who owns .venv and .nox here, remove them if another user made them, and run it again",
    ),
)


class SetupError(RuntimeError):
    """An environment could not be created. The message states the likely cause and what to do."""


def explain_pip_failure(output: str) -> str:
    """Return the likely cause of a pip failure and what to do, from pip's output."""
    for pattern, cause, advice in _ADVICE:
        if re.search(pattern, output):
            return f"{cause}.\n  What to do: {advice}."
    return "pip's own words are above.\n  What to do: mend what they name, then run the same command again."


@dataclass(frozen=True)
class Environment:
    """A virtual environment, described by its contents.

    Args:
        name: name in progress lines.
        requirements: requirements for pip.
        wheels: wheel files to install too.
        fingerprint: further data whose change makes the environment stale, such as the wheels' metadata.
        shared: returns the site-packages folders of other environments to include after its own, with their commands.
            It may wait until these environments are complete.
        constraints: pip constraints, such as the wheels to use for siblings.
        needs: requirements of the wheels except each other.
        locked_as: name in the lock file. Empty means unlocked, as a user would install today.
    """

    name: str
    requirements: tuple[str, ...] = ()
    wheels: tuple[Path, ...] = ()
    fingerprint: str = ""
    shared: Callable[[], tuple[Path, ...]] = tuple
    constraints: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    locked_as: str = ""

    def prepare(self, folder: str | os.PathLike[str], *, fresh: bool = False) -> Path:
        """Return the interpreter of this environment in `folder`, creating it unless it exists unchanged.

        Args:
            folder: folder of the environment.
            fresh: always create it again.

        Raises:
            SetupError: Python lacks venv, or pip failed.
        """
        folder = Path(folder)
        python = folder / "bin" / "python"
        with _locked(folder.with_name(folder.name + ".lock")):
            if not fresh and python.exists() and _read(folder / STAMP) == self._stamp():
                return python
            print(f"[setup] {self.name}: making {os.path.relpath(folder)}", flush=True)
            start = time.monotonic()
            _make(folder)
            # Shared packages may still be being installed, and only pip's resolver has to see them.
            is_locked = self._locked_requirements() is not None
            if not is_locked:
                self._share(folder)
            self._install(python, folder)
            if is_locked:
                self._share(folder)
            (folder / STAMP).write_text(self._stamp())
            print(f"[setup] {self.name}: ready after {time.monotonic() - start:.0f} s", flush=True)
        return python

    def _share(self, folder: Path) -> None:
        sites = self.shared()
        site_packages(folder).joinpath("shared.pth").write_text("".join(f"{site}\n" for site in sites))
        for site in sites:
            _copy_commands(site.parents[2] / "bin", folder / "bin")

    def _install(self, python: Path, folder: Path) -> None:
        wanted = [*self.requirements, *map(str, self.wheels)]
        if not wanted:
            return
        if self.constraints:
            (folder / "constraints.txt").write_text("\n".join(self.constraints) + "\n")
            wanted = ["--constraint", str(folder / "constraints.txt"), *wanted]
        print(f"[setup] {self.name}: installing {self._summary()}", flush=True)
        locked = self._locked_requirements()
        if locked is None:
            if self.locked_as:
                print(f"[setup] {self.name}: not from tools/lock.toml, which was written for others", flush=True)
            self._run_pip(python, wanted)
            return
        # pip requires digests of all requirements or of none, so the wheels of this repository have theirs too.
        digests = {each: hashlib.sha256(each.read_bytes()).hexdigest() for each in self.wheels}
        locked += [f"{wheel.as_uri()} --hash=sha256:{digest}" for wheel, digest in digests.items()]
        (folder / "locked.txt").write_text("\n".join(locked) + "\n")
        self._run_pip(python, ["--no-deps", "--require-hashes", "--requirement", str(folder / "locked.txt")])
        unlocked = [each for each in self.requirements if re.split(r"[^\w.-]", each)[0] in lock.UNLOCKED]
        if unlocked:
            self._run_pip(python, unlocked)

    def _run_pip(self, python: Path, arguments: list[str]) -> None:
        output = _pip(python, arguments)
        if output is not None:
            sys.stderr.write(output)
            raise SetupError(f"pip could not install {self._summary()}: {explain_pip_failure(output)}")

    def _locked_requirements(self) -> list[str] | None:
        """Return the lines of a requirements file with digests, or None if the environment is not locked."""
        return lock.read_lock().requirements(self.locked_as, (*self.requirements, *self.needs))

    def _summary(self) -> str:
        return " ".join([*self.requirements, *(wheel.name.split("-")[0] for wheel in self.wheels)])

    def _stamp(self) -> str:
        contents = {
            "made by": _MADE_BY,
            "python": f"{sys.version} {os.path.realpath(sys.executable)}",
            "requirements": self.requirements,
            "needs": self.needs,
            "locked as": self.locked_as,
            "locked": self._locked_requirements(),
            "constraints": self.constraints,
            "shared": {str(site): _read(site.parents[2] / STAMP) for site in self.shared()},
            "wheels": [str(wheel) for wheel in self.wheels],
            "fingerprint": self.fingerprint,
        }
        return json.dumps(contents, indent=1)


def site_packages(folder: str | os.PathLike[str]) -> Path:
    """Return the site-packages folder of the environment in `folder`."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))


def _copy_commands(source: Path, target: Path) -> None:
    """Copy the commands of the environment in `source` that `target` lacks, adapted to the interpreter there."""
    for command in source.iterdir():
        content = command.read_bytes()
        first, separator, rest = content.partition(b"\n")
        own = target / command.name
        if first == b"#!" + os.fsencode(source / "python") and not own.exists():
            own.write_bytes(b"#!" + os.fsencode(target / "python") + separator + rest)
            own.chmod(0o755)


def _make(folder: Path) -> None:
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError(
            f"this Python ({sys.executable}) cannot make virtual environments: it lacks ensurepip.\n"
            "  What to do: on Debian and Ubuntu, apt install python3-venv, then run the same command again."
        )
    shutil.rmtree(folder, ignore_errors=True)
    try:
        venv.create(folder, symlinks=True, with_pip=not _running_pip_is_usable())
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"making {folder} failed: {error}.\n  What to do: check the folder and the disk.") from error


def _running_pip_is_usable() -> bool:
    # Only inside a virtual environment: a system's pip may refuse to install for another interpreter.
    return sys.prefix != sys.base_prefix and importlib.util.find_spec("pip") is not None


def _pip(python: Path, arguments: list[str]) -> str | None:
    """Install with pip for the interpreter `python`. Returns None, or pip's output if it failed."""
    pip = (
        [sys.executable, "-m", "pip", "--python", str(python)]
        if _running_pip_is_usable()
        else [str(python), "-m", "pip"]
    )
    # Python compiles modules when they are imported; pip would compile all that is installed.
    options = ["install", "--disable-pip-version-check", "--no-input", "--no-compile", "--quiet"]
    # Captured, so that warnings of a package index are not shown when pip succeeds.
    done = subprocess.run(
        [*pip, *options, *arguments],
        env={"PIP_RETRIES": "3", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return None if done.returncode == 0 else done.stdout


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
