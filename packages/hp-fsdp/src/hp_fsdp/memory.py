"""Memory of parameter groups: measured on the engine's buffers, or planned without ranks or a framework."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from hp_fsdp._engine.buffer_layout import FlatLayout, block_of, plan_buffers
from hp_fsdp._engine.forward import FSDPState, state_of, states_below
from hp_fsdp._engine.parameters import default_shard_dim
from hp_fsdp.exceptions import FullyShardError

Module = Any


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that the groups of a module hold on this rank, without activations and optimizer state.

    Buffers that `CPUOffloadPolicy` stores on the host are included. Their temporary copies on the device are not.

    Attributes:
        shards: sharded parameters, padding included.
        full: full parameters beyond the shards, and parts of them retained after forward.
        full_gradients: gradients that have not been reduced, and running reductions with their results.
        sharded_gradients: reduced gradients, those pending for a further reduction included.

    Examples:
        >>> from hp_fsdp import MemoryUse
        >>> MemoryUse(shards=48, full=96, full_gradients=0, sharded_gradients=48).total
        192
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
    """Return the bytes that the groups of `module` and of the modules below it hold now.

    Raises:
        FullyShardError: none of them has been through `fully_shard`.

    Examples:
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
    """Context manager that measures the peak memory of the groups of a module.

    It measures at every allocation of a buffer, at the cost of a loop over all groups each time.

    Attributes:
        peak: the largest total so far, in bytes.
        at_peak: the memory use at that moment.

    Examples:
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
        """The largest total so far, in bytes."""
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
                buffer.on_allocation = self._sample if on else None

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
    # A schedule is shared by all groups of a model, and counted once.
    schedules = {id(state.schedule): state.schedule for state in states if state.schedule is not None}
    return MemoryUse(
        shards=sum(buffer.shard_bytes for buffer in buffers),
        full=sum(buffer.gathering.held_bytes for buffer in buffers),
        full_gradients=sum(buffer.gradients.unreduced_bytes for buffer in buffers)
        + sum(schedule.context.reducer.held_bytes for schedule in schedules.values()),
        sharded_gradients=sum(buffer.gradients.reduced_bytes for buffer in buffers),
    )


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """A parameter of a planned group.

    Attributes:
        name: dotted name.
        shape: local shape that one rank computes with: of its tensor- or expert-parallel shard if it has one.
        shard_dim: the dimension to shard over the ranks of the group. None: the first one longer than 1.
        itemsize: bytes of an element of the sharded parameter.
        trainable: it gets a gradient.

    Examples:
        >>> from hp_fsdp import PlannedParameter
        >>> PlannedParameter("head.weight", (6, 4)).itemsize
        4
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int | None = None
    itemsize: int = 4
    trainable: bool = True


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """One flat buffer of a planned group. All sizes are bytes on one rank.

    Attributes:
        parameters: the parameters, in the order of the layout's blocks.
        layout: the position of each parameter in the buffer.
        param_itemsize: bytes of an element of the full buffer.
        reduce_itemsize: bytes of an element of the gradients when they are reduced.
        num_replicas: number of ranks that hold the same shard.
        trainable: its parameters get gradients.
        is_offloaded: shards are stored in host memory, so that even a single rank needs a full buffer.
        grad_itemsize: bytes of an element of the reduced gradients. None: `itemsize`.

    Examples:
        >>> from hp_fsdp import PlannedParameter, plan_group
        >>> (buffer,) = plan_group([PlannedParameter("weight", (6, 4))], num_shards=2)
        >>> buffer.shard, buffer.full, buffer.gather_wire, buffer.reduce_wire
        (48, 96, 48, 48.0)
    """

    parameters: tuple[PlannedParameter, ...]
    layout: FlatLayout
    param_itemsize: int
    reduce_itemsize: int
    num_replicas: int = 1
    trainable: bool = True
    is_offloaded: bool = False
    grad_itemsize: int | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the shard."""
        return self.parameters[0].itemsize

    @property
    def _grad_itemsize(self) -> int:
        return self.grad_itemsize or self.itemsize

    @property
    def full_is_shard(self) -> bool:
        """A single shard is the full buffer itself: nothing is gathered or freed."""
        return self.layout.num_shards == 1 and self.param_itemsize == self.itemsize and not self.is_offloaded

    @property
    def shard(self) -> int:
        """The sharded parameters, padding included."""
        return self.layout.shard_numel * self.itemsize

    @property
    def full(self) -> int:
        """The full parameters beyond the shard, while they are gathered."""
        # The shard is counted separately, in `shard`.
        return 0 if self.full_is_shard else self.layout.numel * self.param_itemsize

    @property
    def full_gradient(self) -> int:
        """Gradients before their reduction."""
        return self.layout.numel * self.reduce_itemsize if self.trainable else 0

    @property
    def reduced(self) -> int:
        """This rank's shard of the reduced gradients, in the dtype of the reduction. 0 if nothing is sharded."""
        if not self.trainable or self.layout.num_shards == 1:
            return 0
        return self.layout.shard_numel * self.reduce_itemsize

    @property
    def reduces_in_place(self) -> bool:
        """The full gradients become those of the shard: nothing is sharded, copied or cast."""
        return self.layout.num_shards == 1 and self.reduce_itemsize == self._grad_itemsize and not self.is_offloaded

    @property
    def gradient(self) -> int:
        """Gradients of the sharded parameters: views of one buffer, padding included."""
        return self.layout.shard_numel * self._grad_itemsize if self.trainable else 0

    @property
    def gather_wire(self) -> int:
        """Bytes that one rank sends in one gather of the full parameters."""
        return (self.layout.num_shards - 1) * self.layout.shard_numel * self.param_itemsize

    @property
    def reduce_wire(self) -> float:
        """Bytes that one rank sends in one reduce-scatter of gradients."""
        return (self.layout.num_shards - 1) * float(self.layout.shard_numel * self.reduce_itemsize) * self.trainable

    @property
    def replicate_wire(self) -> float:
        """Bytes that one rank sends to the ranks with the same shard, in one all-reduce of reduced gradients."""
        # A ring all-reduce: a reduce-scatter and an all-gather.
        share = 2 * (self.num_replicas - 1) / self.num_replicas
        return share * self.layout.shard_numel * self.reduce_itemsize * self.trainable

    def largest_local_numels(self) -> dict[str, int]:
        """Return the number of elements of each parameter, by name, on the rank with the least padding.

        Optimizers have state for these elements, but not for padding. The time does not depend on the number of ranks.
        """
        rank = self._shard_with_least_padding()
        return {each.name: self.layout.range_in_shard(i, rank)[1] for i, each in enumerate(self.parameters)}

    def _shard_with_least_padding(self) -> int:
        """Return a shard with the least padding. Only shards near the ends of gaps are compared."""
        size = self.layout.shard_numel
        gaps = list(self.layout.gaps())
        candidates = {0, self.layout.num_shards - 1}
        for offset, length in gaps:
            # A shard in the middle of a gap is all padding. Shards at its ends and next to it have the least of it.
            for end in (offset, offset + length):
                candidates.update((end // size - 1, end // size, end // size + 1))

        def padding(shard: int) -> int:
            start, end = shard * size, (shard + 1) * size
            return sum(max(0, min(end, offset + length) - max(start, offset)) for offset, length in gaps)

        return min((shard for shard in sorted(candidates) if 0 <= shard < self.layout.num_shards), key=padding)


def plan_group(
    parameters: Iterable[PlannedParameter],
    num_shards: int,
    *,
    param_itemsize: int | None = None,
    reduce_itemsize: int | None = None,
    num_replicas: int = 1,
    is_offloaded: bool = False,
    grad_itemsize: int | None = None,
) -> list[PlannedBuffer]:
    """Return the flat buffers of the group that `fully_shard` would make of these parameters.

    Args:
        parameters: the parameters of one module, in its order.
        num_shards: size of the shard axis (1 for `zero_stage=0`).
        param_itemsize: bytes of the dtype of the computation. None: the parameters' own.
        reduce_itemsize: bytes of the dtype of the reduction. None: `param_itemsize`.
        num_replicas: size of the replicate axis.
        is_offloaded: the shards are stored in host memory.
        grad_itemsize: bytes of the dtype of the reduced gradients (`MixedPrecisionPolicy.grad_dtype`). None: the
            parameters' own.

    Examples:
        >>> from hp_fsdp import PlannedParameter, plan_group
        >>> buffers = plan_group([PlannedParameter("weight", (8, 4))], num_shards=4, param_itemsize=2)
        >>> sum(each.shard for each in buffers), sum(each.full for each in buffers)
        (32, 64)
    """
    # As in `fully_shard`: one buffer for each dtype (its itemsize here) and trainability.
    kinds: dict[tuple[int, bool], list[PlannedParameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.itemsize, parameter.trainable), []).append(parameter)
    planned = []
    for (itemsize, trainable), same_kind in kinds.items():
        computed = param_itemsize or itemsize
        dims = [default_shard_dim(x.shape) if x.shard_dim is None else x.shard_dim for x in same_kind]
        blocks = [block_of(x.shape, dim, min(itemsize, computed)) for x, dim in zip(same_kind, dims, strict=True)]
        for chosen, layout in plan_buffers(blocks, num_shards):
            planned.append(
                PlannedBuffer(
                    tuple(same_kind[index] for index in chosen),
                    layout,
                    computed,
                    reduce_itemsize or computed,
                    num_replicas,
                    trainable,
                    is_offloaded,
                    grad_itemsize,
                )
            )
    return planned
