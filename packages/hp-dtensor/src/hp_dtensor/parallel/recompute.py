"""Activation checkpointing: a part of a model keeps its input alone, and is computed again in backward.

One implementation for every platform: an autograd node whose forward records nothing, and whose backward computes
the part again, with recording, and runs that graph's own backward (Chen et al., 2016, arXiv 1604.06174). Results of
operations that are dear to repeat may stay: attention, matrix products, collectives.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any

from hp_dtensor.comm.recompute_record import KINDS, Record, current, kept, kept_result
from hp_dtensor.comm.saved_tensors import Kept, keeping
from hp_dtensor.exceptions import GradientPathError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.dtensor import DTensor

__all__ = ["KINDS", "checkpoint", "for_given_inputs", "is_checkpointed", "kept", "kept_result"]

Tensor = Any


def checkpoint(
    function: Callable[..., Tensor], x: Tensor, *args: Any, platform: Platform, keep: Collection[str] = ()
) -> Tensor:
    """Return `function(x, *args)`, computed again in backward instead of keeping what it would need there.

    Forward and recomputation do the same: what is decided from data goes through `kept`, random operations draw the
    same numbers, and automatic mixed precision (`torch.autocast`) is that of forward. Where nothing is recorded, or `x`
    needs no gradient, this is a plain call.

    Args:
        function: a module, say; gradients reach its parameters.
        x: plain or distributed; the result may be either too.
        args: what no gradient goes to.
        keep: kinds of operations (`KINDS`) whose results stay from forward to backward, for which they are not computed
            again: `attention`; `products`, those of matrices; `collectives`, what other ranks have sent.

    Raises:
        ValueError: there is no such kind.
        CapabilityError: the platform cannot keep one of the kinds.
        RuntimeError: from backward, if the recomputation goes another way, or `x` has been written.
        GradientPathError: from a backward to given inputs, and in `parallelize_value_and_grad`.
    """
    unknown = sorted(set(keep) - set(KINDS))
    if unknown:
        raise ValueError(f"checkpoint: keep takes {', '.join(KINDS)}, got {', '.join(unknown)}")
    local = x.to_local() if isinstance(x, DTensor) else x
    if not (platform.is_grad_enabled() and platform.requires_grad(local)):
        return function(x, *args)
    if _for_given_inputs.get():
        raise GradientPathError(_GIVEN_INPUTS)
    # `Kept` notes the version of the input: one that is written before backward would be recomputed to something else.
    enter, record, given = _way_back(x), Record(platform, current.get(), keep), Kept(platform, local)
    random, precision = _Random(platform), platform.automatic_precision()
    leave: list[Callable[[Tensor], Tensor]] = []

    def forward(local: Tensor) -> Tensor:
        # Nodes in here are dropped at once, so that what they keep need not be offloaded.
        with precision(), record.first(), random.first(), platform.no_grad(), keeping(None):
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
        with platform.enable_grad():
            with precision(), record.again(), random.again():
                y = function(enter(again), *args)
            end = _end_of(platform, y.to_local() if isinstance(y, DTensor) else y, grad)
            # Nobody reads the result of the repetition: its memory is not held through the backward.
            del y
            platform.backward(end)
        return platform.get_grad(again)

    result = platform.custom_function(forward, backward, local)
    return leave[0](result)


def is_checkpointed() -> bool:
    """Return whether the current code is part of a training pass that is not recorded because it is computed again."""
    return current.get() is not None


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


class _Random:
    """Numbers of the platform's generators, which a repetition draws once more."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._before: Any = None

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        before = self._platform.random_state()
        yield
        # Most parts draw nothing, and need nothing kept.
        if not self._platform.is_random_state(before):
            self._before = before

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        if self._before is None:
            yield
            return
        after = self._platform.random_state()
        self._platform.set_random_state(self._before)
        try:
            yield
        finally:
            self._platform.set_random_state(after)


_GIVEN_INPUTS = (
    "a backward to given inputs (platform.grad, parallelize_value_and_grad, torch.autograd.grad, backward(inputs=...), "
    "mindspore.value_and_grad) comes to what hp_dtensor.parallel.recompute.checkpoint has not kept. It would miss the "
    "gradients of parameters inside, which would be left in their grad. Use platform.backward(loss) and read grad, or "
    "leave checkpoint out; on torch there is torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)
_for_given_inputs: ContextVar[bool] = ContextVar("hp_dtensor.parallel.recompute.for_given_inputs", default=False)


def _end_of(platform: Platform, y: Tensor, grad: Tensor) -> Tensor:
    """Return a scalar without the data of `y`, from which backward goes on with `grad` as the gradient of `y`."""
    # Of float32, for the scalar's own gradient, which nobody looks at: MindSpore's CPU makes none of bfloat16.
    return platform.custom_function(lambda y: platform.zeros((), platform.dtype("float32")), lambda _: grad, y)


def _way_back(x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function from a local tensor to one like `x`."""
    if not isinstance(x, DTensor):
        return lambda local: local
    return functools.partial(DTensor.from_local, device_mesh=x.device_mesh, placements=x.placements, shape=x.spec.shape)
