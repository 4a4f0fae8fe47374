"""Mixture of experts over a mesh: routing, dispatch, grouped experts, combine."""

from hp_moe.balance import LoadMetrics, moe_layers, update_expert_bias
from hp_moe.dispatch import (
    AllToAllDispatcher,
    Dispatched,
    LocalDispatcher,
    TokenDispatcher,
)
from hp_moe.dispatch.permutation import TokenPermutation
from hp_moe.exceptions import ExpertParallelError, MoEConfigError
from hp_moe.experts import GroupedExperts
from hp_moe.feed_forward import FeedForward
from hp_moe.fused_experts import FusedExperts
from hp_moe.grouped_gemm import GroupedMatmul, GroupSizes, grouped_matmul, loop_grouped_matmul
from hp_moe.moe import MoE
from hp_moe.router import Routing, TokenChoiceTopKRouter
from hp_moe.styles import (
    BaseExpertParallel,
    ExpertParallel,
    ExpertTensorParallel,
    ReplicatedExperts,
    TensorParallel,
)

__version__ = "0.1.0"

__all__ = [
    "AllToAllDispatcher",
    "BaseExpertParallel",
    "Dispatched",
    "ExpertParallel",
    "ExpertParallelError",
    "ExpertTensorParallel",
    "FeedForward",
    "FusedExperts",
    "GroupSizes",
    "GroupedExperts",
    "GroupedMatmul",
    "LoadMetrics",
    "LocalDispatcher",
    "MoE",
    "MoEConfigError",
    "ReplicatedExperts",
    "Routing",
    "TensorParallel",
    "TokenChoiceTopKRouter",
    "TokenDispatcher",
    "TokenPermutation",
    "grouped_matmul",
    "loop_grouped_matmul",
    "moe_layers",
    "update_expert_bias",
]
