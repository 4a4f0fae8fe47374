"""Hook specifications of hp_moe (entry-point group `hp_moe`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform
    from hp_dtensor.platform.registry import Registry

hookspec = pluggy.HookspecMarker("hp")


@hookspec(firstresult=True)
def hp_grouped_matmul(platform: Platform) -> Callable[..., Any] | None:
    """Return a platform's grouped matrix product, a `hp_moe.GroupedMatmul`, or None for other platforms. Since 0.1.

    Called once per platform, before the first product; if all plugins return None, `hp_moe.loop_grouped_matmul` is
    used. The product takes x `[rows, in]` in group-major order, weight `[groups, out, in]` and a `hp_moe.GroupSizes`,
    and returns `[rows, out]`, `x[rows of group e] @ weight[e].T`. It must be differentiable; a group without rows gets
    a gradient of exactly zero. Compare it with `hp_moe.loop_grouped_matmul`.
    """


@hookspec(firstresult=True)
def hp_fused_experts(platform: Platform) -> Callable[..., Any] | None:
    """Return a platform's fused SwiGLU experts, a `hp_moe.FusedExperts`, or None for other platforms. Since 0.1.

    Called once per platform, before the first experts run. The function takes x `[rows, dim]`, the
    `hp_moe.TokenPermutation` that copies rows into expert-major order, a `hp_moe.GroupSizes` of the copies, scores
    float32 `[rows, slots]` or None, weights w1, w3 `[experts, hidden_dim, dim]` and w2 `[experts, dim, hidden_dim]` as
    `(w1, w2, w3)`, and `score_before_experts`. It returns `[rows, dim]`: the sum over a row's slots of score times
    `w2 @ (silu(w1 @ row) * (w3 @ row))`, or with the row scaled by the score instead. It must be differentiable in x,
    scores and weights, give experts without rows gradients of exactly zero, and be bitwise reproducible. It may return
    None for inputs that it does not support; the layer then uses `hp_grouped_matmul`.
    """


@hookspec(firstresult=True)
def hp_wire_format(platform: Platform, name: str) -> Any | None:
    """Return a platform's format of this name for rows sent between ranks, a `hp_moe.WireFormat`, or None. Since 0.1.

    Called for `fp8`: 8-bit floating point with 4 exponent bits. `encode` takes float32 `[rows, blocks, width]` and
    returns int8 codes of that shape and float32 scales `[rows, blocks, 1]`; `decode` returns float32. Neither is
    differentiated.
    """


@hookspec
def hp_token_dispatcher(registry: Registry) -> None:
    """Register token dispatchers by name, for `ExpertParallel("name")`. Since 0.1.

    Called once, before the first look-up. Call `registry.add(name, build)`, where `build(group, num_experts)` returns
    a `hp_moe.TokenDispatcher` for the ranks of a process group.
    """
