"""The blocks that a rank computes again in backward, by settings or by a budget of activations."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hp_trainer.memory import KINDS, NOTHING_AGAIN, BlockRecompute, BudgetError, Kind, recompute_by_pattern
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


def keeps_budget(shape: StepShape) -> bool:
    """Return whether activations can stay within their budget, if there is one: runs whose cannot are refused."""
    return budget_error(shape) is None


def budget_error(shape: StepShape) -> BudgetError | None:
    """Return why activations cannot stay within their budget; None if they can, or there is none."""
    if shape.config.training.activation_budget is None or shape.module is not None:
        return None
    found = _within_budget(shape)
    return found if isinstance(found, BudgetError) else None


def _within_budget(shape: StepShape) -> list[BlockRecompute] | BudgetError:
    """Return the choice that stays within the budget of activations, or why there is none."""

    def find() -> list[BlockRecompute] | BudgetError:
        try:
            return plan_activations(
                shape.config, shape.dims, _kept(shape), fused_experts=shape.fuses_experts
            ).of_layers()
        except BudgetError as error:
            return error.with_traceback(None)  # whose frames would stay as long as the memo

    return shape.shared(("within budget", shape.dims), find)


def _kept(shape: StepShape) -> Sequence[Kind]:
    keep = shape.config.training.recompute_keep
    return KINDS if keep is None else keep


def _recompute(shape: StepShape) -> list[BlockRecompute]:
    training, num_layers = shape.config.training, shape.model.num_hidden_layers
    if training.activation_budget is not None:
        # Without a choice the memory shown is the least, and above the budget.
        least = [BlockRecompute(mode="full", offloads=training.offload_activations)] * num_layers
        found = _within_budget(shape)
        return least if isinstance(found, BudgetError) else found
    kept = tuple(_kept(shape)) if training.recompute == "selective" else ()
    chosen = BlockRecompute(mode=training.recompute, keep=kept, offloads=training.offload_activations)
    patterns = training.recompute_blocks
    return recompute_by_pattern(block_names(num_layers), chosen, every=training.recompute_every, patterns=patterns)
