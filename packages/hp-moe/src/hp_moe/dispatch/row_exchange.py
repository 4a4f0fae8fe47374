"""Asynchronous exchanges of rows between ranks, with start and wait as separate autograd nodes, and 8-bit formats.

Computation between start and wait overlaps with the exchange, in forward and in backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hp_dtensor.comm.collectives import saving_result
from hp_dtensor.comm.process_group import ProcessGroup, Work
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import Platform
from hp_moe.dispatch.permutation import TokenPermutation
from hp_moe.exceptions import ExpertParallelError
from hp_moe.plugins import plugin_manager

Tensor = Any
BLOCK = 128


class WireFormat(Protocol):
    """An 8-bit format for rows sent between ranks, as returned by the hook `hp_wire_format`."""

    def encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return int8 codes like `blocks`, float32 `[rows, blocks, width]`, and scales float32 `[rows, blocks, 1]`."""

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return float32 `[rows, blocks, width]`."""


class Int8Format:
    """Integers from -127 to 127, scaled by the largest magnitude of the block; the error is at most half a step."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    def encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        ops = self.platform.ops
        scales = ops.div(ops.amax(ops.abs(blocks), 2, keepdim=True), 127.0)
        # A block of zeros has a scale of zero and is divided by one instead.
        steps = ops.div(blocks, ops.where(ops.gt(scales, 0.0), scales, ops.ones_like(scales)))
        # The cast truncates; adding half a step away from zero makes it round to nearest.
        half = ops.sub(ops.cast(ops.ge(steps, 0.0), steps.dtype), 0.5)
        return ops.cast(ops.add(steps, half), self.platform.dtype("int8")), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return self.platform.ops.mul(self.platform.ops.cast(codes, scales.dtype), scales)


def find_wire_format(platform: Platform, name: str) -> WireFormat:
    """Return the wire format of this name.

    Raises:
        CapabilityError: the platform does not provide this format.
        ExpertParallelError: the name is unknown.
    """
    if name == "int8":
        return Int8Format(platform)
    if name != "fp8":
        raise ExpertParallelError(f"wire_format must be 'int8', 'fp8' or None, got {name!r}")
    found: WireFormat | None = plugin_manager().hook.hp_wire_format(platform=platform, name=name)
    if found is None:
        raise CapabilityError(f"platform {platform.name!r} has no wire format {name!r}; use 'int8' or None")
    return found


def block_width(dim: int) -> int:
    """Return the block width of rows: 128, or `dim` if 128 does not divide it."""
    return BLOCK if dim % BLOCK == 0 else dim


@dataclass(frozen=True, slots=True)
class Route:
    """The rows exchanged between ranks in one call; each row is one token sent to one rank.

    Attributes:
        permutation: from this rank's tokens to the rows that it sends, ordered by destination rank.
        sent: number of rows sent to each rank, in rank order.
        received: number of rows received from each rank, in rank order.
    """

    permutation: TokenPermutation
    sent: tuple[int, ...]
    received: tuple[int, ...]


class RowExchange:
    """The linear map from tokens to the rows of each rank's experts, or its transpose, as two autograd nodes.

    The map sends copies of tokens to other ranks. Its transpose sends one result for each copy back, and sums them for
    each token. Backward of either is the other: `wait` starts it, and `start` waits for it. Autograd runs the most
    recently created nodes first, so operations recorded between the two in forward also overlap with the exchange in
    backward.

    Args:
        is_return: whether forward is the transpose, which returns results.
    """

    def __init__(self, group: ProcessGroup, route: Route, is_return: bool = False) -> None:
        assert group.platform is not None
        self.group = group
        self.platform = group.platform
        self.route = route
        self.is_return = is_return
        # Functions that wait for pending exchanges, oldest first.
        self._pending: deque[Callable[[], Tensor]] = deque()

    def start(self, x: Tensor) -> Tensor:
        """Start to send `[tokens, width]` (`[rows received, width]` in a return); returns a handle for `wait`."""
        return self.platform.linear_map(x, saving_result(self._start_forward), self._end)

    def wait(self, handle: Tensor) -> Tensor:
        """Wait for the exchange; returns `[rows received, width]` (`[tokens, width]` in a return)."""
        return self.platform.linear_map(handle, saving_result(self._end), self._start_backward)

    def exchange(self, x: Tensor) -> Tensor:
        """`wait(start(x))` as one autograd node, which does not overlap with anything."""
        return self.platform.linear_map(
            x, saving_result(lambda t: self._forward(t)()), lambda g: self._start(g, not self.is_return)()
        )

    def _start_forward(self, x: Tensor) -> Tensor:
        return self._pend(self._forward(x), x)

    def _start_backward(self, grad: Tensor) -> Tensor:
        return self._pend(self._start(grad, not self.is_return), grad)

    def _forward(self, x: Tensor) -> Callable[[], Tensor]:
        return self._start(x, self.is_return)

    def _pend(self, wait: Callable[[], Tensor], x: Tensor) -> Tensor:
        self._pending.append(wait)
        # A gradient must have the shape of its value, but the number of rows differs between directions. So the graph
        # carries a dummy tensor, and the rows themselves go through `_pending`.
        return self.platform.zeros((1,), x.dtype)

    def _end(self, handle: Tensor) -> Tensor:
        # Exchanges are waited for in the order in which they were started, in forward and in backward.
        return self._pending.popleft()()

    def _start(self, x: Tensor, is_return: bool) -> Callable[[], Tensor]:
        """Start to send tokens, or to return results; returns a function that waits for the received ones."""
        return (self._return if is_return else self._send)(self.platform.contiguous(x))

    def _send(self, x: Tensor) -> Callable[[], Tensor]:
        route, index = self.route, None
        if self.group.indexes_rows(x):
            index = route.permutation.rows
        else:
            x = route.permutation.copies(x)
        rows = self.platform.empty((sum(route.received), *x.shape[1:]), x.dtype)
        work = self.group.all_to_all_into(rows, x, route.received, route.sent, async_op=True, input_index=index)
        return _waiting(work, x, lambda: rows)

    def _return(self, y: Tensor) -> Callable[[], Tensor]:
        route, index = self.route, None
        if self.group.indexes_rows(y):
            index = route.permutation.rows
            results = self.platform.zeros((route.permutation.num_rows, *y.shape[1:]), y.dtype)
        else:
            results = self.platform.empty((sum(route.sent), *y.shape[1:]), y.dtype)
        work = self.group.all_to_all_into(results, y, route.sent, route.received, async_op=True, output_index=index)
        return _waiting(work, y, lambda: results if index is not None else route.permutation.sums(results))


def _waiting(work: Work, sending: Tensor, result: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function that waits for an exchange and returns its result."""

    # The default argument keeps the sent tensor alive until the exchange is complete.
    def wait(sending: Tensor = sending) -> Tensor:
        work.wait()
        return result()

    return wait


class RoundedExchange(RowExchange):
    """`RowExchange` that sends tokens in 8 bits with a scale per block. Gradients are sent back unrounded."""

    def __init__(self, group: ProcessGroup, route: Route, wire_format: WireFormat) -> None:
        super().__init__(group, route)
        self.wire_format = wire_format

    def _forward(self, x: Tensor) -> Callable[[], Tensor]:
        platform, ops, dim = self.platform, self.platform.ops, int(x.shape[1])
        width = block_width(dim)
        # One scale per block: a large element costs precision only within its own block. Tokens are encoded before they
        # are copied for each rank.
        blocks = ops.reshape(ops.cast(x, platform.dtype("float32")), (-1, dim // width, width))
        codes, scales = self.wire_format.encode(blocks)
        # Two messages, since codes are int8 and scales float32.
        wait_for_codes = self._start(ops.reshape(codes, (-1, dim)), False)
        wait_for_scales = self._start(ops.reshape(scales, (-1, dim // width)), False)

        def wait() -> Tensor:
            blocks = ops.reshape(wait_for_codes(), (-1, dim // width, width))
            decoded = self.wire_format.decode(blocks, ops.reshape(wait_for_scales(), (-1, dim // width, 1)))
            return ops.cast(ops.reshape(decoded, (-1, dim)), x.dtype)

        return wait
