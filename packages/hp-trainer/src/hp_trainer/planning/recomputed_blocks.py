"""The blocks that a rank computes again in backward, by settings or by a budget of activations."""

from __future__ import annotations

from collections.abc import Hashable

from hp_trainer.memory import KINDS, NOTHING_AGAIN, BlockRecompute, BudgetError, recompute_by_pattern
from hp_trainer.models.recomputation import block_names
from hp_trainer.planning.step_shape import StepShape
from hp_trainer.training.activation_plan import plan_activations


def recompute_of(shape: StepShape) -> list[BlockRecompute]:
    """Return what each block of the model computes again in backward; a user's own module computes nothing again."""
    if shape.module is not None:
        return [NOTHING_AGAIN] * len(shape.module.blocks)
    return shape.shared(("recompute", recompute_key(shape)), lambda: _recompute(shape))


def recompute_key(shape: StepShape) -> Hashable:
    """Return what the choice depends on: with a budget on the whole layout."""
    return None if shape.config.training.activation_budget is None else shape.dims


def _recompute(shape: StepShape) -> list[BlockRecompute]:
    training, num_layers = shape.config.training, shape.model.num_hidden_layers
    keep = KINDS if training.recompute_keep is None else training.recompute_keep
    if training.activation_budget is not None:
        try:
            return plan_activations(shape.config, shape.dims, keep, fused_experts=shape.fuses_experts).of_layers()
        except BudgetError:  # the memory shown is then the least, and above the budget
            return [BlockRecompute(mode="full", offloads=training.offload_activations)] * num_layers
    kept = keep if training.recompute == "selective" else ()
    chosen = BlockRecompute(mode=training.recompute, keep=kept, offloads=training.offload_activations)
    patterns = training.recompute_blocks
    return recompute_by_pattern(block_names(num_layers), chosen, every=training.recompute_every, patterns=patterns)
