"""Plugin for hp-dtensor, loaded through the entry-point group `hp_dtensor`.

Importing this module imports no framework: torch comes in when the platform is asked for.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hp_dtensor.exceptions import PlatformError
from hp_dtensor.platform.plugins import check_version, hookimpl

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform

MINIMUM_TORCH = (2, 11)
_VERSION_LINE = r"(?im)^version=(.+)$"


@hookimpl
def hp_platform() -> Platform:
    """Return the torch platform, the same object each time.

    Raises:
        PlatformError: torch is missing, too old, or does not import.
    """
    _check_torch()
    return _platform()


# Device files of the drivers: CUDA (also of Jetson and of WSL), ROCm, Ascend.
_DEVICE_FILES = ("nvidia*", "nvhost*", "nvgpu", "nvmap", "dxg", "kfd", "davinci*")


@hookimpl
def hp_may_have_accelerators() -> bool:
    """Return False if `HP_DEVICE` is cpu, or if no driver of a device type that torch can use is loaded."""
    return os.environ.get("HP_DEVICE") != "cpu" and any(any(Path("/dev").glob(name)) for name in _DEVICE_FILES)


@hookimpl
def hp_driver_files() -> dict[str, tuple[str, str]]:
    """Return the files of NVIDIA's driver, and of Ascend's driver and CANN."""
    toolkit = os.environ.get("ASCEND_HOME_PATH") or "/usr/local/Ascend/ascend-toolkit/latest"
    return {
        "NVIDIA driver": ("/proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+\.[\d.]+)"),
        "Ascend driver": ("/usr/local/Ascend/driver/version.info", _VERSION_LINE),
        "CANN": (f"{toolkit}/*-linux/ascend_toolkit_install.info", _VERSION_LINE),
    }


@functools.cache
def _platform() -> Platform:
    from hp_platform_torch.platform import TorchPlatform

    return TorchPlatform()


def _check_torch() -> None:
    check_version("torch", MINIMUM_TORCH)
    try:
        import torch  # noqa: F401
    except Exception as error:
        found = importlib.metadata.version("torch")
        raise PlatformError(f"torch {found} does not import: {type(error).__name__}: {error}") from error
