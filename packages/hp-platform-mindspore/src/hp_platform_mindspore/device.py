"""The device that this process runs on."""

from __future__ import annotations

import os

import mindspore as ms

from hp_dtensor.exceptions import PlatformError
from hp_platform_mindspore.capabilities import ASCEND, CPU, Capabilities


def choose_device() -> Capabilities:
    """Set MindSpore's device to an Ascend where there is one, else to the CPU, within what `HP_DEVICE` allows.

    Raises:
        PlatformError: `HP_DEVICE` names a device that MindSpore cannot use here.
    """
    usable = {"cpu": CPU}
    if ms.device_context.ascend.is_available():
        usable = {ASCEND.device_type: ASCEND, **usable}
    wanted = os.environ.get("HP_DEVICE") or next(iter(usable))
    if wanted not in usable:
        raise PlatformError(f"HP_DEVICE is {wanted!r}, but mindspore can use here only: {', '.join(usable)}")
    capabilities = usable[wanted]
    ms.set_device(capabilities.target)
    if capabilities is CPU:
        # On CPU asynchronous launches are slower, and a failing kernel corrupts the interpreter.
        ms.runtime.launch_blocking()
    return capabilities
