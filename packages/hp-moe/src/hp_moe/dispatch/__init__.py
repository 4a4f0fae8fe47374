"""Token dispatchers, which send tokens to the ranks of their experts and the results back."""

from hp_moe.dispatch.all_gather import AllGatherDispatcher
from hp_moe.dispatch.all_to_all import AllToAllDispatcher, CopyPerExpertDispatcher
from hp_moe.dispatch.auto import (
    AutoDispatcher,
    DispatchCost,
    DispatchRates,
    dispatch_costs,
    dispatchers,
    ranks_per_token,
)
from hp_moe.dispatch.base import ChunkedDispatcher, Dispatched, LocalDispatcher, TokenDispatcher
from hp_moe.dispatch.replicating import ReplicatingDispatcher
from hp_moe.dispatch.row_exchange import WireFormat
from hp_moe.dispatch.two_level import TwoLevelDispatcher
from hp_moe.placement import busiest_load, place_copies, place_experts

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "AutoDispatcher",
    "ChunkedDispatcher",
    "CopyPerExpertDispatcher",
    "DispatchCost",
    "DispatchRates",
    "Dispatched",
    "LocalDispatcher",
    "ReplicatingDispatcher",
    "TokenDispatcher",
    "TwoLevelDispatcher",
    "WireFormat",
    "busiest_load",
    "dispatch_costs",
    "dispatchers",
    "place_copies",
    "place_experts",
    "ranks_per_token",
]
