"""Metrics of a step's routing, from the loads of the blocks' experts."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from hp_moe import LoadMetrics
from hp_trainer.metrics.scalars import EXPERT_LOAD


def expert_metrics(loads: Mapping[str, LoadMetrics]) -> dict[str, float]:
    """Return the metrics by name; none for a model without experts.

    - `max_load_violation`: the largest load of any block over the mean one, less 1.
    - `load_variation`: standard deviation of a block's loads over their mean, the mean over the blocks.
    - `load_entropy`: that of a block's loads over that of even ones, the smallest of any block.
    - `dead_experts`: experts of all blocks without a token.
    - `dropped_choices`: share of all choices that were beyond the capacity.
    - `expert_bytes_sent`: bytes that left a rank for experts and back, in forward, of all ranks.
    - `aux_loss/...`: auxiliary losses without their coefficients, means over the blocks.
    - `expert_load/<block>/<expert>`: an expert's load over the mean one of its block.
    """
    if not loads:
        return {}
    blocks = list(loads.values())
    choices = sum(block.tokens for block in blocks)
    metrics = {
        "max_load_violation": max(block.max_violation for block in blocks),
        "load_variation": fmean(block.coefficient_of_variation for block in blocks),
        "load_entropy": min(block.entropy for block in blocks),
        "dead_experts": float(sum(block.idle_experts for block in blocks)),
        "dropped_choices": sum(block.dropped for block in blocks) / max(choices, 1),
        "expert_bytes_sent": float(sum(block.sent_bytes for block in blocks)),
    }
    for name in blocks[0].aux_losses:
        metrics[f"aux_loss/{name}"] = fmean(block.aux_losses[name] for block in blocks)
    for name, block in loads.items():
        mean = max(block.tokens, 1) / len(block.loads)
        layer = name.removesuffix(".moe").removeprefix("layers.")
        metrics |= {f"{EXPERT_LOAD}{layer}/{expert}": load / mean for expert, load in enumerate(block.loads)}
    return metrics
