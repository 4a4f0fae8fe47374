"""Processes of a framework: joining a job of several ranks, and the state and devices of one rank."""

from __future__ import annotations

import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.counted_step import CountedStep
from hp_dtensor.platform.tensors import DTYPE_NAMES

Tensor = Any
Module = Any
World: TypeAlias = Any
"""`hp_dtensor.World`, which is built on platforms and therefore not named here."""


class ProcessInterface(ABC):
    """The part of `Platform` that joins jobs and tells what a rank can do.

    Attributes:
        device_types: the kinds of device that it can use here, best first (`("cuda", "cpu")`).
    """

    device_types: tuple[str, ...]
    _world: World | None = None

    @property
    def world(self) -> World | None:
        """The `World` of the job that this process has joined; None before.

        The default: `_world`, which `connect` and `disconnect` set.
        """
        return self._world

    @abstractmethod
    def connect(self, rank: int, size: int, address: str, timeout_seconds: float = 300.0, local_rank: int = 0) -> World:
        """Join a job of `size` ranks that meets at `address` (`host:port`, served by rank 0); returns its `world`."""

    def join_launched(self) -> None:
        """Join the job of the launcher that has started this process, if one has; the default: stay alone."""

    @abstractmethod
    def disconnect(self) -> None:
        """Leave the job; safe to call twice and after an error."""

    def environment(self, local_rank: int, local_size: int) -> dict[str, str]:
        """Return extra environment variables for a rank started on this machine (thread counts, log levels)."""
        return {}

    def num_accelerators(self) -> int:
        """Return how many accelerators of its best kind this machine offers to ranks; 0: ranks run on the CPU."""
        return 0

    def max_local_ranks(self) -> int | None:
        """Return how many ranks this machine can have: one for each accelerator; None: any number."""
        return self.num_accelerators() or None

    def peak_memory(self) -> int:
        """Return the largest number of bytes that this rank's device has held at once for it so far.

        The default, for ranks on the CPU: that of the process, in main memory.
        """
        # Kibibytes on Linux.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def live_bytes(self) -> AbstractContextManager[Any]:
        """Count the bytes of tensors that operations of this thread make inside the block, while they are alive.

        Returns:
            A context manager that gives an object with two attributes: `now`, the bytes alive, and `peak`, the most so
            far.

        Raises:
            CapabilityError: the framework does not tell, which is the default.
        """
        raise CapabilityError("this platform does not tell when the memory of a tensor is freed")

    def count_step(
        self,
        build: Callable[[], Module],
        run: Callable[[Module], Tensor],
        parts: Callable[[Module], Mapping[str, Module]],
        dtype: str | None = None,
    ) -> CountedStep:
        """Count bytes and operations of one forward and backward of a module, on tensors without memory.

        Args:
            build: makes the module, whose tensors have shapes alone.
            run: returns the scalar that backward begins at.
            parts: returns the parts to be told apart, by dotted names; none lies within another.
            dtype: of computation: parameters have it in the two passes; None: as the module is built.

        Raises:
            CapabilityError: the framework does not compute without memory, which is the default.
        """
        raise CapabilityError("this platform does not compute on tensors without memory")

    def peak_flops(self, dtype: str) -> float | None:
        """Return the matrix products' peak rate of this rank's device, in floating-point operations per second.

        Args:
            dtype: name of the operands' dtype.

        Returns:
            The figure of the maker's data sheet, without sparsity; None, the default, where it is not known.
        """
        return None

    def profile(self, folder: Path, rank: int) -> AbstractContextManager[None]:
        """Profile what this rank runs inside the block.

        Writes `rank<rank>-trace.json` (or `.json.gz`) for trace viewers such as Perfetto into the folder, and beside it
        what the framework tells of operations and of memory.

        Raises:
            CapabilityError: the framework has no profiler, which is the default.
        """
        raise CapabilityError("this platform has no profiler")

    def collective_dtypes(self, reducing: bool) -> tuple[str, ...]:
        """Return the names of the dtypes that its process groups can move here.

        The conformance suite tries each of them.

        Args:
            reducing: also reduce.
        """
        return tuple(name for name in DTYPE_NAMES if not (reducing and name == "bool"))

    @property
    def records_by_thread(self) -> bool:
        """Return whether threads record operations for their gradients apart from each other, as simulated ranks do."""
        return True

    def rank_state(self) -> Any:
        """Return process-wide state that belongs to one rank, such as a global grad flag.

        Simulated ranks share a process: the state is read when a rank's thread gives up its turn, and given back to
        `set_rank_state` when that thread goes on. A framework that keeps such state per thread has none.
        """
        return None

    def set_rank_state(self, state: Any) -> None:
        """Restore what `rank_state` returned; called in the thread of the rank that goes on."""

    def adopt_mesh(self, mesh: Any) -> Any | None:
        """Return a device mesh of the framework's own as a `hp_dtensor.DeviceMesh` over the same groups.

        None, the default, for something else.
        """
        return None

    def adopt_group(self, group: Any) -> Any | None:
        """Return a process group of the framework's own as a `hp_dtensor.ProcessGroup` that communicates through it.

        None, the default, for something else.
        """
        return None

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it (nothing on CPU)."""
