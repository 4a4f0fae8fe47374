"""Tables of the built-in sharding rules, and the registry of these and the plugins' rules."""

from __future__ import annotations

import functools

from hp_dtensor.rules import (
    batch_norm,
    cat_and_split,
    convolutions,
    cross_entropy,
    einsum,
    fourier,
    linear_algebra,
    losses,
    networks,
    padding_and_diagonals,
    pointwise,
    products,
    random,
    reductions,
    roll_and_flip,
    scans,
    sorting,
    views,
    whole_operands,
)
from hp_dtensor.rules.engine.registry import RuleRegistry
from hp_dtensor.rules.indexing import gather, scatter, slices, subscript

TABLES = (
    pointwise, reductions, scans, sorting, products, einsum, linear_algebra, views, cat_and_split, slices, subscript,
    gather, scatter, padding_and_diagonals, roll_and_flip, networks, batch_norm, cross_entropy, convolutions, losses,
    random, fourier, whole_operands,
)  # fmt: skip


def register_builtin_rules(registry: RuleRegistry) -> None:
    """Register the rules of every table; an operation in two tables is an error."""
    for table in TABLES:
        table.register(registry)


@functools.cache
def rule_registry() -> RuleRegistry:
    """Return the registry of all sharding rules: the built-in ones, then those of plugins."""
    from hp_dtensor.platform.plugins import plugin_manager

    registry = RuleRegistry()
    register_builtin_rules(registry)
    plugin_manager().hook.hp_sharding_rules(registry=registry)
    return registry
