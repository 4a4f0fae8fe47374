"""Sums that a layer keeps from its forward passes in training until the optimizer step is over."""

from __future__ import annotations

from typing import Any

import numpy

from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import is_checkpointed
from hp_dtensor.platform.interface import Platform

Tensor = Any
LOSSES = ("micro_batch", "sequence", "global_batch", "z")


class Tally:
    """Counts of one layer on this rank since they were last taken.

    Attributes:
        counts: int64 `[num_experts]`, choices of each expert, dropped ones too; None: no token was routed.
        dropped: int64 `[1]`, choices beyond the capacity; None: there is no capacity.
        losses: float32 `[4]`, sums over tokens of the auxiliary losses by `LOSSES`, without coefficients; None: none.
        sent_bytes: bytes that left this rank for experts and back, in forward.
    """

    def __init__(self, platform: Platform, num_experts: int) -> None:
        self.platform = platform
        self.num_experts = num_experts
        self.counts: Tensor | None = None
        self.dropped: Tensor | None = None
        self.losses: Tensor | None = None
        self.sent_bytes = 0

    def add(self, name: str, value: Tensor) -> None:
        """Add a tensor to the sum of this name."""
        present = getattr(self, name)
        setattr(self, name, value if present is None else self.platform.ops.add(present, value))

    def take_losses(self) -> Tensor:
        """Return and forget the sums of the auxiliary losses, float32 `[4]`."""
        losses, self.losses = self.losses, None
        return self.platform.zeros((len(LOSSES),), self.platform.dtype("float32")) if losses is None else losses

    def take(self) -> Tensor:
        """Return and forget all counts, as int64 `[num_experts + 2]`: choices, dropped choices, bytes sent."""
        platform, ops = self.platform, self.platform.ops
        int64 = platform.dtype("int64")
        counts = platform.zeros((self.num_experts,), int64) if self.counts is None else self.counts
        dropped = platform.zeros((1,), int64) if self.dropped is None else self.dropped
        device = platform.device_of(counts)
        sent = platform.from_numpy(numpy.array([self.sent_bytes], numpy.int64), device)
        self.counts, self.dropped, self.sent_bytes = None, None, 0
        return ops.cat([counts, dropped, sent], 0)


def is_trained(module: nn.Module) -> bool:
    """Tell a forward pass in training from one that only evaluates, which draws no noise and counts nothing."""
    return module.training and (module.platform.is_grad_enabled() or is_checkpointed())
