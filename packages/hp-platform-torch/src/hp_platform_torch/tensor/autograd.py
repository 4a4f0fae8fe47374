"""Two kinds of autograd node: linear maps with a dual, and functions with a given backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Map = Callable[[torch.Tensor], torch.Tensor]


def linear_map(x: torch.Tensor, forward: Map, backward: Map) -> torch.Tensor:
    """Apply `forward`, a linear map whose gradient is its dual `backward`; differentiable any number of times."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _LinearMap.apply(x, forward, backward)
    with torch.no_grad():
        return forward(x)


def _no_view(result: torch.Tensor) -> torch.Tensor:
    """Detach a view from its base: results of a node may be written in place, and torch refuses to write such views."""
    return result.detach() if result._is_view() else result


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Map, backward: Map) -> torch.Tensor:
        ctx.dual = backward, forward
        # A result that is the input would become a view that holds it: with a view kept on its source,
        # as `vary` keeps it, neither could ever be freed.
        result = forward(x)
        return result.detach() if result is x else _no_view(result)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # Itself a linear map with the roles exchanged, so that second derivatives (`create_graph=True`) are right
        # without further code.
        return linear_map(grad, *ctx.dual), None, None


def custom_function(
    forward: Callable[..., Any], backward: Callable[..., Any], *inputs: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Run `forward(*inputs)` as one node with the given backward; see `Platform.custom_function`."""
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    # The gradient is not differentiable, but torch must know that it depends on the inputs: silent zeros as a second
    # derivative would be wrong. The anchor carries that edge without their data.
    anchor = _Anchor.apply(*inputs) if recorded else None
    return _CustomFunction.apply(forward, backward, anchor, *inputs)


class _CustomFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], anchor: torch.Tensor | None, *inputs: Any
    ) -> Any:
        ctx.backward_function, ctx.anchor = backward, anchor
        outputs = forward(*inputs)
        # Of several outputs the unused ones give None, not zeros that have to be made; a single one that is unused has
        # no backward at all.
        # `split_backward` calls nodes by itself, and torch does not tell it what has been set.
        ctx.materializes = isinstance(outputs, torch.Tensor)
        ctx.set_materialize_grads(ctx.materializes)
        ctx.mark_non_differentiable(*_not_differentiable(outputs))
        return tuple(outputs) if isinstance(outputs, (list, tuple)) else _no_view(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            result = ctx.backward_function(*grads)
        if not _keeps_graph():
            # As torch frees what its own nodes have saved, once they have run: whoever holds the loss holds this node.
            # One that has raised may be tried again.
            ctx.backward_function = _refuse_again
        grads_of_inputs = (result,) if result is None or isinstance(result, torch.Tensor) else tuple(result)
        expected = len(ctx.needs_input_grad) - 3
        if len(grads_of_inputs) != expected:
            raise ValueError(
                f"custom_function: backward returned {len(grads_of_inputs)} gradients, expected {expected}, "
                "one or None per input"
            )
        if torch.is_grad_enabled():
            depends_on = ctx.anchor, *(grad for grad in grads if grad is not None)
            grads_of_inputs = tuple(_differentiated_once(grad, depends_on) for grad in grads_of_inputs)
        return None, None, None, *grads_of_inputs


_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def _refuse_again(*grads: Any) -> Any:
    raise RuntimeError(
        "a second backward through a graph whose saved tensors the first one has freed; pass retain_graph=True to the "
        "first one"
    )


class _Anchor(torch.autograd.Function):
    """Empty tensor that depends on tensors in the graph without keeping their data."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * len(ctx.needs_input_grad)


def _differentiated_once(grad: torch.Tensor | None, depends_on: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return `grad` as the result of a node that refuses to be differentiated: its derivative is not recorded."""
    return None if grad is None else _Refusal.apply(grad, *depends_on)


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, *depends_on: torch.Tensor) -> torch.Tensor:
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "no second derivative: the gradient of a custom_function is not recorded. Such are reductions over ranks "
            "by max, min or product"
        )


def _not_differentiable(outputs: Any) -> list[torch.Tensor]:
    tensors = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    return [x for x in tensors if isinstance(x, torch.Tensor) and not x.is_floating_point()]
