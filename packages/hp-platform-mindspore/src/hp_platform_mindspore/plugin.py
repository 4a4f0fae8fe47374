"""The plugin for hp-dtensor, loaded through the entry-point group `hp_dtensor`.

Importing this module imports no framework: MindSpore is imported when the platform is requested.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hp_dtensor.exceptions import PlatformError
from hp_dtensor.platform.plugins import check_version, hookimpl, release_of

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform

MINIMUM_MINDSPORE = (2, 9)
NUMPY_LIMIT = (2, 0)
_VERSION_LINE = r"(?im)^version=(.+)$"


@hookimpl
def hp_platform() -> Platform:
    """Return the MindSpore platform, the same object for every caller.

    Raises:
        PlatformError: MindSpore is missing, too old, or does not import; or NumPy is 2 or newer, with which
            its first operation fails.
    """
    check_version("mindspore", MINIMUM_MINDSPORE, "'numpy<2'")
    _check_numpy()
    return _platform()


@hookimpl
def hp_may_have_accelerators() -> bool:
    """Return False if `HP_DEVICE` is cpu, or if no driver of Ascend devices is loaded."""
    return os.environ.get("HP_DEVICE") != "cpu" and any(Path("/dev").glob("davinci*"))


@hookimpl
def hp_driver_files() -> dict[str, tuple[str, str]]:
    """Return the files of Ascend's driver and CANN."""
    toolkit = os.environ.get("ASCEND_HOME_PATH") or "/usr/local/Ascend/ascend-toolkit/latest"
    return {
        "Ascend driver": ("/usr/local/Ascend/driver/version.info", _VERSION_LINE),
        "CANN": (f"{toolkit}/*-linux/ascend_toolkit_install.info", _VERSION_LINE),
    }


@functools.cache
def _platform() -> Platform:
    # At a lower level MindSpore logs every kernel that it compiles or cannot find.
    os.environ.setdefault("GLOG_v", "3")
    try:
        import mindspore  # noqa: F401
    except Exception as error:
        raise PlatformError(f"mindspore does not import: {type(error).__name__}: {error}") from error
    from hp_platform_mindspore.platform import MindSporePlatform

    return MindSporePlatform()


def _check_numpy() -> None:
    found = importlib.metadata.version("numpy")
    if release_of(found) >= NUMPY_LIMIT:
        raise PlatformError(
            f"numpy {found} is too new for mindspore, whose operations fail with numpy 2; expected numpy < 2: "
            "pip install 'numpy<2'"
        )
