"""The numbers of an event under the names by which every tracker shows them."""

from __future__ import annotations

import math

from hp_trainer.records import EvaluationRecord, StepRecord


def step_scalars(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a step by name (`train/loss`); those that were not taken are left out."""
    values = {
        "loss": record.loss,
        "gradient_norm": record.gradient_norm,
        "learning_rate": record.learning_rate,
        "tokens_per_second": record.tokens_per_second,
        "samples": record.samples,
        "peak_memory_gib": record.peak_memory_gib,
        "model_flops_per_second": record.model_flops_per_second,
        "utilization": record.utilization,
        **record.metrics,
    }
    return {f"train/{name}": float(value) for name, value in values.items() if value is not None}


def evaluation_scalars(record: EvaluationRecord) -> dict[str, float]:
    """Return the numbers of an evaluation by name: its loss in nats per token, and the perplexity `exp(loss)`."""
    # exp overflows above 709 nats.
    return {"evaluation/loss": record.loss, "evaluation/perplexity": math.exp(min(record.loss, 700.0))}
