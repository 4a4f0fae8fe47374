"""Varying views: how a DTensor enters a computation that differs per rank, with its gradient summed over those ranks.

Replicated data that ranks use differently (R -> V in the terms of `comm.collectives`) has a gradient that must be
summed over them. The view is the point of the graph where that happens, and one view serves all users of a tensor.
What was gathered just before keeps its source here, so that its view sends the gradient back by one reduce-scatter
(S -> V), past the gathered tensor, instead of by an all-reduce and a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm import collectives
from hp_dtensor.exceptions import GradientPathError
from hp_dtensor.redistribute import RedistributePlan

Tensor = Any


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a redistributed DTensor.

    Attributes:
        local: the local data of the source.
        plan: the plan that moved it.
        version: of `local` then; once it has been written, the result is of other values.
        result_version: of the result then, likewise.
    """

    local: Tensor
    plan: RedistributePlan
    version: int
    result_version: int


def vary(x: Any, axes: tuple[int, ...]) -> Tensor:
    """Return the varying view of `x` on `axes` as a plain local tensor: its gradient is summed over those axes.

    One view serves all users of `x`, until `x` is written in place; the view of something just gathered reduces
    straight to its source.
    """
    platform = x._spec.mesh.platform
    local = platform.unwrap(x)
    # R -> V is nothing in forward; without a gradient there is nothing at all to do.
    if not (platform.is_grad_enabled() and platform.requires_grad(local)):
        return local
    return recorded_view(x, local, axes)


def recorded_view(x: Any, local: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return `vary` of `x`, whose local data is `local`, where it is known that operations on it are recorded."""
    platform = x._spec.mesh.platform
    # A leaf outlives the step: a view kept on it would keep the graph of that step alive.
    if platform.is_leaf(x):
        return _varying_view(x, local, axes)
    # One view for all users: their gradients add up in autograd first, and are reduced across ranks once. A view of
    # an earlier version would have the right numbers and the wrong place in the graph.
    version = platform.version(local)
    views = x.__dict__.setdefault("_varying_views", {})
    made_at, view = views.get(axes, (None, None))
    if made_at != version:
        view = _varying_view(x, local, axes)
        views[axes] = version, view
    return view


def forget_source(x: Any) -> None:
    """Let gradients of `x` come through `x` itself from now on, not past it to what it was gathered from.

    Whoever replaces the data of `x` calls it, and whoever looks at its gradient; see `observe_gradient`.
    """
    x.__dict__.pop("_redistributed_from", None)
    x.__dict__.pop("_varying_views", None)


def observe_gradient(x: Any) -> None:
    """Let the gradient of `x` be seen and changed where it passes, as hooks and `retain_grad` do.

    Raises:
        GradientPathError: `x` has been used already in a way whose gradient goes past it.
    """
    if shortcut_views(x):
        raise GradientPathError(
            f"a hook on {x.spec!r}, which was redistributed and then used differently per rank: that gradient goes "
            "straight to what it came from, and the hook would not see it. Register it before the first use."
        )
    forget_source(x)


def shortcut_views(x: Any) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return (axes, view) of the varying views of `x` as it is now whose gradients go past it, partial on `axes`."""
    source: Source | None = x.__dict__.get("_redistributed_from")
    if source is None:
        return []
    version = x._spec.mesh.platform.version(x)
    views = x.__dict__.get("_varying_views", {})
    return [
        (axes, view) for axes, (made_at, view) in views.items() if made_at == version and _has_shortcut(x, source, axes)
    ]


def with_shortcuts(x: Any, grad: Tensor | None, past: Sequence[tuple[tuple[int, ...], Tensor | None]]) -> Tensor | None:
    """Return the gradient (plain) of `x`: what came through it, plus what went past it by its `shortcut_views`.

    Args:
        grad: what came through `x`; None: nothing.
        past: (axes, gradient) of each shortcut view, to be summed over those axes.
    """
    mesh = x._spec.mesh
    for axes, part in past:
        if part is not None:
            summed = collectives.all_reduce(part, mesh.group_over(axes))
            grad = summed if grad is None else mesh.platform.ops.add(grad, summed)
    return grad


def _varying_view(x: Any, local: Tensor, axes: tuple[int, ...]) -> Tensor:
    mesh = x._spec.mesh
    source: Source | None = x.__dict__.get("_redistributed_from")
    if source is not None and _has_shortcut(x, source, axes):
        # The dual of S -> V is one reduce-scatter; through the gathered tensor it would be an all-reduce (the dual of
        # R -> V) and then a slice (that of S -> R): twice the bytes.
        return source.plan.run_varying(source.local, local, axes)
    return collectives.vary(local, [mesh.group_over(axes)])


def _has_shortcut(x: Any, source: Source, axes: tuple[int, ...]) -> bool:
    # A write to either end changes what the shortcut would leave out.
    version = x._spec.mesh.platform.version
    return (
        source.plan.varies_cheaply(axes)
        and source.result_version == version(x)
        and source.version == version(source.local)
    )
