"""Check that the current environment contains exactly the named packages, and that each of them works.

    python -I tools/check_subset.py hp-dtensor hp-platform-torch

Imports every module of every package, and checks that hp-dtensor finds the installed platforms or reports that there
are none.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys
from pathlib import Path

FRAMEWORKS = ("torch", "mindspore")
PLATFORM_PREFIX = "hp-platform-"

# Modules of a platform in `fsdp` are loaded only by hp-fsdp, and so on.
SERVED = {"fsdp": "hp-fsdp", "moe": "hp-moe", "trainer": "hp-trainer"}

# Packages of extras, and the modules that may import them. Plugin modules may not.
OPTIONAL = {
    "pytest": ("hp_dtensor.testing", "hp_fsdp.testing", "hp_moe.testing", "hp_trainer.testing"),
    "pyarrow": ("hp_trainer.integrations",),
    "ray": ("hp_trainer.integrations",),
    "triton": ("hp_platform_torch.moe",),
}


def installed() -> list[str]:
    """Return the names of the installed packages of this repository."""
    names = (each.metadata["Name"] for each in importlib.metadata.distributions())
    return sorted({name for name in names if name.startswith("hp-")})


def modules(package: str, packages: list[str]) -> list[str]:
    """Import every module of a package that is usable with `packages` only, and return their names."""
    root = importlib.import_module(package)
    assert "site-packages" in root.__file__, f"{package} comes from {root.__file__}, not from a wheel"
    names = [package]
    for found in pkgutil.walk_packages(root.__path__, prefix=f"{package}."):
        if usable(found.name, packages) and imported(found.name):
            names.append(found.name)
    return names


def imported(module: str) -> bool:
    """Import `module`. Modules that need an extra which is not installed are skipped."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        users = OPTIONAL.get(str(error.name).split(".")[0])
        if users is not None and module.startswith(users) and not module.endswith(".plugin"):
            return False
        raise
    return True


def usable(module: str, packages: list[str]) -> bool:
    """Return True when `module` is no command and the component it serves is installed."""
    package, part, *_ = module.split(".")
    if module.endswith("__main__"):
        return False
    return not package.startswith("hp_platform") or SERVED.get(part.split("_")[0], packages[0]) in packages


def check_modules(packages: list[str]) -> None:
    """Import all modules, component packages first, to check that none of these imports a framework."""
    for package in sorted(packages, key=lambda name: name.startswith(PLATFORM_PREFIX)):
        count = len(modules(package.replace("-", "_"), packages))
        brought = [name for name in FRAMEWORKS if name in sys.modules]
        if brought and not package.startswith(PLATFORM_PREFIX):
            raise SystemExit(f"importing {package} imported {', '.join(brought)}")
        print(f"  {package} {importlib.metadata.version(package)}: {count} modules import")


def check_platforms(packages: list[str]) -> None:
    """Check that hp-dtensor finds exactly the installed platforms."""
    from hp_dtensor.exceptions import PlatformError
    from hp_dtensor.platform.selection import get_platform

    expected = sorted(name.removeprefix(PLATFORM_PREFIX) for name in packages if name.startswith(PLATFORM_PREFIX))
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
    """Check that the command `hp-train` starts, with or without a platform."""
    if "hp-trainer" in packages:
        command = Path(sys.executable).with_name("hp-train")
        subprocess.run([command, "--help"], check=True, stdout=subprocess.DEVNULL)
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
