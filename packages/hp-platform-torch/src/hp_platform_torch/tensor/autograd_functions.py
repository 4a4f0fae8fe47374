"""Handlers of torch's autograd functions: `backward`, `torch.autograd.grad`, and hooks of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hp_dtensor.exceptions import GradientPathError
from hp_dtensor.tensor.gradients import check_hook, check_reached, differentiated
from hp_dtensor.tensor.redistribution import observe_gradient, shortcut_views, with_shortcuts
from hp_platform_torch.tensor.dtensor import TorchDTensor, unwrap_gradient, wrap_gradient
from hp_platform_torch.tensor.local_operations import LocalOperations, locally
from hp_platform_torch.tensor.torch_functions import Handler

Tensor = torch.Tensor


def _backward(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Handle `torch.Tensor.backward`. Interception stays on, so that hooks and recomputation see DTensors."""
    _run_backward(*args, **kwargs)


def _run_backward(
    loss: TorchDTensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | Tensor | None = None,
) -> None:
    # Plain tensors drive the backward. Of a partial loss each rank starts from its own part with the seed of the whole:
    # d(sum of parts)/d(part) = 1, so no reduction comes first.
    root, seed = differentiated(loss, gradient)
    if inputs is not None:
        check_reached("backward(inputs=...)", _listed(inputs))
        inputs = [_accumulating(x) for x in ((inputs,) if isinstance(inputs, Tensor) else inputs)]
    torch.autograd.backward(root, seed, retain_graph, create_graph, inputs=inputs)


def _backward_of_several(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Handle `torch.autograd.backward` of one or several tensors."""
    call = inspect.signature(func).bind(*args, **kwargs).arguments
    outputs = _listed(call.pop("tensors"))
    seeds = call.pop("grad_tensors", None)
    seeds = [None] * len(outputs) if seeds is None else _listed(seeds)
    roots = [differentiated(output, seed) for output, seed in zip(outputs, seeds, strict=True)]
    inputs = call.pop("inputs", None)
    check_reached("backward(inputs=...)", _listed(inputs) if inputs is not None else ())
    inputs = None if inputs is None else [_accumulating(x) for x in _listed(inputs)]
    func([root for root, _ in roots], [seed for _, seed in roots], inputs=inputs, **call)


def _accumulating(x: Any) -> Any:
    """Return the `_edge` of a tensor that is to get a `grad`; refuse one past which part of the gradient goes."""
    if isinstance(x, TorchDTensor) and shortcut_views(x):
        raise GradientPathError(
            f"backward with {x._spec!r} among its inputs: part of its gradient goes straight to what it was "
            "redistributed from; use torch.autograd.grad"
        )
    return _edge(x)


def _edge(x: Any) -> Any:
    """Return the place of a DTensor in the graph, so that asking for its gradient is no operation on it."""
    if not isinstance(x, TorchDTensor):
        return x
    with LocalOperations():
        return get_gradient_edge(x)


def _autograd_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Handle `torch.autograd.grad`: gradients of DTensors are DTensors."""
    call = inspect.signature(func).bind(*args, **kwargs).arguments
    outputs, inputs = _listed(call.pop("outputs")), _listed(call.pop("inputs"))
    check_reached("torch.autograd.grad", inputs)
    seeds = call.pop("grad_outputs", None)
    seeds = [None] * len(outputs) if seeds is None else _listed(seeds)
    roots = [differentiated(output, seed) for output, seed in zip(outputs, seeds, strict=True)]
    materialize = call.pop("materialize_grads", False)
    # Where `x` was gathered and then used differently per rank, its gradient goes past it to its source
    # (`tensor/redistribution.py`). Its gradient is the sum of both: through `x`, and through those views, reduced over
    # their ranks.
    past = [shortcut_views(x) if isinstance(x, TorchDTensor) else [] for x in inputs]
    allow_unused = True if materialize or any(past) else call.get("allow_unused")
    grads = func(
        [root for root, _ in roots],
        [*map(_edge, inputs), *(view for views in past for _, view in views)],
        [seed for _, seed in roots],
        **{**call, "allow_unused": allow_unused},
    )
    found = _joined(inputs, past, grads)
    if None in [g if g is None else 0 for g in found] and not materialize and not call.get("allow_unused"):
        raise RuntimeError(f"torch.autograd.grad: input {[g is None for g in found].index(True)} is unused")
    return tuple(_gradient_of(x, grad, materialize) for x, grad in zip(inputs, found, strict=True))


def _joined(inputs: Sequence[Any], past: Sequence[Any], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return one gradient per input: the one through it plus those in the rest of `grads` that went past it."""
    rest = iter(grads[len(inputs) :])
    return [
        with_shortcuts(x, grad, [(axes, next(rest)) for axes, _ in views]) if views else grad
        for x, views, grad in zip(inputs, past, grads, strict=False)
    ]


def _gradient_of(x: Any, grad: Tensor | None, materialize: bool) -> Tensor | None:
    if grad is None:
        return torch.zeros_like(x) if materialize and not isinstance(x, GradientEdge) else None
    return wrap_gradient(x._spec, grad) if isinstance(x, TorchDTensor) else grad


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, (Tensor, GradientEdge)) else list(value)


def _register_hook(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Handle `Tensor.register_hook`: the hook gets, and may return, the gradient as a DTensor."""
    x, hook = inspect.signature(func).bind(*args, **kwargs).args
    check_hook(x)
    spec = x._spec

    def on_dtensor(grad: Tensor) -> Tensor | None:
        changed = hook(wrap_gradient(spec, grad))
        return None if changed is None else unwrap_gradient(spec, changed)

    with LocalOperations():
        return func(x, on_dtensor)


def _retain_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    observe_gradient(args[0])
    locally(func, args, kwargs)


AUTOGRAD_FUNCTIONS: dict[Callable[..., Any], Handler] = {
    torch.autograd.grad: _autograd_grad,
    torch.autograd.backward: _backward_of_several,
    torch.Tensor.backward: _backward,
    torch.Tensor.register_hook: _register_hook,
    torch.Tensor.retain_grad: _retain_grad,
}
