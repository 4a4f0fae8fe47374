"""Activation checkpointing: a part of a model keeps its input alone, and is computed again in backward.

One implementation for every platform: an autograd node whose forward records nothing, and whose backward computes
the part again, with recording, and runs that graph's own backward (Chen et al., 2016, arXiv 1604.06174).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from hp_dtensor.comm.kept_tensors import Kept
from hp_dtensor.exceptions import GradientPathError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any
T = TypeVar("T")


def checkpoint(function: Callable[..., Tensor], x: Tensor, *args: Any, platform: Platform) -> Tensor:
    """Return `function(x, *args)`, computed again in backward instead of keeping what it would need there.

    Forward and recomputation must do the same: what is decided from data goes through `kept`, random operations have
    no place in `function`. Where nothing is recorded, or `x` needs no gradient, this is a plain call.

    Args:
        function: a module, say; gradients reach its parameters.
        x: plain or distributed; the result may be either too.
        args: what no gradient goes to.

    Raises:
        RuntimeError: from backward, if the recomputation takes another number of decisions, or `x` has been written.
        GradientPathError: from a backward to given inputs, and in `parallelize_value_and_grad`.
    """
    local = x.to_local() if isinstance(x, DTensor) else x
    if not (platform.is_grad_enabled() and platform.requires_grad(local)):
        return function(x, *args)
    if _for_given_inputs.get():
        raise GradientPathError(_GIVEN_INPUTS)
    # `Kept` notes the version of the input: one that is written before backward would be recomputed to something else.
    enter, decisions, given = _way_back(x), _Decisions(_current.get()), Kept(platform, local)
    leave: list[Callable[[Tensor], Tensor]] = []

    def forward(local: Tensor) -> Tensor:
        with decisions.taken(), platform.no_grad():
            y = function(enter(local), *args)
        leave[:] = [_way_back(y)]
        return platform.detach(platform.unwrap(y)) if isinstance(y, DTensor) else y

    def backward(grad: Tensor) -> Tensor | None:
        # The inner backward below accumulates into `grad` of parameters, which `torch.autograd.grad` promises not to
        # touch.
        if not platform.is_for_parameters():
            raise GradientPathError(_GIVEN_INPUTS)
        # A leaf of its own, so that the inner backward ends here and its gradient can be handed on; parameters are
        # leaves too, and accumulate there directly.
        again = platform.detach(given.tensors[0])
        platform.set_requires_grad(again, True)
        with decisions.repeated(), platform.enable_grad():
            y = function(enter(again), *args)
            platform.backward(y.to_local() if isinstance(y, DTensor) else y, grad)
        return platform.get_grad(again)

    result = platform.custom_function(forward, backward, local)
    return leave[0](result)


def kept(decide: Callable[[], T]) -> T:
    """Return `decide()` or, while `checkpoint` computes again, the value that the same call gave the first time.

    For decisions from data (which experts a token goes to), for counting, and for what is dear and needs no gradient.
    """
    decisions = _current.get()
    return decide() if decisions is None else decisions.next(decide)


def is_checkpointed() -> bool:
    """Return whether the current code is part of a training pass that is not recorded because it is computed again."""
    return _current.get() is not None


@contextlib.contextmanager
def for_given_inputs() -> Iterator[None]:
    """Refuse `checkpoint` in the block, because the backward of its results will be to given inputs.

    Where none of the inputs lies in front of it, the backward itself would not come by and notice.
    """
    # A context variable, for each simulated rank is a thread, and async code may interleave.
    token = _for_given_inputs.set(True)
    try:
        yield
    finally:
        _for_given_inputs.reset(token)


class _Decisions:
    """Decisions of one call of `checkpoint`, in order; a nested call takes over those of the outer one."""

    def __init__(self, outer: _Decisions | None) -> None:
        self._outer = outer
        self._values: list[Any] = []
        self._position: int | None = None

    def next(self, decide: Callable[[], Any]) -> Any:
        if self._position is None:
            value = decide() if self._outer is None else self._outer.next(decide)
            self._values.append(value)
            return value
        # More decisions than in forward: the part depends on something that has changed, and its gradient would be of
        # another function.
        if self._position == len(self._values):
            raise RuntimeError(_ANOTHER_WAY)
        self._position += 1
        return self._values[self._position - 1]

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        with _within(self):
            yield

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        self._position = 0
        with _within(self):
            yield
        if self._position != len(self._values):
            raise RuntimeError(_ANOTHER_WAY)


_ANOTHER_WAY = (
    "a checkpointed function went another way when it was computed again in backward than in forward; "
    "expected the same calls of hp_dtensor.parallel.recompute.kept in the same order"
)
_GIVEN_INPUTS = (
    "a backward to given inputs (platform.grad, parallelize_value_and_grad, torch.autograd.grad, backward(inputs=...), "
    "mindspore.value_and_grad) comes to what hp_dtensor.parallel.recompute.checkpoint has not kept. It would miss the "
    "gradients of parameters inside, which would be left in their grad. Use platform.backward(loss) and read grad, or "
    "leave checkpoint out; on torch there is torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)
_for_given_inputs: ContextVar[bool] = ContextVar("hp_dtensor.parallel.recompute.for_given_inputs", default=False)
_current: ContextVar[_Decisions | None] = ContextVar("hp_dtensor.parallel.recompute", default=None)


@contextlib.contextmanager
def _within(decisions: _Decisions) -> Iterator[None]:
    token = _current.set(decisions)
    try:
        yield
    finally:
        _current.reset(token)


def _way_back(x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function from a local tensor to one like `x`."""
    if not isinstance(x, DTensor):
        return lambda local: local
    return functools.partial(DTensor.from_local, device_mesh=x.device_mesh, placements=x.placements, shape=x.spec.shape)
