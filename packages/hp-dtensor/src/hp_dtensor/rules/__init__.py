"""Sharding rules: tables of operations as factors, and the engine that reads them (see README.md)."""

from hp_dtensor.rules import (
    advanced,
    batch_norm,
    convolutions,
    cross_entropy,
    einsum,
    linear_algebra,
    losses,
    moves,
    networks,
    pointwise,
    products,
    random,
    reductions,
    scans,
    scattering,
    selection,
    slices,
    views,
)
from hp_dtensor.rules.factors import Factorization
from hp_dtensor.rules.registry import OpCall, RuleRegistry

__all__ = ["Factorization", "OpCall", "RuleRegistry", "register_builtin_rules"]


def register_builtin_rules(registry: RuleRegistry) -> None:
    """Register every rule of this package."""
    tables = (
        pointwise, reductions, scans, products, einsum, linear_algebra, views, slices, moves, selection, advanced,
        scattering, networks, batch_norm, cross_entropy, convolutions, losses, random,
    )  # fmt: skip
    for table in tables:
        table.register(registry)
