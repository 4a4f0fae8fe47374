"""Rows in fewer bits on their way to the experts: blocks of a row, each with a scale.

Exchanges of rows that are begun and waited for apart, so that other work is done overlap_with, in both directions.
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
    """A platform's way to write rows in 8 bits, as the hook `hp_wire_format` returns it."""

    def encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return int8 codes like `blocks`, float32 `[rows, blocks, width]`, and scales float32 `[rows, blocks, 1]`."""

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return float32 `[rows, blocks, width]`."""


class Int8Format:
    """Whole numbers from -127 to 127 times the largest magnitude of the block over 127; the error is half a step."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    def encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        ops = self.platform.ops
        scales = ops.div(ops.amax(ops.abs(blocks), 2, keepdim=True), 127.0)
        # A block of zeros has a scale of zero; any divisor does.
        steps = ops.div(blocks, ops.where(ops.gt(scales, 0.0), scales, ops.ones_like(scales)))
        # A cast cuts off: half a step away from zero rounds.
        half = ops.sub(ops.cast(ops.ge(steps, 0.0), steps.dtype), 0.5)
        return ops.cast(ops.add(steps, half), self.platform.dtype("int8")), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return self.platform.ops.mul(self.platform.ops.cast(codes, scales.dtype), scales)


def find_wire_format(platform: Platform, name: str) -> WireFormat:
    """Return the format of this name.

    Raises:
        CapabilityError: the platform has no such format.
        ExpertParallelError: there is no such name.
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
    """Return the width of a row's blocks: 128, or the whole row where that does not divide it."""
    return BLOCK if dim % BLOCK == 0 else dim


class RowExchange:
    """One variable all-to-all as two autograd nodes, `begin` and `wait`.

    In backward `wait` begins the reverse exchange and `begin` waits for it. Autograd runs the nodes that were made last
    first: what is recorded between the two in forward is computed while rows travel in backward too.

    Args:
        sent, received: rows to and from each rank, in forward.
    """

    def __init__(self, group: ProcessGroup, sent: tuple[int, ...], received: tuple[int, ...]) -> None:
        assert group.platform is not None
        self.group = group
        self.platform = group.platform
        self.sent = sent
        self.received = received
        # What waits for the exchanges under way, the first begun first.
        self._underway: deque[Callable[[], Tensor]] = deque()

    def start(self, rows: Tensor) -> Tensor:
        """Begin to send `[rows sent, width]`; returns a token for `wait`."""
        return self.platform.linear_map(rows, saving_result(self._begin_there), self._end)

    def wait(self, token: Tensor) -> Tensor:
        """Return the rows that `begin` asked for, `[rows received, width]`, when they are there."""
        return self.platform.linear_map(token, saving_result(self._end), self._begin_back)

    def _begin_there(self, rows: Tensor) -> Tensor:
        self._underway.append(self._start(rows, self.sent, self.received))
        return self._token(rows)

    def _begin_back(self, grad: Tensor) -> Tensor:
        self._underway.append(self._start(grad, self.received, self.sent))
        return self._token(grad)

    def _end(self, token: Tensor) -> Tensor:
        return self._underway.popleft()()

    def _token(self, rows: Tensor) -> Tensor:
        # Rows have another number in each direction, and a gradient the shape of its value: they go beside the graph.
        return self.platform.zeros((1,), rows.dtype)

    def _start(self, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...]) -> Callable[[], Tensor]:
        rows = self.platform.contiguous(rows)
        arriving = self.platform.empty((sum(received), *rows.shape[1:]), rows.dtype)
        work = self.group.all_to_all_into(arriving, rows, received, sent, async_op=True)

        def wait(sending: Tensor = rows) -> Tensor:  # which must live until it is sent
            work.wait()
            return arriving

        return wait


class RoundedExchange(RowExchange):
    """`RowExchange` that sends rows in 8 bits with a scale for each block, and gradients back as they are."""

    def __init__(
        self, group: ProcessGroup, sent: tuple[int, ...], received: tuple[int, ...], wire_format: WireFormat
    ) -> None:
        super().__init__(group, sent, received)
        self.wire_format = wire_format

    def _begin_there(self, rows: Tensor) -> Tensor:
        platform, ops, dim = self.platform, self.platform.ops, int(rows.shape[1])
        width = block_width(dim)
        blocks = ops.reshape(ops.cast(rows, platform.dtype("float32")), (-1, dim // width, width))
        codes, scales = self.wire_format.encode(blocks)
        wait_for_codes = self._start(ops.reshape(codes, (-1, dim)), self.sent, self.received)
        wait_for_scales = self._start(ops.reshape(scales, (-1, dim // width)), self.sent, self.received)

        def wait() -> Tensor:
            blocks = ops.reshape(wait_for_codes(), (-1, dim // width, width))
            decoded = self.wire_format.decode(blocks, ops.reshape(wait_for_scales(), (-1, dim // width, 1)))
            return ops.cast(ops.reshape(decoded, (-1, dim)), rows.dtype)

        self._underway.append(wait)
        return self._token(rows)
