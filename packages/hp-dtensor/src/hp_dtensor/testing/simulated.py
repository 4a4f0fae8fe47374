"""Simulated ranks: threads of one process of which one runs at a time, with collectives in memory.

A rank runs until it meets a collective that others have not reached; then the lowest rank that can go on
does. So runs are deterministic, and a deadlock is found the moment it happens: no rank can go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hp_dtensor.comm.process_group import DONE, PendingBytes, ProcessGroup, Rows, Work
from hp_dtensor.comm.world import World
from hp_dtensor.exceptions import CapabilityError, LaunchError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.testing import simulated_collectives as collectives
from hp_dtensor.testing.simulated_collectives import describe_tensor
from hp_dtensor.testing.simulated_job import Call, Complete, Job, Receiving

Tensor = Any


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    platform: Platform | str | None = None,
    *args: Any,
    timeout_seconds: float = 300.0,
) -> list[Any]:
    """Call `fn(*args)` on each rank, every one with its own `current_world(platform)`, and return the results by rank.

    Args:
        platform: whose tensors the collectives take; a name, or None for the selected platform.
        timeout_seconds: how long all ranks together may take.

    Raises:
        LaunchError: a rank raised (its exception is the cause), or the time is up. All ranks stop at once.
        CollectiveError: ranks wait for each other, or their collectives, shapes or dtypes do not agree.
        CapabilityError: the framework mixes up what threads record (MindSpore 2.9).
    """
    if world_size < 1:
        raise LaunchError(f"run_ranks needs at least one rank, got world_size={world_size}")
    job = Job(world_size, get_platform(platform), SimulatedWorld)
    if world_size > 1 and not job.platform.records_by_thread:
        raise CapabilityError(
            f"run_ranks: this version of {job.platform.name} mixes up what threads record for their gradients, and "
            "simulated ranks are threads. Start real ones (hp_dtensor.launch), or take a newer version"
        )
    threads = [
        threading.Thread(target=job.run, args=(rank, fn, args), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    before = job.platform.rank_state()
    for thread in threads:
        thread.start()
    try:
        job.serve(timeout_seconds)
    finally:
        job.platform.set_rank_state(before)
    for thread in threads:
        thread.join()
    error, results = job.close()
    if error is not None:
        raise error
    return results


class SimulatedWorld(World):
    """The world of one simulated rank."""

    def __init__(self, rank: int, job: Job) -> None:
        super().__init__(rank, job.size, job.platform)
        self._job = job

    def _create_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        return SimulatedGroup(ranks, ranks.index(self.rank), self._job)


class SimulatedGroup(ProcessGroup):
    """A group of simulated ranks; the last rank to come to a collective does it for all."""

    platform: Platform
    backend = "simulated"

    def __init__(self, ranks: tuple[int, ...], rank: int, job: Job) -> None:
        super().__init__(ranks, rank, job.platform)
        self._job = job

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work:
        return self._meet("all_reduce", {"op": op, "tensor": self._kind(x)}, x, collectives.all_reduce)

    def _all_gather_into(self, output: Tensor, x: Tensor, async_op: bool) -> Work:
        return self._meet("all_gather", {"tensor": self._kind(x)}, (output, x), collectives.all_gather)

    def _reduce_scatter_into(self, output: Tensor, x: Tensor, op: str, async_op: bool) -> Work:
        facts = {"op": op, "tensor": self._kind(x)}
        return self._meet("reduce_scatter", facts, (output, x), collectives.reduce_scatter)

    def _all_to_all_into(self, output: Tensor, x: Tensor, output_rows: Rows, input_rows: Rows, async_op: bool) -> Work:
        facts = {"rows of": self._kind(x, x.shape[1:])}
        return self._meet("all_to_all", facts, (output, x, output_rows, input_rows), collectives.all_to_all)

    def _exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None:
        self._meet("exchange", {}, (tuple(sends), tuple(receives)), collectives.exchange)

    def _broadcast(self, x: Tensor, source: int, async_op: bool) -> Work:
        return self._meet("broadcast", {"source": source, "tensor": self._kind(x)}, x, collectives.broadcast)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        call = Call("all_gather_bytes", self.ranks, self.rank, {}, data)
        self._job.meet(call, collectives.all_gather_bytes)
        everything: list[bytes] = call.result
        return everything

    def _start_all_gather_bytes(self, data: bytes) -> PendingBytes:
        return self._job.post(Call("all_gather_bytes", self.ranks, self.rank, {}, data))

    def _send(self, x: Tensor, target: int, async_op: bool) -> Work:
        values = np.array(self.platform.to_numpy(x))
        call = Call("send", self.ranks, self.rank, {"tensor": self._kind(x)}, values)
        self._job.send(call, target)
        return DONE

    def _receive(self, x: Tensor, source: int, async_op: bool) -> Work:
        call = Call("receive", self.ranks, self.rank, {"tensor": self._kind(x)}, x)
        work = Receiving(call, source, self._job)
        if not async_op:
            work.wait()
        return work

    def _meet(self, name: str, facts: dict[str, Any], payload: Any, complete: Complete) -> Work:
        self._job.meet(Call(name, self.ranks, self.rank, facts, payload), complete)
        return DONE

    def _kind(self, x: Tensor, shape: Sequence[int] | None = None) -> str:
        return describe_tensor(self.platform, x, shape)
