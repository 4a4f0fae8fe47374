"""The two kinds of autograd node that everything differentiable here is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Map = Callable[[torch.Tensor], torch.Tensor]


def linear_map(x: torch.Tensor, forward: Map, backward: Map) -> torch.Tensor:
    """`forward(x)`, a linear map whose gradient is its dual `backward`; differentiable any number of times."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _LinearMap.apply(x, forward, backward)
    with torch.no_grad():
        return forward(x)


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Map, backward: Map) -> torch.Tensor:
        ctx.dual = backward, forward
        result = forward(x)
        # A result that is the input would become a view that holds it: with a view kept on its source,
        # as `vary` keeps it, neither could ever be freed.
        return result.detach() if result is x else result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return linear_map(grad, *ctx.dual), None, None


def custom_function(
    forward: Callable[..., Any], backward: Callable[..., Any], *inputs: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """`forward(*inputs)` as one node with the given backward; see `Platform.custom_function`."""
    return _CustomFunction.apply(forward, backward, *inputs)


class _CustomFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.backward_function = backward
        outputs = forward(*inputs)
        ctx.mark_non_differentiable(*_not_differentiable(outputs))
        return tuple(outputs) if isinstance(outputs, list) else outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            result = ctx.backward_function(*grads)
        grads_of_inputs = (result,) if result is None or isinstance(result, torch.Tensor) else tuple(result)
        expected = len(ctx.needs_input_grad) - 2
        if len(grads_of_inputs) != expected:
            raise ValueError(
                f"custom_function: backward returned {len(grads_of_inputs)} gradients, expected {expected}, "
                "one or None per input"
            )
        if torch.is_grad_enabled():
            grads_of_inputs = tuple(_differentiated_once(grad) for grad in grads_of_inputs)
        return None, None, *grads_of_inputs


def _differentiated_once(grad: torch.Tensor | None) -> torch.Tensor | None:
    """`grad` as something whose own derivative is refused: what it depends on is not recorded."""
    if grad is None:
        return None
    return _Refusal.apply(torch.empty(0, requires_grad=True), grad)


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("a custom_function of this platform has no second derivative")


def _not_differentiable(outputs: Any) -> list[torch.Tensor]:
    tensors = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    return [x for x in tensors if isinstance(x, torch.Tensor) and not x.is_floating_point()]
