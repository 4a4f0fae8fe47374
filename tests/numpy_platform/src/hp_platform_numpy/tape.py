"""Reverse-mode differentiation: nodes in the order of their making, walked backwards."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hp_platform_numpy.tensor import Tensor

Array = np.ndarray
Backward = Callable[[list[Array | None]], Sequence[Array | None]]

_numbers = itertools.count()


class _State(threading.local):
    """State of one thread, as simulated ranks are threads: it records, it walks back, it walks to given inputs."""

    def __init__(self) -> None:
        self.recording = True
        self.walking = False
        self.for_inputs = False
        self.at_end: list[Callable[[], None]] = []


_state = _State()


def is_recording() -> bool:
    return _state.recording


def is_walking() -> bool:
    return _state.walking


def is_for_inputs() -> bool:
    return _state.for_inputs


@contextlib.contextmanager
def _walking(for_inputs: bool) -> Iterator[None]:
    before = _state.walking, _state.for_inputs, _state.at_end
    _state.walking, _state.for_inputs, _state.at_end = True, for_inputs, []
    try:
        yield
    finally:
        _state.walking, _state.for_inputs, _state.at_end = before


def at_end(callback: Callable[[], None]) -> None:
    """Call `callback` when the running walk, and the accumulation of its gradients, has ended."""
    _state.at_end.append(callback)


def on_gradient(x: Tensor, hook: Callable[[], None]) -> None:
    """Call `hook` when the gradient of the result of an operation is known."""
    if x.node is not None:
        x.node.hooks.append((x.index, lambda gradient: hook()))


@contextlib.contextmanager
def recording(flag: bool) -> Iterator[None]:
    before, _state.recording = _state.recording, flag
    try:
        yield
    finally:
        _state.recording = before


class Node:
    """An operation: `backward` takes a gradient or None per output and gives one per parent."""

    def __init__(self, parents: Sequence[Tensor], backward: Backward, num_outputs: int = 1) -> None:
        self.parents = parents
        self.backward = backward
        self.num_outputs = num_outputs
        self.number = next(_numbers)
        self.hooks: list[tuple[int, Callable[[Array], None]]] = []


class Walk:
    """One walk from outputs to leaves: `leaves` with their gradients by identity, and those of `inner` tensors."""

    def __init__(self, inner: Sequence[Tensor] = ()) -> None:
        self.leaves: dict[int, tuple[Tensor, Array]] = {}
        self._inner: dict[tuple[int, int], Array | None] = {}
        self._is_for_inputs = bool(inner)
        self._wanted = {x.node.number for x in inner if x.node is not None}
        self._waiting: dict[int, tuple[Node, list[Array | None]]] = {}
        self._queue: list[int] = []
        self.at_end: list[Callable[[], None]] = []

    def run(self, outputs: Sequence[Tensor], gradients: Sequence[Array]) -> None:
        for x, gradient in zip(outputs, gradients, strict=True):
            self._give(x, gradient)
        with recording(False), _walking(self._is_for_inputs):
            self.at_end = _state.at_end
            while self._queue:
                self._visit(-heapq.heappop(self._queue))
            for x, gradient in self.leaves.values():
                for hook in x.hooks:
                    hook(gradient)

    def gradient_of(self, x: Tensor) -> Array | None:
        """Return the gradient of a leaf, or of an inner tensor that was asked for; None where there is none."""
        if x.node is None:
            return self.leaves[id(x)][1] if id(x) in self.leaves else None
        return self._inner.get((x.node.number, x.index))

    def _visit(self, number: int) -> None:
        node, gradients = self._waiting.pop(number)
        if number in self._wanted:
            self._inner.update({(number, index): gradient for index, gradient in enumerate(gradients)})
        for index, hook in node.hooks:
            if (gradient := gradients[index]) is not None:
                hook(gradient)
        for parent, gradient in zip(node.parents, node.backward(gradients), strict=True):
            if gradient is not None and parent.requires_grad:
                self._give(parent, gradient)

    def _give(self, x: Tensor, gradient: Array) -> None:
        if x.node is None:
            before = self.leaves.get(id(x))
            self.leaves[id(x)] = (x, gradient if before is None else before[1] + gradient)
            return
        number = x.node.number
        if number not in self._waiting:
            self._waiting[number] = (x.node, [None] * x.node.num_outputs)
            heapq.heappush(self._queue, -number)
        slots = self._waiting[number][1]
        slot = slots[x.index]
        slots[x.index] = gradient if slot is None else slot + gradient
