"""Gradients of DTensors: hooks, placements, and the inputs of a backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.comm import collectives
from hp_dtensor.exceptions import GradientPathError, PlacementError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute import plan_between
from hp_dtensor.redistribute.explicit import check_explicit
from hp_dtensor.spec.placements import Partial, Placement
from hp_dtensor.spec.tensor_spec import TensorSpec, grad_spec, has_gradient, visible_grad_spec
from hp_dtensor.tensor.base import DTensorBase
from hp_dtensor.tensor.redistribution import observe_gradient, placements_on, redistribute

Tensor = Any


def check_hook(x: Any) -> None:
    """Prepare `x` for a hook on its gradient; see `observe_gradient`.

    Raises:
        GradientPathError: as there, and if autograd does not compute that gradient.
    """
    if x._gradient_from:
        raise GradientPathError(
            f"register_hook of {x.spec!r}: {x._gradient_from} sets its gradient at the end of backward, and autograd "
            "has none. Read or change grad after it; on torch, use register_post_accumulate_grad_hook"
        )
    observe_gradient(x)


def lost_hooks(platform: Platform, name: str, parameter: Tensor) -> str | None:
    """Return an error message if replacing this parameter would lose hooks on its gradient, else None."""
    if not platform.has_gradient_hooks(parameter):
        return None
    return (
        f"{name} has hooks for its gradient, which the DTensor that replaces it would not call; "
        "register them afterwards"
    )


def check_autograd_reaches(what: str, weights: Sequence[Any]) -> None:
    """Check that autograd itself computes the gradients of the weights.

    Raises:
        GradientPathError: it does not for parameters of `fully_shard`: forward computes with their unsharded copies,
            and the gradients are set at the end of backward.
    """
    # `fully_shard` names itself on the parameters that it has sharded.
    sources = [x._gradient_from for x in weights if isinstance(x, DTensorBase) and x._gradient_from]
    if sources:
        raise GradientPathError(
            f"{what}: {len(sources)} of {len(weights)} weights get their gradients from {sources[0]} in a backward; "
            "autograd finds none. Run the backward of the loss (platform.backward(loss)), then read weight.grad"
        )


def as_replicated(spec: TensorSpec, grad: Tensor) -> Tensor:
    """Return the local gradient of a partial sum, which is equal on all ranks, as a replicated tensor.

    Its own gradient, in a second derivative, arrives on every rank and is summed over them. So it passes to the first
    rank's copy only, and counts once.
    """
    axes = _summed_axes(spec, grad)
    if not axes:
        return grad
    platform = spec.mesh.platform
    is_first = spec.mesh.group_over(axes).rank == 0
    return platform.linear_map(grad, lambda t: t, lambda g: g if is_first else platform.ops.zeros_like(g))


def as_contributed(spec: TensorSpec, grad: Tensor) -> Tensor:
    """Return the replicated gradient of a partial sum as that of each rank's contribution: the dual of `as_replicated`.

    Its own gradient, in a second derivative, is summed over the ranks.
    """
    axes = _summed_axes(spec, grad)
    return collectives.vary(grad, [spec.mesh.group_over(axes)]) if axes else grad


def _summed_axes(spec: TensorSpec, grad: Tensor) -> tuple[int, ...]:
    """Return the axes over which a value of `spec` is a partial sum; none if its gradient is not recorded."""
    mesh = spec.mesh
    if mesh.get_coordinate() is None or not mesh.platform.requires_grad(grad):
        return ()
    # Of sums only: every contribution to a sum has the gradient of the sum.
    return tuple(axis for axis, p in enumerate(spec.placements) if p == Partial() and mesh.shape[axis] > 1)


def check_gradient(spec: TensorSpec, value: Tensor) -> TensorSpec:
    """Return the spec of the gradient of a value of `spec`, after checking that `value` has it.

    Args:
        value: a DTensor, or this rank's shard as a plain tensor.

    Raises:
        PlacementError: mesh, placements or shape differ.
    """
    wanted = visible_grad_spec(spec)
    if isinstance(value, DTensorBase):
        # `_spec` and not `spec`: reading it waits for a pending value, whose storage is used next.
        have = value._spec
        if (have.placements, have.mesh, have.shape) != (wanted.placements, wanted.mesh, wanted.shape):
            raise PlacementError(f"grad of a DTensor: expected {wanted!r}, got {have!r}; redistribute it first")
    elif tuple(value.shape) != wanted.local_shape:
        raise PlacementError(
            f"grad of a DTensor {spec!r}: the local gradient must be {list(wanted.local_shape)}, got "
            f"{list(value.shape)}"
        )
    return wanted


def checked_grad_spec(what: str, spec: TensorSpec, grad_placements: Sequence[Placement]) -> TensorSpec:
    """Return the spec of a gradient with `grad_placements` for local shards of `spec`.

    Raises:
        PlacementError: the gradient would be sharded unlike the value, so that local shapes differ.
    """
    wanted = spec.with_placements(placements_on(what, spec.mesh, grad_placements, spec.ndim))
    for size, placement, value in zip(spec.mesh.shape, wanted.placements, spec.placements, strict=True):
        # On an axis of one rank all placements mean the same.
        if size > 1 and placement != value and (placement.is_shard() or value.is_shard()):
            raise PlacementError(
                f"{what}: grad_placements {wanted.describe_placements()} of shards {spec.describe_placements()}: a "
                "gradient is sharded like its value; on other axes it is Replicate() or Partial()"
            )
    return wanted


def plain_backward_arguments(output: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return an output and its gradient, which may be DTensors, as plain tensors to call the framework's backward with.

    Raises:
        PlacementError: the gradient has another shape than the output, or a plain gradient than its shard.
    """
    if not isinstance(output, DTensorBase):
        return output, gradient.spec.mesh.platform.unwrap(gradient) if isinstance(gradient, DTensorBase) else gradient
    spec: TensorSpec = output._spec
    platform, wanted = spec.mesh.platform, grad_spec(spec)
    if gradient is not None and gradient.shape != (
        wanted.shape if isinstance(gradient, DTensorBase) else wanted.local_shape
    ):
        raise PlacementError(
            f"backward from {spec!r}: expected a gradient {list(wanted.shape)}, or this rank's shard of it as a plain "
            f"tensor, {list(wanted.local_shape)}; got {list(gradient.shape)}"
        )
    if isinstance(gradient, DTensorBase):
        # Autograd works on local tensors, so placements are settled before it starts.
        check_explicit("backward", ("gradient",), gradient.spec, wanted)
        gradient = platform.unwrap(redistribute(gradient, wanted.mesh, wanted.placements))
    if platform.is_grad_enabled():
        return _root_and_seed(output, wanted, gradient)
    with platform.enable_grad():  # reentrant checkpoints call backward inside of a backward
        return _root_and_seed(output, wanted, gradient)


def _root_and_seed(output: Any, wanted: TensorSpec, gradient: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return a DTensor as plain root of a backward, and its seed from a plain gradient of spec `wanted`."""
    spec: TensorSpec = output._spec
    if not has_gradient(spec):
        # Partial, but not a sum: the contributions have different gradients. So the output is reduced first.
        check_explicit("backward", (), spec, wanted)
        output = redistribute(output, wanted.mesh, wanted.placements)
    elif gradient is not None:
        gradient = as_contributed(spec, gradient)
    return wanted.mesh.platform.unwrap(output), gradient


def with_redistributed_grad(platform: Any, local: Tensor, arriving: TensorSpec, wanted: TensorSpec) -> Tensor:
    """Return `local` with a backward that redistributes its gradient from `arriving` to `wanted`."""
    if arriving is wanted:
        return local
    # The identity in forward: the node exists for its gradient.
    plan = plan_between(arriving, wanted, platform.itemsize(arriving.dtype))
    return platform.linear_map(local, lambda t: t, plan.run)
