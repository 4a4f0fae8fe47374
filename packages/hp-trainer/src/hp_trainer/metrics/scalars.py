"""The numbers of an event under the names by which every tracker shows them."""

from __future__ import annotations

import math

from hp_trainer.records import EvaluationRecord, StepRecord

# Metrics of single experts begin so. There are thousands of them in a large model: they are for the picture.
EXPERT_LOAD = "expert_load/"


def step_scalars(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a step by name (`train/loss`); those that were not taken are left out.

    So are the loads of single experts.
    """
    values = {
        "loss": record.loss,
        "gradient_norm": record.gradient_norm,
        "learning_rate": record.learning_rate,
        "tokens_per_second": record.tokens_per_second,
        "samples": record.samples,
        "peak_memory_gib": record.peak_memory_gib,
        "model_flops_per_second": record.model_flops_per_second,
        "utilization": record.utilization,
        **{name: value for name, value in record.metrics.items() if not name.startswith(EXPERT_LOAD)},
    }
    return {f"train/{name}": float(value) for name, value in values.items() if value is not None}


def evaluation_scalars(record: EvaluationRecord) -> dict[str, float]:
    """Return the numbers of an evaluation by name: its loss in nats per token, and the perplexity `exp(loss)`."""
    # exp overflows above 709 nats.
    return {"evaluation/loss": record.loss, "evaluation/perplexity": math.exp(min(record.loss, 700.0))}
