"""Steps in which each rank sends other ranks exactly what they lack."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute.messages import Messages, exchange_messages, reduction_regions
from hp_dtensor.redistribute.ownership import Ownership
from hp_dtensor.redistribute.regions import Part, Received, Region, compact_copy
from hp_dtensor.redistribute.step import Step, after

Tensor = Any


class Exchange(Step):
    """Exchange in which each rank receives exactly what it lacks; without axes, a change of the local data alone.

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
        """Return (rank in the group, its message) in the group's order."""
        return [(i, self.platform.contiguous(region.of(self.platform, local))) for i, region in self._leaving]

    def start(self, local: Tensor) -> Callable[[], Tensor]:
        """Begin one variable all-to-all of flat messages, which can go on by itself."""
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
        return after(work, lambda: self.assemble(local, self._unpacked(flat)))

    def _flat(self, local: Tensor) -> Tensor:
        """Return all messages that leave, one after the other in one dimension."""
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
            # Cloned: a result that is one message would else keep the whole buffer of all messages alive.
            received[peer] = platform.ops.reshape(platform.ops.clone(part), shape)
            passed += math.prod(shape)
        return received

    def assemble(self, local: Tensor, received: Received) -> Tensor:
        """Return the step's result from the messages, by their senders' coordinates, and from what stays here."""
        platform, messages = self.platform, self._messages
        # What stays here is not sent to itself, but takes its place in the recipe like a message.
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
        """Pairs (rank in the group, region of the local tensor) in the group's order."""
        return sorted(((self._index[peer], region) for peer, region in self._messages.sends.items()), key=_first)

    @functools.cached_property
    def arriving(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Triples (rank in the group, its coordinate, shape of its message) in the group's order."""
        return sorted(((self._index[peer], peer, shape) for peer, shape in self._messages.receives.items()), key=_first)

    @functools.cached_property
    def _index(self) -> dict[tuple[int, ...], int]:
        return {member: i for i, member in enumerate(self.mesh.members_over(self.axes))}


class ReduceToOwners(Step):
    """Reduction of partial results by the one rank of the axes that will own them, in rank order."""

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
        # This rank's own part is put among those of the others, so that the sum goes in rank order on every owner, and
        # a run can be repeated bit by bit.
        receives[rank], sends[rank] = sends[rank], None
        self.group.exchange(sends, [None if j == rank else x for j, x in enumerate(receives)])
        # A rank that owns nothing has taken part by sending; the next step does not look at what it holds.
        if mine is None:
            return platform.zeros((), local.dtype, device)
        result = functools.reduce(_reduction(platform, self.op), receives)
        return platform.ops.reshape(result, self._empty_shape) if 0 in shape and 0 in self._empty_shape else result

    @functools.cached_property
    def _empty_shape(self) -> tuple[int, ...]:
        """Shape of what the target places on this rank, which for an owner of nothing may differ from what it owns."""
        wanted = Ownership(self.ownership.shape, self.ownership.mesh_shape, self.target, self.target)
        held = wanted.source_ranges(self.coordinate)
        return tuple(sum(stop - start for start, stop in ranges) for ranges in held)

    @functools.cached_property
    def _regions(self) -> list[Region | None]:
        regions = reduction_regions(self.ownership, self.coordinate)
        return [regions[member] for member in self.mesh.members_over(self.axes)]


def _reduction(platform: Platform, op: str) -> Any:
    ops = platform.ops
    return {"max": ops.maximum, "min": ops.minimum, "product": ops.mul}.get(op, ops.add)


_first = operator.itemgetter(0)
