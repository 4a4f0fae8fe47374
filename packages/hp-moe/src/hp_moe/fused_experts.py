"""Whole experts in kernels of the platform's own, where it has them."""

from __future__ import annotations

import functools
from typing import Any, Protocol

from hp_dtensor.platform.interface import Platform
from hp_moe.dispatch import Dispatched
from hp_moe.dispatch.permutation import TokenPermutation
from hp_moe.grouped_gemm import GroupSizes
from hp_moe.plugins import plugin_manager

Tensor = Any


class FusedExperts(Protocol):
    """A platform's whole experts, as the hook `hp_fused_experts` returns them."""

    def __call__(
        self,
        x: Tensor,
        permutation: TokenPermutation,
        sizes: GroupSizes,
        scores: Tensor | None,
        weights: tuple[Tensor, ...],
        score_before_experts: bool,
    ) -> Tensor | None: ...


def fused_experts(sent: Dispatched, weights: tuple[Tensor, ...], score_before_experts: bool) -> Tensor | None:
    """Run dispatched rows through their SwiGLU experts in the platform's own kernels; differentiable.

    Args:
        weights: `w1`, `w2`, `w3` as in `GroupedExperts`, this rank's own.

    Returns:
        `[rows, dim]`, for each of `sent.rows` the (weighted) sum of its experts' results; None where the platform
        has no kernels for this, or the rows came in expert-major order.
    """
    if sent.permutation is None:
        return None
    fused = _implementation(sent.sizes.platform)
    if fused is None:
        return None
    return fused(sent.rows, sent.permutation, sent.sizes, sent.scores, weights, score_before_experts)


@functools.cache
def _implementation(platform: Platform) -> FusedExperts | None:
    found: FusedExperts | None = plugin_manager().hook.hp_fused_experts(platform=platform)
    return found
