"""Losses of a decoder in training: cross entropy, label smoothing and z-loss, summed over targets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import replicate_like

Tensor = Any
IGNORED = -100


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each target, in nats.

    Attributes:
        label_smoothing: share of a target that is spread evenly over all tokens (Szegedy et al., 2016, "Rethinking the
            Inception architecture for computer vision", section 7).
        z_loss: factor on log(Z)**2, Z being the sum of the exponentials of the logits (Chowdhery et al., 2022, "PaLM",
            section 5).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def summed(self, platform: Platform, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over all targets but -100.

        Label smoothing and z-loss are for training: where no gradients are recorded it is the cross entropy alone.

        Args:
            logits: float32 `[..., vocab_size]`, whose vocabulary may be cut.
            targets: int64, of the shape of `logits` without its last dimension, laid out like it.
        """
        ops, tokens = platform.ops, math.prod(targets.shape)
        logits, targets = ops.reshape(logits, (tokens, logits.shape[-1])), ops.reshape(targets, (tokens,))
        targets = replicate_like(targets, logits)
        total = ops.cross_entropy(logits, targets, reduction="sum")
        if not (self.label_smoothing or self.z_loss) or not platform.is_grad_enabled():
            return total
        log_z = ops.logsumexp(logits, 1)
        taken = ops.cast(ops.ne(targets, IGNORED), logits.dtype)
        if self.label_smoothing:
            # The mean over the vocabulary of -log p, since log p = logit - log Z.
            even = ops.sum(ops.mul(ops.sub(log_z, ops.mean(logits, 1)), taken))
            total = ops.add(ops.mul(total, 1 - self.label_smoothing), ops.mul(even, self.label_smoothing))
        if self.z_loss:
            total = ops.add(total, ops.mul(ops.sum(ops.mul(ops.mul(log_z, log_z), taken)), self.z_loss))
        return total
