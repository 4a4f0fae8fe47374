"""Autograd on MindSpore: nodes with their own backward, running backward, and two process-wide flags.

MindSpore records operations when two flags are on. The grad flag is turned off by `value_and_grad` and by some errors;
it is turned on again here wherever a forward or a backward starts. The enable flag is the one that `no_grad` changes.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from mindspore import Tensor, mint, ops
from mindspore._c_expression import run_backward as _run_backward
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _pynative_executor as executor

Map = Callable[[Tensor], Tensor]


class _Running(threading.local):
    """The kind of the innermost backward running in this thread.

    Attributes:
        is_for_inputs: it is for given inputs, not for all leaves.
        keeps_graph: another backward through the same graph may follow.
    """

    is_for_inputs = False
    keeps_graph = True


_running = _Running()


class GradMode:
    """Context that turns recording on or off."""

    __slots__ = ("_before", "_enabled")

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def __enter__(self) -> None:
        # Saved per context object, so contexts nest.
        self._before = executor.enable_grad()
        # Turned on, never off: `value_and_grad` turns it off for code that recorded before it, and then nothing would
        # be recorded, without an error.
        if self._enabled:
            executor.set_grad_flag(True)
        executor.set_enable_grad(self._enabled)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        executor.set_enable_grad(self._before)


def turn_grad_flag_on() -> None:
    """Turn on MindSpore's grad flag, without which it records nothing, whatever the enable flag says."""
    executor.set_grad_flag(True)


def is_recording(*tensors: Any) -> bool:
    """Return True if an operation on these values is recorded."""
    return executor.enable_grad() and any(isinstance(x, Tensor) and x._requires_grad for x in tensors)


def linear_map(x: Tensor, forward: Map, backward: Map) -> Tensor:
    """Apply a linear map whose gradient is another one; see `Platform.linear_map`."""
    # Without recording a node would only hold memory.
    if is_recording(x):
        turn_grad_flag_on()
        return _LinearMap.apply(x, forward, backward)
    with GradMode(False):
        return forward(x)


class _LinearMap(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.maps = forward, backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        forward, backward = ctx.maps
        # The dual of the dual is the map itself, which makes second derivatives right. Without recording no node is
        # made.
        result = linear_map(grad, backward, forward) if executor.enable_grad() else backward(grad)
        return result, None, None


def accumulate_safely(leaf: Tensor) -> None:
    """Make `leaf` accumulate copies of gradients, contiguous and not shared.

    MindSpore adds a gradient to an accumulated one as if both were contiguous, which the gradient of a transposed
    weight is not; and it clones a shared gradient with a kernel that the CPU lacks.
    """
    if leaf._requires_grad and leaf._is_leaf and "_accumulates_safely" not in leaf.__dict__:
        # Multiplying by 1 is the copy that works for every dtype on the CPU; the result is contiguous and not shared.
        leaf._grad_node.register_prehook(_own_gradient)
        leaf._accumulates_safely = True


def _own_gradient(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(mint.mul(grad, 1) if isinstance(grad, Tensor) else grad for grad in grads)


def custom_function(forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Any) -> Any:
    """Apply a function with its own backward; see `Platform.custom_function`."""
    if is_recording(*inputs):
        turn_grad_flag_on()
        return _CustomFunction.apply(forward, backward, *inputs)
    with GradMode(False):
        return _as_tuple(forward(*inputs))


class _CustomFunction(_Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Any) -> Any:
        # Unused outputs give None instead of zeros, which would be allocated, and communicated.
        ctx.set_materialize_grads(False)
        ctx.map = backward
        return _as_tuple(forward(*inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        result = ctx.map(*grads)
        if not _running.keeps_graph:
            # A reference to the loss keeps this node alive, but no second backward can run through it.
            ctx.map = None
        return (None, None, *([result] if isinstance(result, Tensor) else result))


def _as_tuple(outputs: Any) -> Any:
    return tuple(outputs) if isinstance(outputs, list) else outputs


def backward(loss: Tensor, gradient: Tensor | None, retain_graph: bool) -> None:
    """Accumulate the gradients of the leaves below a plain `loss` into `_grad`.

    Raises:
        RuntimeError: `loss` was not recorded.
        ValueError: `gradient` is missing and `loss` is not a scalar.
    """
    _check_recorded("backward", [loss])
    turn_grad_flag_on()
    with running_for(inputs=False, keeps_graph=retain_graph):
        _run_backward(
            (loss,),
            (_output_grad(loss, gradient),),
            retain_graph,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )


@contextlib.contextmanager
def running_for(inputs: bool, keeps_graph: bool) -> Iterator[None]:
    """Record whether the backward in the block is for given inputs, and whether another one may follow it."""
    # Backwards nest: a node's backward may run another one (recomputation).
    before = _running.is_for_inputs, _running.keeps_graph
    _running.is_for_inputs, _running.keeps_graph = inputs, keeps_graph
    try:
        yield
    finally:
        _running.is_for_inputs, _running.keeps_graph = before


def is_for_parameters() -> bool:
    """Return True if the running backward is for all leaves, not for given inputs."""
    return not _running.is_for_inputs


def grad(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], output_grads: Sequence[Tensor | None] | None
) -> list[Tensor | None]:
    """Return the gradients of `inputs`; None for unused ones.

    MindSpore finds no gradient of a leaf, or of anything upstream, in a run that also asks for the result of an
    operation, so each of the latter gets its own run.

    Raises:
        RuntimeError: none of the outputs was recorded.
    """
    _check_recorded("grad", outputs)
    grads = output_grads if output_grads is not None else [None] * len(outputs)
    seeds = tuple(_output_grad(y, g) for y, g in zip(outputs, grads, strict=True))
    # All leaves share one run.
    leaves = [i for i, x in enumerate(inputs) if x._is_leaf]
    runs = ([leaves] if leaves else []) + [[i] for i, x in enumerate(inputs) if not x._is_leaf]
    found: list[Tensor | None] = [None] * len(inputs)
    turn_grad_flag_on()
    for wanted in runs:
        # Only the last run may free what the forward has saved.
        keep_graph = wanted is not runs[-1]
        chosen = tuple(inputs[i] for i in wanted)
        with running_for(inputs=True, keeps_graph=keep_graph):
            results = _run_backward(
                tuple(outputs), seeds, keep_graph, False, chosen, allow_unreachable=True, accumulate_grad=False
            )
        for i, result in zip(wanted, results, strict=True):
            found[i] = result
    return found


def _check_recorded(name: str, outputs: Sequence[Tensor]) -> None:
    if any(x._requires_grad for x in outputs):
        return
    message = (
        f"{name}: the loss does not depend on anything that requires a gradient, or was computed while "
        "nothing was recorded (no_grad, or after mindspore.value_and_grad without a new forward)"
    )
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        message += (
            f". This is thread {thread.name!r}: off the main thread MindSpore records only after "
            "platform.enable_grad() was entered there, or a module of the platform called"
        )
    raise RuntimeError(message)


def _output_grad(output: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is not None:
        return gradient
    if math.prod(output.shape) != 1:
        raise ValueError(f"backward of a tensor of shape {list(output.shape)} needs its gradient; expected a scalar")
    # The gradient of a scalar with respect to itself.
    return ops.ones_like(output)
