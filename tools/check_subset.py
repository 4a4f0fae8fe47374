"""Check, inside an environment, that it holds exactly the named packages and that each of them works there.

    python -I tools/check_subset.py hp-dtensor hp-platform-torch

Every module of every package is imported, and hp-dtensor finds the platforms that are there, or
says that there is none.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import subprocess
import sys

FRAMEWORKS = ("torch", "mindspore")
PLATFORM_PREFIX = "hp-platform-"


def installed() -> list[str]:
    """Return the names of the installed packages of this repository."""
    names = (each.metadata["Name"] for each in importlib.metadata.distributions())
    return sorted({name for name in names if name.startswith("hp-")})


def modules(package: str) -> list[str]:
    """Import every module of a package and return their names."""
    root = importlib.import_module(package)
    assert "site-packages" in root.__file__, f"{package} comes from {root.__file__}, not from a wheel"
    names = [package]
    for found in pkgutil.walk_packages(root.__path__, prefix=f"{package}."):
        if found.name.rpartition(".")[2] != "__main__" and not needs_pytest(found.name):
            importlib.import_module(found.name)
            names.append(found.name)
    return names


def needs_pytest(module: str) -> bool:
    return module.startswith("hp_dtensor.testing") and importlib.util.find_spec("pytest") is None


def check_modules(packages: list[str]) -> None:
    """Import component packages first: none of them may bring a framework in."""
    for package in sorted(packages, key=lambda name: name.startswith(PLATFORM_PREFIX)):
        count = len(modules(package.replace("-", "_")))
        brought = [name for name in FRAMEWORKS if name in sys.modules]
        if brought and not package.startswith(PLATFORM_PREFIX):
            raise SystemExit(f"importing {package} imported {', '.join(brought)}")
        print(f"  {package} {importlib.metadata.version(package)}: {count} modules import")


def check_platforms(packages: list[str]) -> None:
    """Check that hp-dtensor finds just the platforms that are installed."""
    from hp_dtensor.exceptions import PlatformError
    from hp_dtensor.selection import get_platform

    expected = sorted(
        name.removeprefix(PLATFORM_PREFIX) for name in packages if name.startswith(PLATFORM_PREFIX)
    )
    for name in expected:
        assert get_platform(name).name == name
    if len(expected) == 1:
        assert get_platform().name == expected[0]
        print(f"  the platform is {expected[0]}")
        return
    try:
        get_platform()
    except PlatformError as error:
        print(f"  without a choice: {error}")
    else:
        raise SystemExit(f"with the platforms {expected}, a choice was expected to be asked for")


def check_commands(packages: list[str]) -> None:
    """Check that the command of hp-trainer starts, with a platform or without one."""
    if "hp-trainer" in packages:
        subprocess.run(
            [sys.executable, "-I", "-m", "hp_trainer", "--help"], check=True, stdout=subprocess.DEVNULL
        )
        print("  hp-train --help works")


def main(packages: list[str]) -> None:
    print(f"subset {' '.join(packages)}", flush=True)
    if installed() != sorted(packages):
        raise SystemExit(f"expected the packages {sorted(packages)}, installed are {installed()}")
    check_modules(packages)
    check_platforms(packages)
    check_commands(packages)


if __name__ == "__main__":
    main(sys.argv[1:])
