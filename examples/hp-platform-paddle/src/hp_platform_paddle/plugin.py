"""The plugin for hp-dtensor, loaded through the entry-point group `hp_dtensor`."""

from __future__ import annotations

import functools

from hp_dtensor import hookimpl
from hp_dtensor.platform.interface import Platform


@hookimpl
def hp_platform() -> Platform:
    return _platform()


# The same object each time. Paddle is imported only here.
@functools.cache
def _platform() -> Platform:
    from hp_platform_paddle.platform import PaddlePlatform

    return PaddlePlatform()


@hookimpl
def hp_may_have_accelerators() -> bool:
    return False
