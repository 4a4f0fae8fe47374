"""Running one operation on DTensors: find its plan, and run that.

In steady state an operation costs the key of its call, a dictionary look-up, the local operation and a wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hp_dtensor.dispatch import implicit_regions
from hp_dtensor.dispatch.plan_cache import Operation, operation_of
from hp_dtensor.platform.interface import Platform
from hp_dtensor.rules.indexing import with_positions


def dispatch(
    platform: Platform, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run operation `name` on arguments of which at least one is a DTensor.

    Args:
        func: the framework's own function; called with local data in the given argument structure.

    Raises:
        ShardingRuleError: the operation has no rule, or its rule refuses these specs.
        MixedOperandsError: plain tensors or other meshes among the arguments.
    """
    return run(operation_of(platform, name), platform, func, args, kwargs)


def run(
    operation: Operation,
    platform: Platform,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run `operation`; as `dispatch`, for a platform that has looked it up."""
    # Before there is a key: what is lifted to a DTensor is part of it.
    if implicit_regions.takes_plain_operands(operation.name):
        args, kwargs = implicit_regions.lifted(platform, operation.name, args, kwargs)
    if operation.indexes:
        args = with_positions(args)
    return operation.plan_for(platform, args, kwargs).run(func, args, kwargs)
