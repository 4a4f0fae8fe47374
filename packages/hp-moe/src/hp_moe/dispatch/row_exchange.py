"""Asynchronous exchanges of rows between ranks, with start and wait as separate autograd nodes, and 8-bit formats.

Computation between start and wait overlaps with the exchange, in forward and in backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from hp_dtensor.comm.collectives import saving_result
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import Platform
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


class RowExchange:
    """One variable all-to-all as two autograd nodes, `start` and `wait`.

    In backward, `wait` starts the reverse exchange and `start` waits for it. Autograd runs the most recently created
    nodes first, so operations recorded between the two in forward also overlap with the exchange in backward.

    Args:
        sent: number of rows sent to each rank in forward.
        received: number of rows received from each rank in forward.
    """

    def __init__(self, group: ProcessGroup, sent: tuple[int, ...], received: tuple[int, ...]) -> None:
        assert group.platform is not None
        self.group = group
        self.platform = group.platform
        self.sent = sent
        self.received = received
        # Functions that wait for pending exchanges, oldest first.
        self._pending: deque[Callable[[], Tensor]] = deque()

    def start(self, rows: Tensor) -> Tensor:
        """Start to send `[rows sent, width]`; returns a handle for `wait`."""
        return self.platform.linear_map(rows, saving_result(self._start_forward), self._end)

    def wait(self, handle: Tensor) -> Tensor:
        """Wait for the exchange, and return the received rows `[rows received, width]`."""
        return self.platform.linear_map(handle, saving_result(self._end), self._start_backward)

    def _start_forward(self, rows: Tensor) -> Tensor:
        self._pending.append(self._start(rows, self.sent, self.received))
        return self._handle(rows)

    def _start_backward(self, grad: Tensor) -> Tensor:
        self._pending.append(self._start(grad, self.received, self.sent))
        return self._handle(grad)

    def _end(self, handle: Tensor) -> Tensor:
        # Exchanges are waited for in the order in which they were started, in forward and in backward.
        return self._pending.popleft()()

    def _handle(self, rows: Tensor) -> Tensor:
        # A gradient must have the shape of its value, but the number of rows differs between directions. So the graph
        # carries a dummy tensor, and the rows themselves go through `_pending`.
        return self.platform.zeros((1,), rows.dtype)

    def _start(self, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...]) -> Callable[[], Tensor]:
        rows = self.platform.contiguous(rows)
        arriving = self.platform.empty((sum(received), *rows.shape[1:]), rows.dtype)
        work = self.group.all_to_all_into(arriving, rows, received, sent, async_op=True)

        # The default argument keeps the send buffer alive until the exchange is complete.
        def wait(sending: Tensor = rows) -> Tensor:
            work.wait()
            return arriving

        return wait


class RoundedExchange(RowExchange):
    """`RowExchange` that sends rows in 8 bits with a scale per block. Gradients are sent back unrounded."""

    def __init__(
        self, group: ProcessGroup, sent: tuple[int, ...], received: tuple[int, ...], wire_format: WireFormat
    ) -> None:
        super().__init__(group, sent, received)
        self.wire_format = wire_format

    def _start_forward(self, rows: Tensor) -> Tensor:
        platform, ops, dim = self.platform, self.platform.ops, int(rows.shape[1])
        width = block_width(dim)
        # One scale per block: a large element costs precision only within its own block.
        blocks = ops.reshape(ops.cast(rows, platform.dtype("float32")), (-1, dim // width, width))
        codes, scales = self.wire_format.encode(blocks)
        # Two messages, since codes are int8 and scales float32.
        wait_for_codes = self._start(ops.reshape(codes, (-1, dim)), self.sent, self.received)
        wait_for_scales = self._start(ops.reshape(scales, (-1, dim // width)), self.sent, self.received)

        def wait() -> Tensor:
            blocks = ops.reshape(wait_for_codes(), (-1, dim // width, width))
            decoded = self.wire_format.decode(blocks, ops.reshape(wait_for_scales(), (-1, dim // width, 1)))
            return ops.cast(ops.reshape(decoded, (-1, dim)), rows.dtype)

        self._pending.append(wait)
        return self._handle(rows)
