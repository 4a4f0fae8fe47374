"""Memory that the engine's buffers hold, counted by the engine itself, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

from hp_fsdp._engine.fsdp_state import FSDPState, state_of, states_below
from hp_fsdp.exceptions import FullyShardError

Module = Any


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that the groups of a module hold on this rank; activations and optimizer state are not theirs.

    What `CPUOffloadPolicy` keeps on the host counts alike; its copies on the device, for a gather or a step, do not.

    Attributes:
        shards: sharded parameters, padding included.
        full: full parameters beyond the shards, and parts of them kept after forward.
        full_gradients: gradients not reduced yet, and reductions under way with their results.
        sharded_gradients: reduced gradients, those that wait for a further reduction included.

    Example:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     return memory_use(model).shards  # bytes: 12 of 24 float32 on this rank
        >>> run_ranks(program, 2)[0]
        48
    """

    shards: int
    full: int
    full_gradients: int
    sharded_gradients: int

    @property
    def total(self) -> int:
        """Bytes of all four kinds."""
        return self.shards + self.full + self.full_gradients + self.sharded_gradients


def memory_use(module: Module) -> MemoryUse:
    """Return the bytes that the groups of `module`, and of the modules below it, hold now.

    Raises:
        FullyShardError: neither has been through `fully_shard`.

    Example:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     return memory_use(model).shards  # bytes: 12 of 24 float32 on this rank
        >>> run_ranks(program, 2)[0]
        48
    """
    return _use(_states(module))


class MemoryMeter:
    """Context manager that measures the largest total of bytes that the groups of a module hold at once.

    Counts at every allocation of the engine, so nothing escapes; costs a walk over the groups each time.

    Attributes:
        peak: bytes of the largest total so far.
        at_peak: what they consisted of.

    Example:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     with MemoryMeter(model) as meter:
        ...         model(platform.ops.ones((3, 4), platform.dtype("float32")))
        ...     return meter.peak > 0  # bytes
        >>> run_ranks(program, 2)[0]
        True
    """

    def __init__(self, module: Module) -> None:
        self._states = _states(module)
        self.at_peak = _use(self._states)

    @property
    def peak(self) -> int:
        """Bytes of the largest total so far."""
        return self.at_peak.total

    def __enter__(self) -> MemoryMeter:
        self._watch(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch(False)

    def _watch(self, on: bool) -> None:
        for state in self._states:
            for buffer in state.group.buffers:
                buffer.on_allocation(self._sample if on else None)

    def _sample(self) -> None:
        now = _use(self._states)
        if now.total > self.at_peak.total:
            self.at_peak = now


def _states(module: Module) -> list[FSDPState]:
    own = state_of(module)
    if own is None:
        raise FullyShardError(f"{type(module).__name__} has not been through fully_shard")
    return states_below(own.platform, module)


def _use(states: list[FSDPState]) -> MemoryUse:
    buffers = [buffer for state in states for buffer in state.group.buffers]
    schedules = {id(state.schedule): state.schedule for state in states if state.schedule is not None}
    return MemoryUse(
        shards=sum(buffer.shard_bytes for buffer in buffers),
        full=sum(buffer.gathering.held_bytes for buffer in buffers),
        full_gradients=sum(buffer.gradients.unreduced_bytes for buffer in buffers)
        + sum(schedule.reducing_bytes for schedule in schedules.values()),
        sharded_gradients=sum(buffer.gradients.reduced_bytes for buffer in buffers),
    )
