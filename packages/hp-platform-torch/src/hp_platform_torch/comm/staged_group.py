"""Ranks that share an accelerator: their collectives go by way of host memory, over gloo.

NCCL refuses two ranks of a job on one device. With `HP_BACKEND=gloo` several may share one, so that a program of
several processes runs, and is tested, where there is one card; it is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hp_dtensor.comm.process_group import DONE, Rows, Work
from hp_platform_torch.comm.groups import TorchGroup
from hp_platform_torch.comm.works import Exchange, Then, settle

Tensor = torch.Tensor


class StagedGroup(TorchGroup):
    """A process group whose collectives copy tensors to the host, and results back when they return.

    Asynchronous ones are done when they return, too, but for messages between two ranks: a send that waited would wait
    for its receive, and ranks that send to each other first would wait for ever.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.backend = "gloo"

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work:
        host = _to_host(x)
        super()._all_reduce(host, op, False)
        return _back(x, host)

    def _all_gather_into(self, output: Tensor, x: Tensor, async_op: bool) -> Work:
        into = _like_on_host(output)
        super()._all_gather_into(into, _to_host(x), False)
        return _back(output, into)

    def _reduce_scatter_into(self, output: Tensor, x: Tensor, op: str, async_op: bool) -> Work:
        into = _like_on_host(output)
        super()._reduce_scatter_into(into, _to_host(x), op, False)
        return _back(output, into)

    def _all_to_all_into(self, output: Tensor, x: Tensor, output_rows: Rows, input_rows: Rows, async_op: bool) -> Work:
        into = _like_on_host(output)
        super()._all_to_all_into(into, _to_host(x), output_rows, input_rows, False)
        return _back(output, into)

    def _start_exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Work:
        leaving = [None if x is None else _to_host(x) for x in sends]
        arriving = [None if x is None else _like_on_host(x) for x in receives]
        super()._start_exchange(leaving, arriving).wait()
        for index, (x, host) in enumerate(zip(receives, arriving, strict=True)):
            # What a rank sends to itself is not exchanged here.
            if x is not None and host is not None and index != self.rank:
                x.copy_(host)
        return DONE

    def _broadcast(self, x: Tensor, source: int, async_op: bool) -> Work:
        host = _to_host(x)
        super()._broadcast(host, source, False)
        return _back(x, host)

    def _send(self, x: Tensor, target: int, async_op: bool) -> Work:
        host = _to_host(x)
        return settle(Exchange([super()._send(host, target, True)], [], host), async_op)

    def _receive(self, x: Tensor, source: int, async_op: bool) -> Work:
        host = _like_on_host(x)
        return settle(Then(super()._receive(host, source, True), lambda: x.copy_(host)), async_op)


def _to_host(x: Tensor) -> Tensor:
    """Return a contiguous copy in host memory, also of a tensor that is there."""
    return x.detach().to("cpu", copy=True).contiguous()


def _like_on_host(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _back(x: Tensor, host: Tensor) -> Work:
    x.copy_(host)
    return DONE
