"""Search for 8-bit codes of optimizer states."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from hp_platform_mindspore.platform_base import MindSporeBase


def find_codes(platform: MindSporeBase, x: Tensor, bounds: np.ndarray) -> Tensor:
    """Return in which stretch between increasing float32 bounds each element lies, as uint8; see `FindCodes`."""
    if platform.capabilities.host_memory:
        return platform.from_numpy(np.searchsorted(bounds, platform.to_numpy(x)).astype(np.uint8))
    return mint.searchsorted(platform.from_numpy(bounds, platform.device_of(x)), x).astype(ms.uint8)
