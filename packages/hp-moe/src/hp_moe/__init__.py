"""Mixture of experts over a mesh: routing, dispatch, grouped experts, combine."""

from hp_moe.conversion import from_huggingface, moe_options, to_huggingface, upcycle
from hp_moe.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    AutoDispatcher,
    ChunkedDispatcher,
    CopyPerExpertDispatcher,
    DispatchCost,
    Dispatched,
    DispatchRates,
    LocalDispatcher,
    ReplicatingDispatcher,
    TokenDispatcher,
    TwoLevelDispatcher,
    WireFormat,
    busiest_load,
    dispatch_costs,
    place_copies,
    place_experts,
    ranks_per_token,
)
from hp_moe.dispatch.permutation import TokenPermutation
from hp_moe.exceptions import ExpertParallelError, MoEConfigError
from hp_moe.expert_parallel import (
    BaseExpertParallel,
    ExpertParallel,
    ExpertTensorParallel,
    ReplicatedExperts,
    TensorParallel,
    expert_shard_dim,
)
from hp_moe.experts import (
    Activation,
    ExpertWeights,
    FeedForward,
    FusedExperts,
    GroupedExperts,
    clamped_swiglu,
    has_fused_experts,
)
from hp_moe.grouped_gemm import GroupedMatmul, GroupSizes, grouped_bias, grouped_matmul, loop_grouped_matmul
from hp_moe.load_balance import (
    LoadMetrics,
    moe_layers,
    update_expert_bias,
    update_expert_copies,
)
from hp_moe.losses import AuxLosses
from hp_moe.moe import MoE
from hp_moe.relocation import expert_placement, move_experts, return_experts, set_expert_placement
from hp_moe.replay import RoutingRecord, record_routing, replay_routing
from hp_moe.router import Scoring, TokenChoiceTopKRouter
from hp_moe.routing import Capacity, Routing

__version__ = "0.3.0"

__all__ = [
    "Activation",
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "AutoDispatcher",
    "AuxLosses",
    "BaseExpertParallel",
    "Capacity",
    "ChunkedDispatcher",
    "CopyPerExpertDispatcher",
    "DispatchCost",
    "DispatchRates",
    "Dispatched",
    "ExpertParallel",
    "ExpertParallelError",
    "ExpertTensorParallel",
    "ExpertWeights",
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
    "ReplicatingDispatcher",
    "Routing",
    "RoutingRecord",
    "Scoring",
    "TensorParallel",
    "TokenChoiceTopKRouter",
    "TokenDispatcher",
    "TokenPermutation",
    "TwoLevelDispatcher",
    "WireFormat",
    "busiest_load",
    "clamped_swiglu",
    "dispatch_costs",
    "expert_placement",
    "expert_shard_dim",
    "from_huggingface",
    "grouped_bias",
    "grouped_matmul",
    "has_fused_experts",
    "loop_grouped_matmul",
    "moe_layers",
    "moe_options",
    "move_experts",
    "place_copies",
    "place_experts",
    "ranks_per_token",
    "record_routing",
    "replay_routing",
    "return_experts",
    "set_expert_placement",
    "to_huggingface",
    "upcycle",
    "update_expert_bias",
    "update_expert_copies",
]
