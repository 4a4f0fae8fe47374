"""Ids into a dimension that is cut: which are this rank's, and the failure of those that are nobody's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform

Tensor = Any


def own_ids(ops: Any, ids: Tensor, start: int, length: int, size: int) -> tuple[Tensor, Tensor]:
    """Ids relative to a part (0 where outside it), and whether each is inside.

    One outside the whole becomes `length`, so that the local operation fails on it as it would on one device.
    """
    relative = ops.sub(ids, start)
    inside = ops.logical_and(ops.ge(relative, 0), ops.lt(relative, length))
    own = ops.mul(relative, ops.cast(inside, ids.dtype))
    return ops.add(own, ops.mul(ops.cast(_outside(ops, ids, size), ids.dtype), length)), inside


def check_ids(platform: Platform, ids: Tensor, size: int) -> None:
    """Fail as an embedding does where an id is outside `size`: in a kernel, so that nobody waits for the device."""
    ops = platform.ops
    ops.embedding(ops.cast(_outside(ops, ids, size), ids.dtype), ops.zeros((1, 1), platform.dtype("float32")))


def _outside(ops: Any, ids: Tensor, size: int) -> Tensor:
    return ops.logical_or(ops.lt(ids, 0), ops.ge(ids, size))
