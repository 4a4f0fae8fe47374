"""Replacements that let MindSpore's optimizers step on the local data of DTensor parameters.

The step of an elementwise optimizer computes every element from its own gradient and state, which are placed as the
parameter is. One that uses statistics of an entire parameter steps on full parameters and gradients, gathered for the
step, with full state on every rank. Those with kernels of unknown content, or none on CPU, are refused. To support
another one, add it to `ELEMENTWISE` or `ON_FULL`, which the tests read.
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
from hp_platform_mindspore.tensor.autograd import GradMode
from hp_platform_mindspore.tensor.dtensor import LocalOperations, MindSporeDTensor, local_gradient, wrap_gradient

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

# They use statistics of an entire parameter.
ON_FULL = frozenset({nn.AdaFactor})

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
    if added and type(optimizer) not in ELEMENTWISE | ON_FULL:
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
    of = {
        package: sorted(each.__name__ for each in ELEMENTWISE | ON_FULL if package in each.__module__)
        for package in PACKAGES
    }
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
        if type(self) not in ELEMENTWISE | ON_FULL:
            raise _refusal(self)  # it has parameters of another optimizer, as LARS has
        # The only argument, by position or by name.
        (gradients,) = (*args, *kwargs.values())
        local = _local_gradients(self.parameters, gradients)
        with _unrecorded():
            if _steps_on_full(self):
                result = _step_on_full(self, own, local)
            else:
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


def _steps_on_full(optimizer: Any) -> bool:
    """Return True if a step needs full gradients: of the entire parameters, or to subtract means along sharded dims."""
    if type(optimizer) in ON_FULL:
        return True
    centralized = getattr(optimizer, "grad_centralization_flags", ())
    # The mean is over all dimensions but the first one.
    return any(
        flag and isinstance(x, MindSporeDTensor) and any(getattr(placement, "dim", 0) for placement in x.placements)
        for flag, x in zip(centralized, optimizer.parameters, strict=False)
    )


def _step_on_full(optimizer: Any, own: Callable[..., Any], local: Sequence[Any]) -> Any:
    """Step on full parameters, state and gradients, and keep this rank's shard of the results.

    Every rank computes the same. The full copies are reused in all steps, because graphs compiled for a step keep their
    addresses.
    """
    distributed = list({id(x): x for x in optimizer.get_parameters() if isinstance(x, MindSporeDTensor)}.values())
    shards = [Tensor.data.__get__(x) for x in distributed]
    with GradMode(False):
        gradients = tuple(
            wrap_gradient(parameter, gradient).full_tensor() if isinstance(parameter, MindSporeDTensor) else gradient
            for parameter, gradient in zip(optimizer.parameters, local, strict=True)
        )
        for x in distributed:
            full = x.full_tensor()
            if "_step_full" not in x.__dict__:
                x._step_full = mint.mul(full, 1)
            x._spec.mesh.platform.copy_(x._step_full, full)
    try:
        for x in distributed:
            Tensor.data.__set__(x, x._step_full)
        with LocalOperations():
            result = own(optimizer, gradients)
    finally:
        for x, shard in zip(distributed, shards, strict=True):
            Tensor.data.__set__(x, shard)
    for x in distributed:
        x.assign_value(x._step_full)
    return result


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
