"""Steps of MindSpore's elementwise optimizers on the local data of DTensor parameters.

Such a step computes every element from its own gradient and state, which are placed as the parameter is. Optimizers
that look at a parameter as a whole, or that are fused into kernels of unknown content, are refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mindspore import Tensor, mint, nn
from mindspore.experimental import optim
from mindspore.graph.api import _pynative_executor as executor

from hp_dtensor.exceptions import CapabilityError, PlacementError
from hp_platform_mindspore.tensor.dtensor import LocalOperations, MindSporeDTensor, local_gradient

# Exactly these: what a subclass adds need not be elementwise.
ELEMENTWISE = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
        nn.ASGD,
        nn.AdaMax,
        nn.Adadelta,
        nn.Adam,
        nn.AdamWeightDecay,
        nn.FTRL,
        nn.Momentum,
        nn.ProximalAdagrad,
        nn.RMSProp,
        nn.Rprop,
        nn.SGD,
    }
)

# Its CPU kernel reads and writes elsewhere where data begins inside a buffer.
WITHOUT_VIEWS = frozenset({nn.AdamWeightDecay})

PACKAGES = ("mindspore.experimental.optim", "mindspore.nn")


def checking(own: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Have an optimizer check DTensor parameters where it makes a list of a group's parameters."""

    @functools.wraps(own)
    def _preprocess_param_group(self: optim.Optimizer, param_group: dict[str, Any]) -> dict[str, Any]:
        group = own(self, param_group)
        _check(self, group["params"])
        return group

    return _preprocess_param_group


def checking_at_start(own: Callable[..., None]) -> Callable[..., None]:
    """Have an optimizer of `mindspore.nn` check DTensor parameters when it is made."""

    @functools.wraps(own)
    def __init__(self: nn.Optimizer, learning_rate: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
        given = list(parameters) if isinstance(parameters, Iterable) else parameters
        _check(self, _flat(given))
        if _distributed(_flat(given)) and any(isinstance(g, dict) and g.get("grad_centralization") for g in given):
            raise CapabilityError(
                "grad_centralization subtracts means over whole gradients; with DTensor parameters leave it out"
            )
        own(self, learning_rate, given, *args, **kwargs)

    return __init__


def _check(optimizer: Any, parameters: Iterable[Any]) -> None:
    added = _distributed(parameters)
    if added and type(optimizer) not in ELEMENTWISE:
        raise _refusal(optimizer)
    for parameter in added:
        if parameter.spec.is_partial:
            raise PlacementError(
                f"parameter {parameter.name!r}: an optimizer cannot update parts that are summed, "
                f"{parameter.spec!r}; redistribute it first"
            )


def _flat(parameters: Any) -> list[Any]:
    """List parameters, those of groups included."""
    if isinstance(parameters, dict):
        return _flat(parameters.get("params"))
    if isinstance(parameters, (list, tuple)):
        return [x for item in parameters for x in _flat(item)]
    return [parameters]


def _distributed(parameters: Iterable[Any]) -> list[Any]:
    return [x for x in parameters if isinstance(x, MindSporeDTensor)]


def _refusal(optimizer: Any) -> CapabilityError:
    kind = type(optimizer)
    of = {package: sorted(each.__name__ for each in ELEMENTWISE if package in each.__module__) for package in PACKAGES}
    known = ", or ".join(f"one of {package} ({', '.join(names)})" for package, names in of.items())
    return CapabilityError(
        f"{kind.__module__}.{kind.__qualname__} does not take DTensor parameters: use {known}, or one of "
        "hp_platform_mindspore.optim"
    )


def stepping_on_shards(own: Callable[..., Any]) -> Callable[..., Any]:
    """Have `optimizer(gradients)` take DTensors placed as the gradients of their parameters, or local shards of those.

    The step then raises ValueError if there are more or fewer gradients than parameters or one is None, and
    PlacementError if one is placed otherwise.
    """

    @functools.wraps(own)
    def step(self: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        distributed = _distributed(self.parameters)
        if not distributed:
            with _unrecorded():
                return own(self, *args, **kwargs)
        (gradients,) = (*args, *kwargs.values())
        local = _local_gradients(self.parameters, gradients)
        takes_views = type(self) not in WITHOUT_VIEWS
        with _unrecorded(), LocalOperations(), _contiguous(distributed, takes_views):
            local = local if takes_views else tuple(mint.mul(gradient, 1) for gradient in local)
            result = own(self, local)
        for parameter in distributed:
            parameter._spec.mesh.platform.count_write(parameter)
        return result

    return step


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    """Turn MindSpore's grad flag off: graphs of steps that are recorded lose writes (`nn.AdamWeightDecay`'s all)."""
    before = executor.grad_flag()
    executor.set_grad_flag(False)
    try:
        yield
    finally:
        executor.set_grad_flag(before)


@contextlib.contextmanager
def _contiguous(parameters: Iterable[Any], takes_views: bool) -> Iterator[None]:
    """Give parameters that are cut along a later dimension contiguous data for a while, and keep what is written.

    Unless `takes_views`, all of them get data of their own.

    Under `fully_shard` they are views of a flat buffer with permuted dimensions, which MindSpore's in-place kernels
    refuse. The copy of a parameter stays the same for all steps, as graphs that a step compiles keep its address; the
    view comes back afterwards, also when the step fails: groups gather from the flat buffer.
    """
    staged = [parameter for parameter in parameters if not (takes_views and parameter.is_contiguous())]
    views = [(parameter, Tensor.data.__get__(parameter)) for parameter in staged]
    for parameter, view in views:
        copy = parameter.__dict__.get("_step_copy")
        if copy is None:
            copy = parameter._step_copy = mint.mul(view, 1)
        parameter._spec.mesh.platform.copy_(copy, view)
        Tensor.data.__set__(parameter, copy)
    try:
        yield
    finally:
        for parameter, view in views:
            parameter._spec.mesh.platform.copy_(view, parameter._step_copy)
            Tensor.data.__set__(parameter, view)


def _local_gradients(parameters: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
    if len(gradients) != len(parameters):
        raise ValueError(f"expected a gradient for each of {len(parameters)} parameters, got {len(gradients)}")
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            raise ValueError(f"parameter {parameter.name!r} has no gradient; give the optimizer zeros, or leave it out")
    return tuple(
        local_gradient(parameter, gradient).contiguous() if isinstance(parameter, MindSporeDTensor) else gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
    )
