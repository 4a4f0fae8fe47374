"""Dispatch modes of torch that watch this thread, and whose they are."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_num_dispatch_modes = torch._C._len_torch_dispatch_stack  # of this thread


def is_watched() -> bool:
    """Return True if a dispatch mode of this thread is somebody's who does not know of shards.

    Such a mode (torch's `FlopCounterMode`, say) takes what it is given for the whole, so it is shown plain tensors and
    torch's own process groups. Our own modes say `knows_shards` and change nothing of what is computed.
    """
    return bool(_num_dispatch_modes()) and any(
        not getattr(mode, "knows_shards", False) for mode in _get_current_dispatch_mode_stack()
    )
