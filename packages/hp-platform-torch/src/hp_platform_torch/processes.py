"""Processes of torch: joining a job, this rank's device, and conversion of torch's own meshes and groups."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import World
from hp_dtensor.dispatch.operation import forget_plans
from hp_dtensor.exceptions import PlatformError
from hp_dtensor.launch.environment import device_index, from_environment, is_launched
from hp_dtensor.platform.interface import DeviceFacts, Platform
from hp_platform_torch.comm.groups import device_types, shares_devices
from hp_platform_torch.comm.world import TorchWorld, join, joined_store, leave, serve
from hp_platform_torch.profiling import peak_flops


class TorchProcesses(Platform):
    """The part of the platform that joins jobs over torch.distributed, and knows this rank's devices.

    Attributes:
        device: this rank's default device.
    """

    device: torch.device

    def __init__(self) -> None:
        self.device_types = _device_types()
        self._owns_process_group = False
        self._connections = 0
        # The program's own default group for which `_world` was created without `connect`, or which was left.
        self._default_group: Any = None

    @property
    def world(self) -> World | None:
        """The job that this process joined by `connect` or torch's own `init_process_group`; None without one."""
        if self._world is None and dist.is_initialized() and dist.group.WORLD is not self._default_group:
            self.connect(dist.get_rank(), dist.get_world_size(), "", local_rank=self._local_rank())
            self._default_group = dist.group.WORLD
        elif (
            self._world is not None and not dist.is_initialized() and (self._default_group or self._owns_process_group)
        ):
            self.disconnect()  # the program has destroyed the groups
        return self._world

    def join_launched(self) -> None:
        if is_launched():
            from_environment(self)

    def connect(self, rank: int, size: int, address: str, timeout_seconds: float = 300.0, local_rank: int = 0) -> World:
        """See `Platform.connect`.

        A default process group that the program created itself is used, and not destroyed. If a peer dies, collectives
        fail at once or within `timeout_seconds`.

        Raises:
            PlatformError: this process has joined a job already, or the job cannot be joined.
        """
        return self._connect(rank, size, address, timeout_seconds, local_rank, is_served=False)

    def serve_meeting_point(self, host: str) -> tuple[str, Callable[[], None]]:
        return serve(host)

    def connect_served(
        self, rank: int, size: int, address: str, timeout_seconds: float = 300.0, local_rank: int = 0
    ) -> World:
        return self._connect(rank, size, address, timeout_seconds, local_rank, is_served=True)

    def abort_collectives(self) -> None:
        if isinstance(self._world, TorchWorld):
            self._world.abort()

    def _connect(
        self, rank: int, size: int, address: str, timeout_seconds: float, local_rank: int, *, is_served: bool
    ) -> World:
        if self._world is not None:
            if self._default_group is not None and (rank, size) == (self._world.rank, self._world.size):
                return self._world
            raise PlatformError(
                f"this process is already rank {self._world.rank} of a job of {self._world.size}; disconnect() first"
            )
        if is_served:
            # By default torch ends the process when a peer of an NCCL communicator has died.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        timeout = timedelta(seconds=timeout_seconds)
        self._use_device(local_rank)
        self._connections += 1
        store = None
        if dist.is_initialized():
            _check_same_job(rank, size)
            # Registered once, however often this process joins.
            atexit.unregister(self._follow_destruction)
            atexit.register(self._follow_destruction)
            store = joined_store(self._connections)
        elif size > 1:
            store = join(rank, size, address, timeout, is_served=is_served)
            self._owns_process_group = True
        self._world = TorchWorld(rank, size, self, store, timeout)
        self._default_group = None
        return self._world

    def wrap_mesh(self, mesh: Any) -> DeviceMesh | None:
        """Return a `torch.distributed.device_mesh.DeviceMesh` as ours, over the same process groups."""
        from torch.distributed.device_mesh import DeviceMesh as TorchMesh

        from hp_platform_torch.tensor.interop import from_torch_mesh

        return from_torch_mesh(mesh, self) if isinstance(mesh, TorchMesh) else None

    def wrap_group(self, group: Any) -> ProcessGroup | None:
        """Return a process group of torch.distributed as ours, which communicates through it."""
        from hp_platform_torch.tensor.interop import from_torch_group

        return from_torch_group(group, self) if isinstance(group, dist.ProcessGroup) else None

    def disconnect(self) -> None:
        world, self._world = self._world, None
        # True for the program's own group. A group of ours that outlived torch's destruction of it could abort the
        # process.
        is_left = dist.is_initialized() and not self._owns_process_group
        self._default_group = dist.group.WORLD if is_left else None
        if world is not None:
            world.close()
            _drop_failed_nodes()
        # Cached plans refer to meshes, and so to this world and its connections.
        forget_plans()
        if self._owns_process_group:
            self._owns_process_group = False
            leave()

    def _follow_destruction(self) -> None:
        """Leave a job whose default group the program has destroyed; called at exit.

        Threads of our groups would otherwise sometimes abort the process while Python shuts down. If the group still
        exists nothing is done: a peer may be gone, and leaving would wait for it.
        """
        if self._world is not None and not dist.is_initialized():
            self.disconnect()

    def num_accelerators(self) -> int:
        kind = self.device_types[0]
        return 0 if kind == "cpu" else int(getattr(torch, kind).device_count())

    def max_local_ranks(self) -> int | None:
        return None if shares_devices() else super().max_local_ranks()

    def describe_device(self) -> DeviceFacts:
        kind = self.device_types[0]
        if kind == "cpu":
            return super().describe_device()
        devices = getattr(torch, kind)
        versions = {}
        if kind == "cuda":
            # ROCm has the interface of CUDA, and its own version.
            versions = {"ROCm": torch.version.hip} if torch.version.hip else {"CUDA": torch.version.cuda}
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        properties = devices.get_device_properties(devices.current_device())
        return DeviceFacts(str(properties.name), int(properties.total_memory), versions)

    def peak_memory(self) -> int:
        kind = self.device_types[0]
        return super().peak_memory() if kind == "cpu" else int(getattr(torch, kind).max_memory_allocated())

    def peak_flops(self, dtype: str) -> float | None:
        kind = self.device_types[0]
        return None if kind == "cpu" else peak_flops(getattr(torch, kind).get_device_name(), dtype)

    def profile(self, folder: Path, rank: int) -> AbstractContextManager[None]:
        from hp_platform_torch.profiling import profiled

        return profiled(folder, rank, self.device_types[0])

    def _local_rank(self) -> int:
        """Return the device index of a program that initialized torch.distributed itself."""
        kind = self.device_types[0]
        return 0 if kind == "cpu" else int(os.environ.get("LOCAL_RANK") or getattr(torch, kind).current_device())

    def _use_device(self, local_rank: int) -> None:
        kind = self.device_types[0]
        if kind != "cpu":
            count = getattr(torch, kind).device_count()
            index = local_rank % count if shares_devices() else device_index(local_rank, count)
            self.device = torch.device(kind, index)
            getattr(torch, kind).set_device(self.device)

    def rank_state(self) -> list[torch.Tensor]:
        """Return the states of the host's and the device's generators; each simulated rank has its own."""
        return [module.get_rng_state() for module in self._generators()]

    def set_rank_state(self, state: list[torch.Tensor]) -> None:
        for module, each in zip(self._generators(), state, strict=True):
            module.set_rng_state(each)

    def _generators(self) -> list[Any]:
        return [torch, *(getattr(torch, kind) for kind in self.device_types if kind != "cpu")]

    def simulated_rank(self) -> AbstractContextManager[Any]:
        # Autograd runs all backwards of an accelerator in one thread: a rank that waits in its backward would block the
        # backward of the rank for which it waits.
        return torch.autograd.set_multithreading_enabled(self.device_types[0] == "cpu")

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()


def _device_types() -> tuple[str, ...]:
    usable = device_types()
    wanted = os.environ.get("HP_DEVICE")
    if not wanted:
        return usable
    if wanted not in usable:
        raise PlatformError(f"HP_DEVICE is {wanted!r}, but torch can use here only: {', '.join(usable)}")
    return (wanted, "cpu") if wanted != "cpu" else ("cpu",)


def _check_same_job(rank: int, size: int) -> None:
    have = dist.get_rank(), dist.get_world_size()
    if have != (rank, size):
        raise PlatformError(f"torch.distributed is already rank {have[0]} of {have[1]}; expected rank {rank} of {size}")


def _drop_failed_nodes() -> None:
    """Let autograd drop the nodes of a failed backward of this thread, which it retains until the thread's next one.

    They hold a model and its connections, at which peers would wait.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), requires_grad=True).clone().backward()  # type: ignore[no-untyped-call]
