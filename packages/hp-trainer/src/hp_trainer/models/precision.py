"""Precision of a training as the policy of sharded modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_fsdp import MixedPrecisionPolicy

if TYPE_CHECKING:
    from hp_trainer.config import TrainingConfig


def precision_policy(training: TrainingConfig | None) -> MixedPrecisionPolicy:
    """Return the dtypes of computation and of gradients' sums; None: float32."""
    if training is None or training.dtype == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=training.dtype, reduce_dtype=training.reduce_dtype)
