"""Process groups on Ascend: HCCL's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore.mint.distributed as dist
import numpy as np
from mindspore import Tensor, mint

from hp_dtensor.comm.process_group import DONE, PendingBytes, ProcessGroup, Rows, Work
from hp_platform_mindspore.comm.reductions import check_average
from hp_platform_mindspore.platform_base import MindSporeBase

REDUCE_OPS = {"sum": "sum", "avg": "sum", "max": "max", "min": "min", "product": "prod"}


class Pending:
    """A native collective under way, and what to do with its result."""

    def __init__(self, handle: Any, finish: Callable[[], None] | None = None) -> None:
        self._handle = handle
        self._finish = finish

    def wait(self) -> None:
        if self._handle is not None:
            self._handle.wait()
        if self._finish is not None:
            self._finish()


class _PendingFacts:
    """Bytes that each rank's part of `gathered` holds once the collective that reads `sent` is over.

    To ask whether they are there would wait for the device.
    """

    def __init__(self, work: Work, gathered: Tensor, sent: Tensor) -> None:
        self._work = work
        self._gathered = gathered
        self._sent = sent

    def wait(self, timeout_seconds: float | None = None) -> list[bytes] | None:
        if timeout_seconds is not None:
            return None
        self._work.wait()
        return [row.tobytes() for row in self._gathered.asnumpy().reshape(-1, self._sent.size)]


class NativeGroup(ProcessGroup):
    """Group with HCCL's collectives, asynchronous ones included."""

    backend = "hccl"

    platform: MindSporeBase

    def __init__(self, ranks: Sequence[int], rank: int, platform: MindSporeBase) -> None:
        super().__init__(ranks, rank, platform)
        # Only members may create a group.
        self._name = dist.new_group(list(ranks))

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work:
        handle = dist.all_reduce(x, self._native(op), group=self._name, async_op=async_op)
        return self._started(handle, async_op, self._average(x, op))

    def _all_gather_into(self, output: Tensor, x: Tensor, async_op: bool) -> Work:
        flat = output.reshape((self.size * x.shape[0], *x.shape[1:])) if x.ndim else output
        handle = dist.all_gather_into_tensor(flat, x, group=self._name, async_op=async_op)
        return self._started(handle, async_op)

    def _reduce_scatter_into(self, output: Tensor, x: Tensor, op: str, async_op: bool) -> Work:
        handle = dist.reduce_scatter_tensor(output, x, self._native(op), group=self._name, async_op=async_op)
        return self._started(handle, async_op, self._average(output, op))

    def _all_to_all_into(self, output: Tensor, x: Tensor, output_rows: Rows, input_rows: Rows, async_op: bool) -> Work:
        handle = dist.all_to_all_single(
            output, x, list(output_rows), list(input_rows), group=self._name, async_op=async_op
        )
        return self._started(handle, async_op)

    def _exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None:
        transfers = [
            dist.P2POp(kind, x, self.ranks[j], group=self._name)
            for kind, tensors in (("isend", sends), ("irecv", receives))
            for j, x in enumerate(tensors)
            # Both sides know the shapes, and leave out what is empty.
            if j != self.rank and x is not None and x.size
        ]
        if transfers:
            for handle in dist.batch_isend_irecv(transfers):
                handle.wait()

    def _broadcast(self, x: Tensor, source: int, async_op: bool) -> Work:
        handle = dist.broadcast(x, self.ranks[source], group=self._name, async_op=async_op)
        return self._started(handle, async_op)

    def _send(self, x: Tensor, target: int, async_op: bool) -> Work:
        return self._started(dist.isend(x, self.ranks[target], group=self._name), async_op)

    def _receive(self, x: Tensor, source: int, async_op: bool) -> Work:
        return self._started(dist.irecv(x, self.ranks[source], group=self._name), async_op)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = self._gathered(np.array([len(data)], np.int64))
        # At least one byte: a tensor without elements has no memory to send.
        longest = max(1, int(lengths.max()))
        padded = np.zeros(longest, np.int8)
        padded[: len(data)] = np.frombuffer(data, np.int8)
        everything = self._gathered(padded).reshape(self.size, longest)
        return [row[: int(n)].tobytes() for row, n in zip(everything, lengths, strict=True)]

    def _start_all_gather_bytes(self, data: bytes) -> PendingBytes:
        mine = Tensor(np.frombuffer(data, np.int8))
        output = mint.empty((self.size * len(data),), dtype=mine.dtype)
        return _PendingFacts(self._all_gather_into(output, mine, True), output, mine)

    def _gathered(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        mine = Tensor(values)
        output = mint.empty((self.size * values.size,), dtype=mine.dtype)
        dist.all_gather_into_tensor(output, mine, group=self._name)
        return output.asnumpy()

    def _native(self, op: str) -> str:
        return REDUCE_OPS[op]

    def _average(self, x: Tensor, op: str) -> Callable[[], None] | None:
        if op != "avg":
            return None
        check_average(x, op)
        return lambda: self.platform.copy_(x, x / self.size)

    def _started(self, handle: Any, async_op: bool, finish: Callable[[], None] | None = None) -> Work:
        work = Pending(handle, finish)
        if async_op:
            return work
        work.wait()
        return DONE
