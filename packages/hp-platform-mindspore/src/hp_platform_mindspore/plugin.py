"""The plugin for hp-dtensor, loaded through the entry-point group `hp_dtensor`.

Importing this module imports no framework: MindSpore comes in when the platform is asked for.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from typing import TYPE_CHECKING

from hp_dtensor.exceptions import PlatformError
from hp_dtensor.platform.plugins import hookimpl

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform

MINIMUM_MINDSPORE = (2, 9)
NUMPY_LIMIT = (2, 0)


@hookimpl
def hp_platform() -> Platform:
    """Return the MindSpore platform, the same object for every caller.

    Raises:
        PlatformError: MindSpore is missing, too old, or does not import; or NumPy is 2 or newer, with which
            its first operation fails.
    """
    _check_mindspore()
    _check_numpy()
    return _platform()


@functools.cache
def _platform() -> Platform:
    # Otherwise MindSpore logs every kernel that it compiles or cannot find.
    os.environ.setdefault("GLOG_v", "3")
    try:
        import mindspore  # noqa: F401
    except Exception as error:
        raise PlatformError(f"mindspore does not import: {type(error).__name__}: {error}") from error
    from hp_platform_mindspore.platform import MindSporePlatform

    return MindSporePlatform()


def _check_mindspore() -> None:
    wanted = ".".join(map(str, MINIMUM_MINDSPORE))
    try:
        found = importlib.metadata.version("mindspore")
    except importlib.metadata.PackageNotFoundError:
        raise PlatformError(
            f"mindspore is not installed; the mindspore platform needs mindspore >= {wanted}: "
            f"pip install 'mindspore>={wanted}' 'numpy<2'"
        ) from None
    if _release(found) < MINIMUM_MINDSPORE:
        raise PlatformError(
            f"mindspore {found} is too old; the mindspore platform needs mindspore >= {wanted}: "
            f"pip install --upgrade 'mindspore>={wanted}' 'numpy<2'"
        )


def _check_numpy() -> None:
    found = importlib.metadata.version("numpy")
    if _release(found) >= NUMPY_LIMIT:
        raise PlatformError(
            f"numpy {found} is too new for mindspore, whose operations fail with numpy 2; expected numpy < 2: "
            "pip install 'numpy<2'"
        )


def _release(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)
