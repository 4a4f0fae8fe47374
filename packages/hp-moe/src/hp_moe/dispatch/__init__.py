"""Token dispatchers: take tokens to the ranks of their experts and bring the results back."""

from hp_moe.dispatch.all_to_all import AllToAllDispatcher
from hp_moe.dispatch.base import Dispatched, TokenDispatcher
from hp_moe.dispatch.local import LocalDispatcher
from hp_moe.dispatch.registry import dispatchers

__all__ = [
    "AllToAllDispatcher",
    "Dispatched",
    "LocalDispatcher",
    "TokenDispatcher",
    "dispatchers",
]
