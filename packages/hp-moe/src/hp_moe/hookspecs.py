"""Hook specifications of hp_moe (entry-point group `hp_moe`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform
    from hp_moe.dispatch import DispatcherRegistry
    from hp_moe.products import GroupedMatmul

hookspec = pluggy.HookspecMarker("hp")


@hookspec(firstresult=True)
def hp_grouped_matmul(platform: Platform) -> GroupedMatmul | None:
    """Called once per platform, before the first product. Returns its grouped matrix product, or None.

    `grouped_matmul(x, weight, sizes)` with x `[rows, in]` in group-major order, weight `[groups, out, in]`
    and sizes a `hp_moe.GroupSizes` gives `[rows, out]`, `x[group e] @ weight[e].T`, differentiable; a group
    without rows gets a gradient of exactly zero. Without an answer a loop of products is used. Since 0.1.
    """


@hookspec
def hp_token_dispatcher(registry: DispatcherRegistry) -> None:
    """Called once, before a dispatcher is first looked up by name. Registers token dispatchers. Since 0.1.

    `registry.add(name, build)`, `build(group, num_experts)` returns a `hp_moe.TokenDispatcher`.
    """
