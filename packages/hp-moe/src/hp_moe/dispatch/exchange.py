"""Exchanges of rows that are begun and waited for apart, so that other work is done meanwhile, in both directions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hp_dtensor.comm.collectives import staying
from hp_dtensor.comm.process_group import ProcessGroup
from hp_moe.dispatch.wire_formats import WireFormat, block_width

Tensor = Any


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

    def begin(self, rows: Tensor) -> Tensor:
        """Begin to send `[rows sent, width]`; returns a token for `wait`."""
        return self.platform.linear_map(rows, staying(self._begin_there), self._end)

    def wait(self, token: Tensor) -> Tensor:
        """Return the rows that `begin` asked for, `[rows received, width]`, when they are there."""
        return self.platform.linear_map(token, staying(self._end), self._begin_back)

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
