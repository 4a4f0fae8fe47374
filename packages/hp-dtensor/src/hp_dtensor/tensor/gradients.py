"""Gradients of DTensors: where they can be seen and changed, how they are placed, and what drives a backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.comm import collectives
from hp_dtensor.exceptions import GradientPathError, PlacementError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute import plan_between
from hp_dtensor.redistribute.explicit import check_explicit
from hp_dtensor.spec.placements import Partial, Placement
from hp_dtensor.spec.tensor_spec import TensorSpec, grad_spec, has_gradient, shown_grad_spec
from hp_dtensor.tensor.base import DTensorBase
from hp_dtensor.tensor.redistribution import observe_gradient, placements_on, redistribute

Tensor = Any


def check_hook(x: Any) -> None:
    """Prepare `x` for a hook that is to be called with its gradient; see `varying_view.observe_gradient`.

    Raises:
        GradientPathError: also where autograd does not have that gradient.
    """
    if x._gradient_from:
        raise GradientPathError(
            f"register_hook of {x.spec!r}: {x._gradient_from} sets its gradient at the end of backward, and autograd "
            "has none. Read or change grad after it; torch calls what register_post_accumulate_grad_hook is given then"
        )
    observe_gradient(x)


def lost_hooks(platform: Platform, name: str, parameter: Tensor) -> str | None:
    """Return why another parameter cannot take the place of this one: its hooks would be lost. None: it has none."""
    if not platform.has_gradient_hooks(parameter):
        return None
    return f"{name} has hooks for its gradient, which the DTensor in its place would not call; register them afterwards"


def check_reached(what: str, weights: Sequence[Any]) -> None:
    """Refuse weights whose gradients autograd itself does not give.

    Raises:
        GradientPathError: some do not: those of `fully_shard`, which are not what the forward computes with.
    """
    sources = [x._gradient_from for x in weights if isinstance(x, DTensorBase) and x._gradient_from]
    if sources:
        raise GradientPathError(
            f"{what}: {len(sources)} of {len(weights)} weights get their gradients from {sources[0]} in a backward; "
            "autograd finds none. Run the backward of the loss (platform.backward(loss)), then read weight.grad"
        )


def as_replicated(spec: TensorSpec, grad: Tensor) -> Tensor:
    """Return the gradient (plain) of a value of `spec` as that of the whole, for second derivatives.

    Of a sum every rank has the gradient of its own contribution. What goes back through it is added up over the ranks,
    so it must go through one of them only.
    """
    axes = _summed_axes(spec, grad)
    if not axes:
        return grad
    platform = spec.mesh.platform
    # All ranks hold the same gradient of the sum. In a second derivative each copy would count: only the first rank's
    # lets gradients through.
    is_first = spec.mesh.group_over(axes).rank == 0
    return platform.linear_map(grad, lambda t: t, lambda g: g if is_first else platform.ops.zeros_like(g))


def as_contributed(spec: TensorSpec, grad: Tensor) -> Tensor:
    """Return a gradient (plain) of the whole as that of every rank's contribution: the dual of `as_replicated`."""
    axes = _summed_axes(spec, grad)
    return collectives.vary(grad, [spec.mesh.group_over(axes)]) if axes else grad


def _summed_axes(spec: TensorSpec, grad: Tensor) -> tuple[int, ...]:
    """Return the axes over which a value of `spec` is a sum of several; none if its gradient is not recorded."""
    mesh = spec.mesh
    if mesh.get_coordinate() is None or not mesh.platform.requires_grad(grad):
        return ()
    return tuple(axis for axis, p in enumerate(spec.placements) if p == Partial() and mesh.shape[axis] > 1)


def check_gradient(spec: TensorSpec, value: Tensor) -> TensorSpec:
    """Return the spec that the gradient of a value of `spec` has, and check that `value` can be it.

    Args:
        value: a DTensor, or a plain tensor: this rank's part.

    Raises:
        PlacementError: `value` is placed in another way, or its shape is another one.
    """
    wanted = shown_grad_spec(spec)
    if isinstance(value, DTensorBase):
        # Not `spec`: to look at `_spec` waits for a value that is under way, whose memory is taken next.
        have = value._spec
        if (have.placements, have.mesh, have.shape) != (wanted.placements, wanted.mesh, wanted.shape):
            raise PlacementError(f"grad of a DTensor: expected {wanted!r}, got {have!r}; redistribute it first")
    elif tuple(value.shape) != wanted.local_shape:
        raise PlacementError(
            f"grad of a DTensor {spec!r}: the local gradient must be {list(wanted.local_shape)}, got "
            f"{list(value.shape)}"
        )
    return wanted


def gradient_placed(what: str, spec: TensorSpec, grad_placements: Sequence[Placement]) -> TensorSpec:
    """Return the spec of a gradient of local shards of `spec`, which must have their shape on every rank.

    Raises:
        PlacementError: in the name of `what`: placements that cut in another way than the shards.
    """
    wanted = spec.with_placements(placements_on(what, spec.mesh, grad_placements, spec.ndim))
    for size, placement, value in zip(spec.mesh.shape, wanted.placements, spec.placements, strict=True):
        # An axis of one rank cuts nothing, whatever it is called.
        if size > 1 and placement != value and (placement.is_shard() or value.is_shard()):
            raise PlacementError(
                f"{what}: grad_placements {wanted.describe_placements()} of shards {spec.describe_placements()}: a "
                "gradient is cut where its shard is, and in the same way; elsewhere it is Replicate() or Partial()"
            )
    return wanted


def differentiated(output: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return an output and its gradient, either of which may be a DTensor, as the plain tensors that drive a backward.

    Raises:
        PlacementError: a gradient of another shape, or a plain one that is not the local part of the output's.
    """
    if not isinstance(output, DTensorBase):
        return output, gradient.spec.mesh.platform.unwrap(gradient) if isinstance(gradient, DTensorBase) else gradient
    spec, platform = output.spec, output.spec.mesh.platform
    wanted = grad_spec(spec)
    if gradient is not None and gradient.shape != (
        wanted.shape if isinstance(gradient, DTensorBase) else wanted.local_shape
    ):
        raise PlacementError(
            f"backward from {spec!r}: expected a gradient {list(wanted.shape)}, or as a plain tensor this rank's part "
            f"of it, {list(wanted.local_shape)}; got {list(gradient.shape)}"
        )
    if isinstance(gradient, DTensorBase):
        check_explicit("backward", ("gradient",), gradient.spec, wanted)
        gradient = platform.unwrap(redistribute(gradient, wanted.mesh, wanted.placements))
    with platform.enable_grad():  # reentrant checkpoints drive a backward from within a backward
        if not has_gradient(spec):
            # Only of a sum every contribution has the gradient of the whole.
            check_explicit("backward", (), spec, wanted)
            output = redistribute(output, wanted.mesh, wanted.placements)
        elif gradient is not None:
            gradient = as_contributed(spec, gradient)
        return platform.unwrap(output), gradient


def with_grad_plan(platform: Any, local: Tensor, comes: TensorSpec, wanted: TensorSpec) -> Tensor:
    """Return `local` with its gradient, which arrives placed as `comes`, redistributed to `wanted`."""
    if comes is wanted:
        return local
    plan = plan_between(comes, wanted, platform.itemsize(comes.dtype))
    return platform.linear_map(local, lambda t: t, plan.run)
