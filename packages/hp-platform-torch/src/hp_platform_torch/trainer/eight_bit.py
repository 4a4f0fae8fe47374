"""Search for 8-bit codes of optimizer states."""

from __future__ import annotations

import numpy as np
import torch


def find_codes(x: torch.Tensor, bounds: np.ndarray) -> torch.Tensor:
    """Return in which stretch between increasing float32 bounds each element lies, as uint8; see `FindCodes`."""
    return torch.bucketize(x, torch.from_numpy(bounds).to(x.device), out_int32=True).to(torch.uint8)
