"""Processes of MindSpore: joining a job, this rank's device and its share of the machine."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore.graph.api import _pynative_executor as executor

from hp_dtensor.comm.world import World
from hp_dtensor.dispatch.plan_cache import forget_plans
from hp_dtensor.exceptions import PlatformError
from hp_dtensor.launch.environment import from_environment, is_launched
from hp_platform_mindspore.capabilities import CPU
from hp_platform_mindspore.comm.world import MindSporeWorld
from hp_platform_mindspore.platform_base import MindSporeBase


class MindSporeProcesses(MindSporeBase):
    """The part of the platform that joins jobs over MindSpore's communication."""

    _generator: np.random.Generator

    def connect(self, rank: int, size: int, address: str, timeout_seconds: float = 300.0, local_rank: int = 0) -> World:
        """Join a job as `Platform.connect` says.

        On CPU a collective fails on the other ranks within `timeout_seconds` when one has died, or
        `MS_CPU_COMM_OP_TIMEOUT` if that is set.

        Raises:
            PlatformError: this process has joined a job before (MindSpore can do that once), or the job cannot
                be joined.
        """
        if self._world is not None:
            raise PlatformError(
                f"this process is already rank {self._world.rank} of a job of {self._world.size}; disconnect() first"
            )
        self._world = MindSporeWorld.join(self, rank, size, address, timeout_seconds, local_rank)
        return self._world

    def join_launched(self) -> None:
        if is_launched():
            from_environment(self)

    def disconnect(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close()
        forget_plans()

    def environment(self, local_rank: int, local_size: int) -> dict[str, str]:
        """Return the variables for a new rank: a log of errors only, and its share of this machine's cores.

        What the user has set stays.
        """
        threads = max(1, len(os.sched_getaffinity(0)) // max(1, local_size))
        wanted = {"GLOG_v": "3", "OMP_NUM_THREADS": str(threads)}
        return {name: value for name, value in wanted.items() if name not in os.environ}

    def num_accelerators(self) -> int:
        return 0 if self.capabilities is CPU else int(ms.device_context.ascend.device_count())

    def peak_memory(self) -> int:
        return super().peak_memory() if self.capabilities is CPU else int(ms.runtime.max_memory_allocated())

    def profile(self, folder: Path, rank: int) -> AbstractContextManager[None]:
        from hp_platform_mindspore.profiling import profiled

        return profiled(folder, rank, on_npu=self.capabilities is not CPU)

    def collective_dtypes(self, reducing: bool) -> tuple[str, ...]:
        return self.capabilities.reduced_dtypes if reducing else self.capabilities.moved_dtypes

    @property
    def records_by_thread(self) -> bool:
        return not ms.__version__.startswith("2.9")

    def rank_state(self) -> tuple[bool, bool, Any]:
        """Return the two grad flags and the state of the generator, which a simulated rank takes along."""
        return executor.grad_flag(), executor.enable_grad(), self._generator.bit_generator.state

    def set_rank_state(self, state: tuple[bool, bool, Any]) -> None:
        grad_flag, enabled, generator = state
        executor.set_grad_flag(grad_flag)
        executor.set_enable_grad(enabled)
        self._generator.bit_generator.state = generator
