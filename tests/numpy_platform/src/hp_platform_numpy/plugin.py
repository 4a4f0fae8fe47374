"""The plugin for hp-dtensor, loaded through the entry-point group `hp_dtensor`."""

from __future__ import annotations

import functools

from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.plugins import hookimpl


@hookimpl
def hp_platform() -> Platform:
    return _platform()


@functools.cache
def _platform() -> Platform:
    from hp_platform_numpy.platform import NumpyPlatform

    return NumpyPlatform()
