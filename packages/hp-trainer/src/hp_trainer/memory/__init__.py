"""Activation memory as a number: what a block keeps for backward, and what it costs to compute it again."""

from hp_trainer.memory.demand import ESTIMATED, CostRates, Demand
from hp_trainer.memory.kept_activations import BlockActivations, KeptTensor
from hp_trainer.memory.planner import BudgetError, RecomputePlan, describe_blocks, plan_recompute
from hp_trainer.memory.recompute import KINDS, NOTHING_AGAIN, BlockRecompute, Kind, recompute_by_pattern
from hp_trainer.memory.sizes import EXPECTED as EXPECTED_SIZE
from hp_trainer.memory.sizes import format_size, parse_size

__all__ = [
    "ESTIMATED",
    "EXPECTED_SIZE",
    "KINDS",
    "NOTHING_AGAIN",
    "BlockActivations",
    "BlockRecompute",
    "BudgetError",
    "CostRates",
    "Demand",
    "KeptTensor",
    "Kind",
    "RecomputePlan",
    "describe_blocks",
    "format_size",
    "parse_size",
    "plan_recompute",
    "recompute_by_pattern",
]
