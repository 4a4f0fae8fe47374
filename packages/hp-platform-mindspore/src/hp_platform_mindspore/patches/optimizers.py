"""Replacements that let MindSpore's optimizers step on the local data of DTensor parameters.

The step of an elementwise optimizer computes every element from its own gradient and state, which are placed as the
parameter is. Those that use statistics of an entire parameter are refused. To support another one, add it to
`ELEMENTWISE`, which the tests read.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint, nn
from mindspore.experimental import optim
from mindspore.graph.api import _pynative_executor as executor

from hp_dtensor.exceptions import CapabilityError, PlacementError
from hp_platform_mindspore.tensor.dtensor import LocalOperations, MindSporeDTensor, local_gradient

# Compared by exact type: what a subclass adds need not be elementwise.
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
        nn.Adagrad,
        nn.Adam,
        nn.AdamOffload,
        nn.AdamWeightDecay,
        nn.FTRL,
        nn.LazyAdam,
        nn.Momentum,
        nn.ProximalAdagrad,
        nn.RMSProp,
        nn.Rprop,
        nn.SGD,
    }
)

# Their CPU kernels access the wrong memory where data starts at an offset in a buffer, or refuse empty shards.
WITHOUT_VIEWS = frozenset({nn.Adagrad, nn.AdamOffload, nn.AdamWeightDecay})

PACKAGES = ("mindspore.experimental.optim", "mindspore.nn")


def checking(own: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Make an optimizer of `mindspore.experimental` check DTensor parameters when it collects a group's parameters."""

    @functools.wraps(own)
    def _preprocess_param_group(self: optim.Optimizer, param_group: dict[str, Any]) -> dict[str, Any]:
        # MindSpore's first: it makes a list of the parameters, which may be a generator.
        group = own(self, param_group)
        _check(self, group["params"])
        return group

    return _preprocess_param_group


def checking_at_start(own: Callable[..., None]) -> Callable[..., None]:
    """Make an optimizer of `mindspore.nn` check DTensor parameters when it is constructed."""

    @functools.wraps(own)
    def __init__(self: nn.Optimizer, learning_rate: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
        # A generator can be consumed only once, and MindSpore consumes it after this check.
        given = list(parameters) if isinstance(parameters, Iterable) else parameters
        _check(self, _flat(given))
        own(self, learning_rate, given, *args, **kwargs)

    return __init__


def _check(optimizer: Any, parameters: Iterable[Any]) -> None:
    # Plain parameters are MindSpore's own affair.
    added = _distributed(parameters)
    if added and type(optimizer) not in ELEMENTWISE:
        raise _refusal(optimizer)
    for parameter in added:
        if parameter.spec.is_partial:
            raise PlacementError(
                f"parameter {parameter.name!r}: an optimizer cannot update partial sums, "
                f"{parameter.spec!r}; redistribute it first"
            )


def _flat(parameters: Any) -> list[Any]:
    """Return a flat list of parameters, including those of groups."""
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
    """Make `optimizer(gradients)` accept DTensors placed as the gradients of their parameters, or local shards of
    those.

    The step then raises ValueError for a missing gradient or a wrong number of gradients, and PlacementError for a
    gradient with other placements.
    """

    @functools.wraps(own)
    def step(self: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        distributed = _distributed(self.parameters)
        if not distributed:
            with _unrecorded():
                return own(self, *args, **kwargs)
        if type(self) not in ELEMENTWISE:
            raise _refusal(self)  # it has parameters of another optimizer, as LARS has
        _check_centralization(self)
        # The only argument, by position or by name.
        (gradients,) = (*args, *kwargs.values())
        local = _local_gradients(self.parameters, gradients)
        with _unrecorded():
            takes_views = type(self) not in WITHOUT_VIEWS
            if not takes_views:
                # Copies at offset 0; see WITHOUT_VIEWS.
                local = tuple(_filled_copy(gradient, 0) for gradient in local)
                states = (x for x in self.get_parameters() if isinstance(x, MindSporeDTensor) and 0 in x._shape)
                distributed = list({id(x): x for x in (*distributed, *states)}.values())
            with LocalOperations(), _contiguous(distributed, takes_views):
                result = own(self, local)
        for parameter in distributed:
            # The step ran on local data, so the DTensor's version has not changed.
            parameter._spec.mesh.platform.count_write(parameter)
        return result

    return step


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    """Turn MindSpore's grad flag off: a recorded step loses writes (all of those of `nn.AdamWeightDecay`)."""
    before = executor.grad_flag()
    executor.set_grad_flag(False)
    try:
        yield
    finally:
        executor.set_grad_flag(before)


@contextlib.contextmanager
def _contiguous(parameters: Iterable[Any], takes_views: bool) -> Iterator[None]:
    """Substitute contiguous data for the data of parameters sharded along a later dimension, and write it back after.

    Args:
        takes_views: the optimizer works on views; if not, all parameters are given data of their own.

    Under `fully_shard` such parameters are views of a flat buffer with permuted dimensions, which MindSpore's in-place
    kernels refuse. The copy of a parameter is reused in all steps, because graphs compiled for a step keep its address.
    The view is restored afterwards, also when the step fails, because groups are gathered from the flat buffer.
    """
    staged = [x for x in parameters if not (takes_views and (x.is_contiguous() or 0 in x._shape))]
    views = [(parameter, Tensor.data.__get__(parameter)) for parameter in staged]
    for parameter, view in views:
        copy = parameter.__dict__.get("_step_copy")
        if copy is None:
            copy = parameter._step_copy = _filled_copy(view, 1)
        elif 0 not in view.shape:
            parameter._spec.mesh.platform.copy_(copy, view)
        Tensor.data.__set__(parameter, copy)
    try:
        yield
    finally:
        for parameter, view in views:
            if 0 not in view.shape:
                parameter._spec.mesh.platform.copy_(view, parameter._step_copy)
            Tensor.data.__set__(parameter, view)


def _filled_copy(x: Tensor, value: int) -> Tensor:
    """Return a contiguous copy. For an empty shard one element of `value`, which the caller discards."""
    return mint.mul(x, 1) if 0 not in x.shape else Tensor(np.full((1,) * len(x.shape), value), x.dtype)


def _check_centralization(optimizer: Any) -> None:
    """Refuse to subtract means of gradients over dimensions that are sharded: they would be those of the shards."""
    # The mean is over all dimensions but the first one.
    for flag, x in zip(getattr(optimizer, "grad_centralization_flags", ()), optimizer.parameters, strict=False):
        if flag and isinstance(x, MindSporeDTensor) and any(getattr(placement, "dim", 0) for placement in x.placements):
            raise CapabilityError(
                f"grad_centralization of parameter {x.name!r}, {x.spec!r}, needs means over sharded dimensions; shard "
                "its first dimension, or turn grad_centralization off for it"
            )


def _local_gradients(parameters: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
    if len(gradients) != len(parameters):
        raise ValueError(f"expected a gradient for each of {len(parameters)} parameters, got {len(gradients)}")
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            raise ValueError(f"parameter {parameter.name!r} has no gradient; pass zeros, or leave the parameter out")
    return tuple(
        local_gradient(parameter, gradient).contiguous() if isinstance(parameter, MindSporeDTensor) else gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
    )
