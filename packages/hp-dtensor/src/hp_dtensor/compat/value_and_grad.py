"""`parallelize_value_and_grad`: outputs of a function of DTensors and the gradients of its weights, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.exceptions import GradientPathError
from hp_dtensor.parallel.recompute import backward_to_given_inputs
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.spec.tensor_spec import grad_spec
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.gradients import check_autograd_reaches

Tensor = Any


def parallelize_value_and_grad(
    fn: Callable[..., Any], weights: Tensor | Sequence[Tensor], sens: Sequence[float] | None = None
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that computes `(outputs of fn, gradients of weights)`, with single-device values in any layout.

    It takes the arguments of `fn`.

    Args:
        fn: a function that returns one tensor, or several in a tuple or list. The first output is differentiated, or
            all with the weights `sens`. An output with several elements is summed.
        weights: one parameter, or a list or tuple of them. The gradients have the same form. The gradient of a
            parameter that the outputs do not depend on is zero.
        sens: one float per output; only for several outputs.

    Raises:
        TypeError: `sens` is given for a single output, is not a list or tuple of floats, or differs from the outputs
            in length; `weights` are not tensors.
        GradientPathError: a weight requires no gradient or is managed by `fully_shard`; on MindSpore, `fn` uses
            `hp_dtensor.parallel.recompute.checkpoint`.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     weight = platform.Parameter(ones(4, device_mesh=mesh, placements=[Shard(0)]))
        ...     step = parallelize_value_and_grad(lambda: platform.ops.sum(platform.ops.mul(weight, weight)), [weight])
        ...     loss, (grad,) = step()
        ...     return float(platform.to_numpy(loss.full_tensor())), grad.placements
        >>> run_ranks(program, 2)[0]
        (4.0, (Shard(0),))
    """
    if sens is not None and not isinstance(sens, (tuple, list)):
        raise TypeError(f"sens must be a list or tuple of floats, got {type(sens).__name__}")
    if wrong_sens := [item for item in sens or () if not isinstance(item, float)]:
        raise TypeError(f"sens must hold floats, got {wrong_sens}")
    one = not isinstance(weights, (tuple, list))
    listed = [weights] if one else list(weights)
    wrong = [type(weight).__name__ for weight in listed if not hasattr(weight, "dtype")]
    if wrong:
        raise TypeError(f"parallelize_value_and_grad: weights must be one tensor or several, got {', '.join(wrong)}")

    def value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        with backward_to_given_inputs():
            outputs = fn(*args, **kwargs)
        # Decided by the call: the number of outputs is not known before.
        several = isinstance(outputs, (tuple, list))
        losses = _losses(outputs if several else [outputs], several, sens)
        meshes = [x.device_mesh for x in (*listed, *losses) if isinstance(x, DTensor)]
        platform = meshes[0].platform if meshes else get_platform()
        _check_weights(platform, listed)
        # Every rank differentiates the full loss. The gradient of a partial or sharded one would be this rank's share.
        full = [x.full_tensor() if isinstance(x, DTensor) else x for x in losses]
        factors = [platform.ops.full(tuple(x.shape), s, x.dtype) for x, s in zip(full, sens or [1.0], strict=True)]
        grads = platform.grad(full, listed, factors)
        placed = tuple(_like(platform, weight, grad) for weight, grad in zip(listed, grads, strict=True))
        return outputs, placed[0] if one else placed

    return value_and_grad


def _check_weights(platform: Platform, weights: Sequence[Tensor]) -> None:
    # `fully_shard` computes with unsharded copies, so autograd has no path to its parameters.
    check_autograd_reaches("parallelize_value_and_grad", weights)
    without = [index for index, weight in enumerate(weights) if not platform.requires_grad(weight)]
    if without:
        raise GradientPathError(
            f"parallelize_value_and_grad: weights {without} of {len(weights)} require no gradient; requires_grad_() "
            "before fn uses them"
        )


def _losses(outputs: Sequence[Any], several: bool, sens: Any) -> list[Any]:
    """Return the outputs to differentiate: the first one, or all that `sens` weighs."""
    wrong = [type(x).__name__ for x in outputs if not hasattr(x, "dtype")]
    if wrong or not outputs:
        raise TypeError(f"parallelize_value_and_grad: fn must return tensors, got {', '.join(wrong) or 'nothing'}")
    if sens is None:
        return [outputs[0]]
    if not several:
        raise TypeError("sens must be None for a single output")
    if len(sens) != len(outputs):
        raise TypeError(f"sens has {len(sens)} items for {len(outputs)} outputs")
    return list(outputs)


def _like(platform: Platform, weight: Any, grad: Any) -> Any:
    """Return `grad` as a DTensor if `weight` is one. None, the gradient of an unused weight, becomes zeros."""
    if not isinstance(weight, DTensor):
        return platform.ops.zeros_like(weight) if grad is None else grad
    if isinstance(grad, DTensor):
        return grad
    # An unused weight has no contribution on any rank, so zeros in the weight's own placements are its gradient.
    local = platform.ops.zeros_like(platform.unwrap(weight)) if grad is None else grad
    return platform.wrap(local, grad_spec(weight.spec))
