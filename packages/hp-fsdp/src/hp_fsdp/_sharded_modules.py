"""Modules that have been through `fully_shard`, as methods and functions are given them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_fsdp._engine.fsdp_state import FSDPState, state_of
from hp_fsdp._engine.group import ParameterGroup
from hp_fsdp.exceptions import FullyShardError

Module = Any


def groups_of(method: str, modules: Sequence[Module]) -> list[ParameterGroup]:
    """Return the groups of sharded modules that were given to `method`, or raise `FullyShardError`."""
    if not isinstance(modules, (list, tuple)):
        raise FullyShardError(f"{method}: expected a list of modules, got {type(modules).__name__}")
    return [state_of_sharded(module).group for module in modules]


def state_of_sharded(module: Module) -> FSDPState:
    """Return the state that `fully_shard` gave a module, or raise `FullyShardError`."""
    state = state_of(module)
    if state is None:
        raise FullyShardError(f"{type(module).__name__} has not been through fully_shard")
    return state
