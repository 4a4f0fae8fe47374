"""The ranks of a job, and how they connect: over MCCL on CPU, over HCCL on Ascend."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import mindspore.mint.distributed as dist
import numpy as np
from mindspore.communication.management import _init_with_store

from hp_dtensor.comm.meeting_point import MeetingPoint
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import NoCommunicationGroup, World
from hp_dtensor.exceptions import PlatformError
from hp_dtensor.launch.environment import launched_local_rank
from hp_platform_mindspore.platform_base import MindSporeBase, use_ascend
from hp_platform_mindspore.process_groups import HostGroup, NativeGroup
from hp_platform_mindspore.tensor.memory import share

TIMEOUT_VARIABLE = "MS_CPU_COMM_OP_TIMEOUT"
READY_KEY = "hp_dtensor/ready"


class MindSporeWorld(World):
    """The ranks of a job, and the groups among them."""

    platform: MindSporeBase
    _joined = False

    @classmethod
    def join(
        cls,
        platform: MindSporeBase,
        rank: int,
        size: int,
        address: str,
        timeout_seconds: float,
        local_rank: int,
    ) -> MindSporeWorld:
        """Connect to the other ranks at `address`.

        Raises:
            PlatformError: this process has joined before, or the others did not join in time.
        """
        if size > 1:
            # MCCL does not support a second initialization.
            if cls._joined:
                raise PlatformError(
                    "this process has been in a job before; MindSpore joins one only once per process. Start a new one"
                )
            try:
                _join(platform, rank, size, address, timeout_seconds, local_rank)
            except RuntimeError as error:
                raise PlatformError(
                    f"rank {rank} of {size} could not join the job at {address} within {timeout_seconds:g} s: {error}"
                ) from error
            cls._joined = True
        return cls(rank, size, platform)

    def _create_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        rank = ranks.index(self.rank)
        # Collectives of one rank are copies, and must not wait for communication.
        if len(ranks) == 1:
            return NoCommunicationGroup(ranks, rank, self.platform)
        if self.platform.capabilities.native_collectives:
            return NativeGroup(ranks, rank, self.platform)
        return HostGroup(ranks, rank, self.platform)


def _join(platform: MindSporeBase, rank: int, size: int, address: str, timeout_seconds: float, local_rank: int) -> None:
    point = MeetingPoint(rank, size, address, rank == 0, timeout_seconds)
    # MindSpore takes IP addresses only, and would report neither a name that does not resolve nor a port in use.
    ip = point.reach()
    with point.waiting_for_ranks():
        _connect(platform, point, ip, local_rank)


def _connect(platform: MindSporeBase, point: MeetingPoint, ip: str, local_rank: int) -> None:
    rank, size, timeout = point.rank, point.size, timedelta(seconds=point.timeout_seconds)
    if platform.capabilities.native_collectives:
        # `init_process_group` ignores its argument device_id: without this, all ranks of a machine would use device 0.
        use_ascend(local_rank)
        dist.init_process_group(
            "hccl",
            init_method=f"tcp://{ip}:{point.port}",
            timeout=timeout,
            world_size=size,
            rank=rank,
        )
        return
    use_own_core()
    # Read by MCCL when it is initialized, so it is set before.
    os.environ.setdefault(TIMEOUT_VARIABLE, str(max(1, round(point.timeout_seconds))))
    # Instead of `init_process_group`, which refuses the backend mccl.
    remaining = timedelta(seconds=point.remaining_seconds())
    store = dist.TCPStore(ip, point.port, world_size=size, is_master=point.serves, timeout=remaining)
    _init_with_store(backend="mccl", timeout=timeout, world_size=size, rank=rank, store=store)
    _wait_for_all(store, size, point.remaining_seconds())


def use_own_core() -> None:
    """Limit this thread, and those it starts, to one core if a launcher started at least one rank per core.

    MindSpore hands each operation on a CPU to threads of its own, which spin while they are idle. Among the spinning
    threads of other ranks, each of these steps waits for the scheduler: a training step of four ranks on two cores took
    1.3 to 1.7 times as long.
    """
    # Not everywhere: macOS has no affinities.
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) >= len(cores) > 1:
        os.sched_setaffinity(0, {cores[launched_local_rank() % len(cores)]})


def _wait_for_all(store: Any, size: int, timeout_seconds: float) -> None:
    """Wait until every rank can receive, and connect all by a first collective.

    MindSpore's initialization returns on rank 0 seconds before its peers can receive: an immediate transfer would fail.
    """
    deadline = time.monotonic() + timeout_seconds
    # A counter as a barrier: collectives do not work yet.
    store.add(READY_KEY, 1)
    while store.add(READY_KEY, 0) < size:
        if time.monotonic() > deadline:
            # `join` makes it a PlatformError, as an error of MindSpore's own initialization.
            raise RuntimeError("not every rank was ready in time")
        time.sleep(0.005)
    one = share(np.ones(1, np.float32))
    dist.all_reduce(one)
    # Waits for the collective, and raises its error here.
    one.asnumpy()
