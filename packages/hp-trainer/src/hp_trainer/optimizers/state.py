"""States of optimizers that keep them in another form than float32 tensors."""

from __future__ import annotations

import math
from typing import Any

from hp_dtensor.platform.interface import Platform

Tensor = Any


def set_state(optimizer: Any, name: str, slot: str, values: Tensor) -> None:
    """Tell an optimizer that a tensor of its `state()` has been written into, where it does not keep that tensor."""
    if hasattr(optimizer, "set_state"):
        optimizer.set_state(name, slot, values)


def has_plain_state(optimizer: Any) -> bool:
    """Return True if an optimizer keeps the very tensors of its `state()`, so that nobody need tell it of writes."""
    return bool(getattr(optimizer, "has_plain_state", not hasattr(optimizer, "set_state")))


def state_bytes(optimizer: Any, platform: Platform) -> int:
    """Return the bytes of an optimizer's state on this rank."""
    if hasattr(optimizer, "state_bytes"):
        return int(optimizer.state_bytes(platform))
    tensors = [tensor for slots in optimizer.state().values() for tensor in slots.values()]
    return sum(math.prod(platform.local_shape(x)) * platform.itemsize(x.dtype) for x in tensors)
