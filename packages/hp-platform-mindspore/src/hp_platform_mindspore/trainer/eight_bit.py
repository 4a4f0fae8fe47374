"""Search for 8-bit codes of optimizer states."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, mint

from hp_platform_mindspore.platform_base import MindSporeBase
from hp_trainer.optimizers.adamw_8bit import CodeSearch


def find_codes(platform: MindSporeBase, x: Tensor, search: CodeSearch) -> Tensor:
    """Return in which stretch between the bounds of a search each element lies, as uint8; see `FindCodes`."""
    if platform.capabilities.host_memory:
        return platform.from_numpy(search.find(platform.to_numpy(x)))
    return mint.searchsorted(platform.from_numpy(search.bounds, platform.device_of(x)), x).astype(ms.uint8)
