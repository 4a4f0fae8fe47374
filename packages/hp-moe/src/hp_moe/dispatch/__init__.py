"""Token dispatchers: take tokens to the ranks of their experts and bring the results back."""

from hp_moe.dispatch.all_gather import AllGatherDispatcher
from hp_moe.dispatch.all_to_all import AllToAllDispatcher
from hp_moe.dispatch.auto import AutoDispatcher
from hp_moe.dispatch.base import ChunkedDispatcher, Dispatched, TokenDispatcher
from hp_moe.dispatch.copy_per_expert import CopyPerExpertDispatcher
from hp_moe.dispatch.cost_model import DispatchCost, Link, dispatch_costs, ranks_per_token
from hp_moe.dispatch.homes import place_homes
from hp_moe.dispatch.local import LocalDispatcher
from hp_moe.dispatch.placement import busiest_load, place_copies
from hp_moe.dispatch.registry import dispatchers
from hp_moe.dispatch.replicating import ReplicatingDispatcher
from hp_moe.dispatch.two_level import TwoLevelDispatcher
from hp_moe.dispatch.wire_formats import WireFormat

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "AutoDispatcher",
    "ChunkedDispatcher",
    "CopyPerExpertDispatcher",
    "DispatchCost",
    "Dispatched",
    "Link",
    "LocalDispatcher",
    "ReplicatingDispatcher",
    "TokenDispatcher",
    "TwoLevelDispatcher",
    "WireFormat",
    "busiest_load",
    "dispatch_costs",
    "dispatchers",
    "place_copies",
    "place_homes",
    "ranks_per_token",
]
