"""The device that this process runs on."""

from __future__ import annotations

import os

import mindspore as ms

from hp_dtensor.exceptions import PlatformError
from hp_platform_mindspore.capabilities import ASCEND, CPU, Capabilities


def choose_device() -> Capabilities:
    """Set MindSpore's device to an Ascend where there is one, else to the CPU, within what `HP_DEVICE` allows.

    Raises:
        PlatformError: `HP_DEVICE` names a device that MindSpore cannot use here, or operations have run on another one.
    """
    usable = {"cpu": CPU}
    if ms.device_context.ascend.is_available():
        usable = {ASCEND.device_type: ASCEND, **usable}
    wanted = os.environ.get("HP_DEVICE") or next(iter(usable))
    if wanted not in usable:
        raise PlatformError(f"HP_DEVICE is {wanted!r}, but mindspore can use here only: {', '.join(usable)}")
    capabilities = usable[wanted]
    _set_device(capabilities.target)
    if capabilities is CPU:
        # On CPU asynchronous launches are slower, and a failing kernel corrupts the interpreter.
        ms.runtime.launch_blocking()
    return capabilities


def _set_device(target: str) -> None:
    used = ms.get_context("device_target")  # the call below changes it, also where it then fails
    try:
        ms.set_device(target)
    except RuntimeError as error:
        # MindSpore lets nobody choose once an operation has run or a device number was set; the same device is right.
        if used != target:
            raise PlatformError(
                f"MindSpore runs on {used} already, and {target} is wanted; call hp_dtensor.get_platform('mindspore') "
                f"before the first operation, or set HP_DEVICE={used.lower().replace('ascend', 'npu')}"
            ) from error
