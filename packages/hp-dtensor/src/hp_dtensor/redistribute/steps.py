"""The steps of a plan: each acts on this rank's local data; gradients are the plan's business."""

from __future__ import annotations

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import ProcessGroup, Work
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute.cuts import Placements
from hp_dtensor.redistribute.messages import Messages, exchange_messages, reduction_regions
from hp_dtensor.redistribute.ownership import Ownership
from hp_dtensor.redistribute.regions import Part, Received, Region, compact_copy

Tensor = Any


class Step(ABC):
    """One collective, or one change of the local data alone.

    Attributes:
        name: `slice`, `scale`, `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all` (one axis from one
            dimension to another), `exchange` (each rank receives what it lacks), `reduce_to_owners`.
        axes: the mesh axes whose ranks communicate, or whose placement changes.
        source, target: placements before and after, one per mesh axis.
        wire_bytes: sent per rank, the mean over ranks.
        seconds: by the cost model.
    """

    __slots__ = ("__dict__", "axes", "mesh", "name", "seconds", "source", "target", "wire_bytes")

    def __init__(
        self,
        name: str,
        mesh: DeviceMesh,
        axes: tuple[int, ...],
        source: Placements,
        target: Placements,
        wire_bytes: float,
        seconds: float,
    ) -> None:
        self.name, self.mesh, self.axes, self.source, self.target = name, mesh, axes, source, target
        self.wire_bytes, self.seconds = wire_bytes, seconds

    @abstractmethod
    def run(self, local: Tensor) -> Tensor:
        """The step on this rank's local tensor, as data; the result is a tensor of its own."""

    def start(self, local: Tensor) -> Callable[[], Tensor]:
        """Begin the step; the function returned waits for it and gives the result. `local` must not change before."""
        result = self.run(local)
        return lambda: result

    @property
    def group(self) -> ProcessGroup:
        return self.mesh.group_over(self.axes)

    @property
    def platform(self) -> Platform:
        return self.mesh.platform

    @property
    def coordinate(self) -> tuple[int, ...]:
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        return coordinate


class Collective(Step):
    """A collective of equal blocks, one after the other in dim 0: `blocks_sent` go out, `blocks_landed` come in."""

    op = "sum"

    def run(self, local: Tensor) -> Tensor:
        return self._begin(local, False)()

    def start(self, local: Tensor) -> Callable[[], Tensor]:
        return self._begin(local, True)

    def _begin(self, local: Tensor, async_op: bool) -> Callable[[], Tensor]:
        sent = self.pack(local)
        landed = self.landing(sent)
        return _after(self.communicate(landed, sent, async_op), lambda: self.unpack(landed))

    @property
    @abstractmethod
    def blocks_sent(self) -> int: ...

    @property
    @abstractmethod
    def blocks_landed(self) -> int: ...

    @abstractmethod
    def pack(self, local: Tensor) -> Tensor:
        """The blocks that go out, contiguous."""

    @abstractmethod
    def communicate(self, landed: Tensor, sent: Tensor, async_op: bool) -> Work:
        """The collective, which may write to `sent` too."""

    def unpack(self, landed: Tensor) -> Tensor:
        """The step's result of the blocks that have come in."""
        return landed

    def landing_shape(self, sent: Sequence[int]) -> tuple[int, ...]:
        """That of the blocks that come in for blocks of shape `sent`."""
        return (sent[0] // self.blocks_sent * self.blocks_landed, *sent[1:])

    def landing(self, sent: Tensor) -> Tensor:
        """Memory for the blocks that come in."""
        platform = self.platform
        return platform.empty(self.landing_shape(sent.shape), sent.dtype, platform.device_of(sent))

    @functools.cached_property
    def _source_digits(self) -> list[tuple[int, int]]:
        return self._digits(self.source)

    @functools.cached_property
    def _target_digits(self) -> list[tuple[int, int]]:
        return self._digits(self.target)

    def _digits(self, placements: Placements) -> list[tuple[int, int]]:
        """(dimension, number of parts) for each axis, which cuts one."""
        return [(placements[a].dim, self.mesh.shape[a]) for a in self.axes]  # type: ignore[attr-defined]


class AllGather(Collective):
    """Equal shards, innermost in their dimensions, become whole on every rank of the axes."""

    blocks_sent = 1

    @property
    def blocks_landed(self) -> int:
        return self.group.size

    def pack(self, local: Tensor) -> Tensor:
        return self.platform.contiguous(local)

    def communicate(self, landed: Tensor, sent: Tensor, async_op: bool) -> Work:
        return self.group.all_gather_into(landed, sent, async_op)

    def unpack(self, landed: Tensor) -> Tensor:
        return _digits_to_dims(self.platform, landed, self._source_digits)


class ReduceScatter(Collective):
    """Partial results become equal shards, innermost in their dimensions."""

    blocks_landed = 1

    @property
    def blocks_sent(self) -> int:
        return self.group.size

    def pack(self, local: Tensor) -> Tensor:
        return _dims_to_digits(self.platform, local, self._target_digits)

    def communicate(self, landed: Tensor, sent: Tensor, async_op: bool) -> Work:
        return self.group.reduce_scatter_into(landed, sent, self.op, async_op)


class AllReduce(Collective):
    """Partial results are reduced on every rank of the axes."""

    blocks_sent = blocks_landed = 1

    def pack(self, local: Tensor) -> Tensor:
        return self.platform.contiguous(self.platform.ops.clone(local))

    def landing_shape(self, sent: Sequence[int]) -> tuple[int, ...]:
        return tuple(sent)

    def landing(self, sent: Tensor) -> Tensor:
        return sent

    def communicate(self, landed: Tensor, sent: Tensor, async_op: bool) -> Work:
        return self.group.all_reduce(landed, self.op, async_op)


class AllToAll(Collective):
    """Equal shards of one dimension, innermost there, become equal shards of another, innermost there too."""

    @property
    def blocks_sent(self) -> int:
        return self.mesh.shape[self.axes[0]]

    blocks_landed = blocks_sent

    def pack(self, local: Tensor) -> Tensor:
        return _dims_to_digits(self.platform, local, self._target_digits)

    def communicate(self, landed: Tensor, sent: Tensor, async_op: bool) -> Work:
        n = self.blocks_sent
        rows = (sent.shape[0] // n,) * n
        return self.group.all_to_all_into(landed, sent, rows, rows, async_op)

    def unpack(self, landed: Tensor) -> Tensor:
        return _digits_to_dims(self.platform, landed, self._source_digits)


class Exchange(Step):
    """Each rank receives exactly what it lacks; without axes, a change of the local data alone.

    Args:
        ownership: who holds what before; see there.
    """

    ownership: Ownership

    def run(self, local: Tensor) -> Tensor:
        if not self.axes:
            return self.assemble(local, {})
        platform = self.platform
        sends: list[Tensor | None] = [None] * self.group.size
        receives: list[Tensor | None] = [None] * self.group.size
        for i, message in self.leaving(local):
            sends[i] = message
        received: Received = {}
        device = platform.device_of(local)
        for i, peer, shape in self.arriving:
            received[peer] = receives[i] = platform.empty(shape, local.dtype, device)
        self.group.exchange(sends, receives)
        return self.assemble(local, received)

    def leaving(self, local: Tensor) -> list[tuple[int, Tensor]]:
        """(rank in the group, what it gets), in the group's order."""
        return [(i, self.platform.contiguous(region.of(self.platform, local))) for i, region in self._leaving]

    def start(self, local: Tensor) -> Callable[[], Tensor]:
        """As one variable all-to-all of flat messages, which can go on by itself."""
        if not self.axes:
            return super().start(local)
        platform, group = self.platform, self.group
        leaving, arriving = [0] * group.size, [0] * group.size
        for i, region in self._leaving:
            leaving[i] = math.prod(region.shape)
        for i, _, shape in self.arriving:
            arriving[i] = math.prod(shape)
        flat = platform.empty((sum(arriving),), local.dtype, platform.device_of(local))
        work = group.all_to_all_into(flat, self._flat(local), arriving, leaving, True)
        return _after(work, lambda: self.assemble(local, self._unpacked(flat)))

    def _flat(self, local: Tensor) -> Tensor:
        """All messages that leave, one after the other."""
        platform = self.platform
        messages = [message for _, message in self.leaving(local)]
        if not messages:
            return platform.empty((0,), local.dtype, platform.device_of(local))
        return platform.contiguous(platform.ops.cat([platform.ops.reshape(x, (-1,)) for x in messages], 0))

    def _unpacked(self, flat: Tensor) -> Received:
        platform, passed = self.platform, 0
        received: Received = {}
        for _, peer, shape in self.arriving:
            part = platform.ops.narrow(flat, 0, passed, math.prod(shape))
            received[peer] = platform.ops.reshape(platform.ops.clone(part), shape)
            passed += math.prod(shape)
        return received

    def assemble(self, local: Tensor, received: Received) -> Tensor:
        """The step's result of what has come, by the coordinate that it comes from, and of what stays."""
        platform, messages = self.platform, self._messages
        if messages.own is not None:
            received[self.coordinate] = messages.own.of(platform, local)
        result = messages.recipe.make(platform, received, local)
        if type(messages.recipe) is not Part:
            return result
        # It may be a view of the local tensor, or that itself.
        return compact_copy(platform, result) if self.axes else platform.ops.clone(result)

    @functools.cached_property
    def _messages(self) -> Messages:
        messages = exchange_messages(self.ownership, self.coordinate)
        assert self.axes or not messages.receives, f"{self.source} -> {self.target} needs communication"
        return messages

    @functools.cached_property
    def _leaving(self) -> list[tuple[int, Region]]:
        """(rank in the group, region) in the group's order."""
        return sorted(((self._index[peer], region) for peer, region in self._messages.sends.items()), key=_first)

    @functools.cached_property
    def arriving(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """(rank in the group, its coordinate, shape) in the group's order."""
        return sorted(((self._index[peer], peer, shape) for peer, shape in self._messages.receives.items()), key=_first)

    @functools.cached_property
    def _index(self) -> dict[tuple[int, ...], int]:
        return {member: i for i, member in enumerate(self.mesh.members_over(self.axes))}


class ReduceToOwners(Step):
    """Partial results go to the one rank of the axes that will own them, which sums them up in rank order."""

    ownership: Ownership
    op = "sum"

    def run(self, local: Tensor) -> Tensor:
        platform, rank = self.platform, self.group.rank
        sends = [
            None if region is None else platform.contiguous(region.of(platform, local)) for region in self._regions
        ]
        mine = self._regions[rank]
        shape = (0,) if mine is None else mine.shape
        device = platform.device_of(local)
        receives = [None if mine is None else platform.empty(shape, local.dtype, device) for _ in sends]
        receives[rank], sends[rank] = sends[rank], None
        self.group.exchange(sends, [None if j == rank else x for j, x in enumerate(receives)])
        if mine is None:
            return platform.zeros((), local.dtype, device)
        result = functools.reduce(_reduction(platform, self.op), receives)
        return platform.ops.reshape(result, self._empty_shape) if 0 in shape and 0 in self._empty_shape else result

    @functools.cached_property
    def _empty_shape(self) -> tuple[int, ...]:
        """What the target places here: of an owner of nothing it may have another shape than what it owns."""
        wanted = Ownership(self.ownership.shape, self.ownership.mesh_shape, self.target, self.target)
        held = wanted.source_ranges(self.coordinate)
        return tuple(sum(stop - start for start, stop in ranges) for ranges in held)

    @functools.cached_property
    def _regions(self) -> list[Region | None]:
        regions = reduction_regions(self.ownership, self.coordinate)
        return [regions[member] for member in self.mesh.members_over(self.axes)]


class Scale(Step):
    """Averages become sums, or sums averages: times `up`, divided by `down`."""

    up, down = 1, 1

    def run(self, local: Tensor) -> Tensor:
        platform = self.platform
        if not platform.is_floating(local.dtype):
            raise CapabilityError(
                f"the reduction 'avg' needs a floating-point tensor, got {platform.dtype_name(local.dtype)}; "
                "reduce with 'sum' and divide"
            )
        return scaled(platform, local, self.up, self.down)


def scaled(platform: Platform, x: Tensor, up: int, down: int) -> Tensor:
    if up != 1:
        x = platform.ops.mul(x, up)
    return x if down == 1 else platform.ops.div(x, down)


def _after(work: Work, finish: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def wait() -> Tensor:
        work.wait()
        return finish()

    return wait


def _reduction(platform: Platform, op: str) -> Any:
    ops = platform.ops
    return {"max": ops.maximum, "min": ops.minimum, "product": ops.mul}.get(op, ops.add)


_first = operator.itemgetter(0)


def _digits_to_dims(platform: Platform, blocks: Tensor, digits: Sequence[Any]) -> Tensor:
    """Equal blocks, one after the other in dim 0, put where their digits (dim, number) say."""
    if all(dim == 0 for dim, _ in digits):
        return blocks
    counts = [n for _, n in digits]
    shape = (blocks.shape[0] // math.prod(counts), *blocks.shape[1:])
    x = platform.ops.reshape(blocks, (*counts, *shape))
    order, sizes = [], []
    for dim, size in enumerate(shape):
        mine = [i for i, (d, _) in enumerate(digits) if d == dim]
        order += [*mine, len(counts) + dim]
        sizes.append(size * math.prod(counts[i] for i in mine))
    return platform.contiguous(platform.ops.reshape(platform.ops.permute(x, order), sizes))


def _dims_to_digits(platform: Platform, x: Tensor, digits: Sequence[Any]) -> Tensor:
    """A copy with the blocks at the digits (dim, number) one after the other in dim 0."""
    expanded: list[int] = []
    block: list[int] = []
    where: dict[int, int] = {}
    for dim, size in enumerate(x.shape):
        for i, (d, n) in enumerate(digits):
            if d == dim:
                where[i] = len(expanded)
                expanded.append(n)
                size //= n
        block.append(len(expanded))
        expanded.append(size)
    order = [*(where[i] for i in range(len(digits))), *block]
    num_blocks = math.prod(n for _, n in digits)
    first, *others = (expanded[i] for i in block)
    x = platform.ops.reshape(x, expanded)
    if [i for i in order if expanded[i] > 1] == [i for i in range(len(order)) if expanded[i] > 1]:
        x = platform.ops.clone(x)  # else the permutation copies
    x = platform.contiguous(platform.ops.permute(x, order))
    return platform.ops.reshape(x, (num_blocks * first, *others))
