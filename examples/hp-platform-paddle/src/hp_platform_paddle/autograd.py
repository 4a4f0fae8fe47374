"""Custom nodes, backward and gradients in Paddle's eager autograd.

Paddle's engine visits ready nodes first come, first served, so ranks that ran the same program visit them in one order.
Its `paddle.grad` does neither that nor work in several threads at once. Here gradients come from a backward, after
which the `.grad` of all leaves are as they were.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle
from paddle.autograd import PyLayer
from paddle.base import core
from paddle.tensor import creation

from hp_dtensor.exceptions import CapabilityError

Tensor = paddle.Tensor
Callback = Callable[[], None]

_run_backward = core.eager.run_backward
_requires_no_grad = Tensor.stop_gradient


class _Backward(threading.local):
    """The backward that this thread runs. Simulated ranks are threads.

    Attributes:
        depth: the number of backwards that this thread is inside of.
        for_inputs: whether the innermost one is of `grad`.
        at_end: what to call when the innermost one has ended.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.for_inputs = False
        self.at_end: list[Callback] = []


running = _Backward()


@contextlib.contextmanager
def _started(for_inputs: bool) -> Iterator[list[Callback]]:
    before = running.for_inputs, running.at_end
    running.depth, running.for_inputs, running.at_end = running.depth + 1, for_inputs, []
    try:
        yield running.at_end
    finally:
        running.depth -= 1
        running.for_inputs, running.at_end = before


def run_backward(tensors: Any, grads: Any, *options: Any) -> None:
    """Run Paddle's engine, and then the callbacks of `at_end`. Every backward of Paddle calls this function."""
    with _started(for_inputs=False) as at_end:
        _run_backward(tensors, grads, *options)
    for callback in at_end:
        callback()


class CustomNode(PyLayer):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], backward: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.run = backward
        ctx.is_needed = [not x.stop_gradient for x in inputs]
        ctx.set_materialize_grads(False)
        # Paddle takes an output that is an input, or a detached one, for one that was written in place.
        made = run(*map(alias, inputs))
        # Paddle does not tell the gradient of an empty tensor from none.
        outputs = made if isinstance(made, tuple) else (made,)
        ctx.empty = {i: (x.shape, x.dtype) for i, x in enumerate(outputs) if 0 in x.shape}
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = {i: paddle.zeros(*kind) for i, kind in ctx.empty.items()}
        grads = tuple(found.get(i) if grad is None else grad for i, grad in enumerate(grads))
        if all(grad is None for grad in grads):
            return tuple(None for _ in ctx.is_needed)
        with paddle.no_grad():
            made = ctx.run(*grads)
        listed = made if isinstance(made, (list, tuple)) else [made]
        return tuple(grad if needed else None for grad, needed in zip(listed, ctx.is_needed, strict=True))


def alias(x: Tensor) -> Tensor:
    """Return another tensor of the same memory, by a function that autograd does not take for the same tensor."""
    if 0 in x.shape:
        return x.clone()
    return x.view(x.shape) if x.is_contiguous() else x.transpose(list(range(x.ndim)))


def custom_function(forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Tensor) -> Any:
    """See `Platform.custom_function`."""
    return CustomNode.apply(forward, backward, *inputs)


# Gradients of inputs -------------------------------------------------------------------------------------

_leaves: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""Tensors that were made to require a gradient, by identity: Paddle compares tensors element by element."""
_nodes_of_leaves: set[int | None] = set()
"""Their nodes, also those of leaves that are gone: a graph may outlive them. Paddle reuses addresses of freed nodes."""


def _set_requires_no_grad(x: Tensor, flag: bool) -> None:
    _requires_no_grad.__set__(x, flag)
    if not flag:
        note_leaf(x)


def note_leaf(x: Tensor) -> Tensor:
    """Let `grad` restore the `.grad` of a tensor that requires a gradient."""
    if x.is_leaf and not x.stop_gradient:
        _leaves[id(x)] = x
        # Makes the leaf's node, which Paddle otherwise makes at its first use.
        _requires_no_grad.__set__(x, False)
        _nodes_of_leaves.add(_node(x))
    return x


def _noting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return functools.wraps(function)(lambda *args, **kwargs: note_leaf(function(*args, **kwargs)))


def grad(outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of plain tensors; no `.grad` changes.

    Raises:
        CapabilityError: a leaf of the graph was made by a function of Paddle that this module does not know.
    """
    for x in inputs:
        note_leaf(x)
    reached = _reached(outputs)
    # `values()` iterates in Python, while another simulated rank may add one.
    known = [x for reference in _leaves.valuerefs() if (x := reference()) is not None]
    leaves = [x for x in known if x.is_leaf and not x.stop_gradient and _node(x) in reached]
    if any(name == "GradNodeAccumulation" and node not in _nodes_of_leaves for node, name in reached.items()):
        raise CapabilityError(
            "grad: expected leaves whose `.grad` can be restored, got one in the graph of the outputs that became a "
            "leaf without this platform, such as by `paddle.Tensor(...)`; assign `x.stop_gradient = False` to it"
        )
    # `set_gradient` empties the tensor that a caller may hold as `x.grad`. The view keeps its values.
    before = [(x.grad, gradient_of(x)) for x in leaves]
    found: dict[int, Tensor] = {}
    inner = {id(x): x for x in inputs if not x.is_leaf}
    handles = [x.register_hook(lambda g, key=key: found.__setitem__(key, g)) for key, x in inner.items()]
    for x in leaves:
        set_gradient(x, None)
    try:
        with _started(for_inputs=True) as at_end:
            # The graph stays: nodes beyond `inputs` may be asked for later.
            _run_backward(list(outputs), list(grads), True, None)
        for callback in at_end:
            callback()
        return [found.get(id(x)) if id(x) in inner else gradient_of(x) for x in inputs]
    finally:
        for handle in handles:
            handle.remove()
        for x, (held, gradient) in zip(leaves, before, strict=True):
            if held is not None and gradient is not None:
                held.get_tensor()._share_data_with(gradient.get_tensor())
            set_gradient(x, held)


def gradient_of(x: Tensor) -> Tensor | None:
    """Return the `.grad` of a plain tensor."""
    # A view: what clears a gradient empties the tensor itself, whoever still holds it.
    return None if x.grad is None else _view(x.grad)


def set_gradient(x: Tensor, gradient: Tensor | None) -> None:
    """Replace the `.grad` of a plain tensor."""
    # `gradient` may be the present one.
    kept = None if gradient is None else _view(gradient)
    if x.grad is not None:
        # `x.grad = None` leaves the gradient of an empty tensor, and other assignments write into the present one.
        x.grad._clear_data()
    if gradient is not None and kept is not None:
        x.grad = kept
        # The assignment has copied.
        for each in (x.grad, gradient):
            each.get_tensor()._share_data_with(kept.get_tensor())


def _view(gradient: Tensor) -> Tensor:
    with paddle.no_grad():
        # Empty gradients of Paddle's own nodes have no memory, and those without cannot be shared.
        return paddle.zeros(gradient.shape, gradient.dtype) if 0 in gradient.shape else alias(gradient)


def _node(x: Tensor) -> int | None:
    return None if x.grad_fn is None else x.grad_fn.node_ptr()


def _reached(outputs: Sequence[Tensor]) -> dict[int, str]:
    """Return the nodes of the graph of `outputs`, and their names."""
    waiting = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen = {node.node_ptr(): node.name() for node in waiting}
    while waiting:
        for node in waiting.pop().next_functions:
            if node is not None and node.node_ptr() not in seen:
                seen[node.node_ptr()] = node.name()
                waiting.append(node)
    return seen


def install() -> None:
    """Let every backward of Paddle run through `run_backward`, and note leaves."""
    core.eager.run_backward = run_backward
    Tensor.stop_gradient = property(_requires_no_grad.__get__, _set_requires_no_grad)
    # These set the flag in C++. `paddle.to_tensor` and `paddle.tensor` call the first.
    creation._to_tensor_non_static = _noting(creation._to_tensor_non_static)
    Tensor.__deepcopy__ = _noting(Tensor.__deepcopy__)
