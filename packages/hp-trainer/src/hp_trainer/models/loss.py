"""Loss of a language model: cross entropy, label smoothing and z-loss, summed over targets."""

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
    """Loss of next-token prediction, in nats.

    Attributes:
        label_smoothing: share of a target's probability spread evenly over all tokens (Szegedy et al., 2016,
            "Rethinking the Inception architecture for computer vision", section 7).
        z_loss: factor on log(Z)**2, Z being the sum of the exponentials of the logits (Chowdhery et al., 2022, "PaLM",
            section 5).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def summed(self, platform: Platform, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over all targets other than -100.

        Label smoothing and z-loss apply in training only: where no gradients are recorded, the cross entropy is
        returned.

        Args:
            logits: float32 `[..., vocab_size]`; the vocabulary may be sharded.
            targets: int64, shaped and sharded as `logits` without its last dimension.
        """
        ops, tokens = platform.ops, math.prod(targets.shape)
        logits, targets = ops.reshape(logits, (tokens, logits.shape[-1])), ops.reshape(targets, (tokens,))
        targets = replicate_like(targets, logits)
        total = ops.cross_entropy(logits, targets, reduction="sum")
        if not (self.label_smoothing or self.z_loss) or not platform.is_grad_enabled():
            return total
        log_z = ops.logsumexp(logits, 1)
        # Positions without a target contribute nothing to either term.
        is_target = ops.cast(ops.ne(targets, IGNORED), logits.dtype)
        if self.label_smoothing:
            # The mean over the vocabulary of -log p, since log p = logit - log Z.
            even = ops.sum(ops.mul(ops.sub(log_z, ops.mean(logits, 1)), is_target))
            total = ops.add(ops.mul(total, 1 - self.label_smoothing), ops.mul(even, self.label_smoothing))
        if self.z_loss:
            total = ops.add(total, ops.mul(ops.sum(ops.mul(ops.mul(log_z, log_z), is_target)), self.z_loss))
        return total
