"""Redistribution from one mesh to another of the same world, by one direct exchange between the ranks of both.

Before the exchange the source's mesh reduces partial results and replaces ragged shards; after it the target's mesh
does the reverse. All ranks of both meshes take part.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.collectives import exchange_packed
from hp_dtensor.exceptions import PlacementError
from hp_dtensor.redistribute.exchange import (
    FromMessage,
    Received,
    Recipe,
    Region,
    Runs,
    Zeros,
    compact_copy,
    grid_recipe,
    runs_in,
    size_of,
)
from hp_dtensor.redistribute.plan import RedistributePlan, without_data
from hp_dtensor.redistribute.planner import plan_between
from hp_dtensor.redistribute.segments import segments, shardings_of
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, Replicate, Shard
from hp_dtensor.spec.tensor_spec import Ranges, TensorSpec, cached_by_spec, join_ranges

Tensor = Any


@dataclass(frozen=True)
class AcrossPlan:
    """A redistribution from a spec on one mesh to a spec on another, ready to run.

    Attributes:
        before, after: the plans within the source's and within the target's mesh.
        ranks: the global ranks of both meshes, in ascending order.
    """

    source: TensorSpec
    target: TensorSpec
    itemsize: int
    before: RedistributePlan
    after: RedistributePlan
    ranks: tuple[int, ...]

    @property
    def wire_bytes(self) -> float:
        """Bytes sent per rank, the mean over the ranks of both meshes."""
        within = [plan.wire_bytes * plan.source.mesh.size() for plan in (self.before, self.after)]
        return (sum(within) + self._elements * self.itemsize) / len(self.ranks)

    def run(self, local: Tensor) -> Tensor:
        """Return this rank's `local` (plain; empty outside the source's mesh) redistributed; differentiable.

        Backward communicates too, so every rank of both meshes must run it.
        """
        if self.source.mesh.world.rank not in self.ranks:
            return local
        platform = self.source.mesh.platform
        if platform.is_meta(local):
            return without_data(platform, local, self.target.local_shape)
        # The exchange sends each element from one owner and sums nothing, so its dual is the exchange in the other
        # direction. Reductions and copies are in the plans before and after, which have duals of their own.
        exchanged = platform.linear_map(self.before.run(local), self._exchange, lambda grad: self._backward(grad))
        return self.after.run(exchanged)

    @functools.cached_property
    def _backward(self) -> Callable[[Tensor], Tensor]:
        return plan_across(self.after.source, self.before.target, self.itemsize)._exchange

    def _exchange(self, local: Tensor) -> Tensor:
        platform, group = self.source.mesh.platform, self.source.mesh.world.group(self.ranks)
        sends = [[] if region is None else [region.of(platform, local)] for region in self._sends]
        shapes = [[self._receives[rank].shape] if rank in self._receives else [] for rank in range(group.size)]
        arrived = exchange_packed(group, sends, shapes, local.dtype, platform.device_of(local))
        received: Received = {rank: each[0] for rank, each in enumerate(arrived) if each}
        return compact_copy(platform, self._recipe.make(platform, received, local))

    @functools.cached_property
    def _recipe(self) -> Recipe:
        """The assembly of the result: messages fill a grid, as all owners split a dimension at the same indices."""
        shape = self.after.source.local_shape
        # No message is received, and the grid would have no cell.
        if 0 in shape:
            return Zeros(shape)
        owners = {region.runs: rank for rank, region in self._receives.items()}
        runs_by_dim = [
            sorted((run, runs) for runs in {regions[dim] for regions in owners} for run in runs)
            for dim in range(len(shape))
        ]
        return grid_recipe(runs_by_dim, functools.partial(_cell_recipe, owners))

    @functools.cached_property
    def _sends(self) -> list[Region | None]:
        """The region of this rank's local tensor for each rank of the group, or None."""
        source, me = self.before.target, self.source.mesh.world.rank
        coordinate = source.mesh.get_coordinate()
        result: list[Region | None] = [None] * len(self.ranks)
        if coordinate is None:
            return result
        held = source.ranges()
        for receiver, wanted in self._target_ranges.items():
            common = tuple(_common(a, b) for a, b in zip(wanted, held, strict=True))
            if all(common) and me == self._sender(receiver, coordinate):
                runs = tuple(runs_in(a, b) for a, b in zip(common, held, strict=True))
                result[self._group_ranks[receiver]] = Region(runs, [size_of(each) for each in held])
        return result

    @functools.cached_property
    def _receives(self) -> dict[int, Region]:
        """The regions of this rank's result, by the group rank of their sender."""
        me = self.source.mesh.world.rank
        wanted = self._target_ranges.get(me)
        result: dict[int, Region] = {}
        for coordinate, held in self._owners if wanted is not None else ():
            assert wanted is not None
            common = tuple(_common(a, b) for a, b in zip(wanted, held, strict=True))
            if all(common):
                runs = tuple(runs_in(a, b) for a, b in zip(common, wanted, strict=True))
                sizes = [size_of(each) for each in wanted]
                result[self._group_ranks[self._sender(me, coordinate)]] = Region(runs, sizes)
        return result

    @functools.cached_property
    def _elements(self) -> int:
        """Number of elements that all ranks together receive from others."""
        total = 0
        for receiver, wanted in self._target_ranges.items():
            # Every element of the source has one owner. A rank receives it from another one unless it holds it itself.
            total += math.prod(map(size_of, wanted))
            if receiver in self._source_ranges:
                held = self._source_ranges[receiver]
                total -= math.prod(size_of(_common(a, b)) for a, b in zip(wanted, held, strict=True))
        return total

    @functools.cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        """Global rank -> its coordinate in the source's mesh."""
        mesh = self.source.mesh
        return {mesh.rank_at(where): where for where in itertools.product(*map(range, mesh.shape))}

    @functools.cached_property
    def _group_ranks(self) -> dict[int, int]:
        """Global rank -> its rank in the group of the exchange."""
        return {rank: i for i, rank in enumerate(self.ranks)}

    @functools.cached_property
    def _target_ranges(self) -> dict[int, tuple[Ranges, ...]]:
        """Global rank -> the index ranges that it will hold after the exchange, for ranks that will hold elements."""
        return {rank: ranges for rank, ranges in _ranges_by_rank(self.after.source).items() if all(ranges)}

    @functools.cached_property
    def _source_ranges(self) -> dict[int, tuple[Ranges, ...]]:
        """Global rank -> the index ranges that it holds before the exchange."""
        return _ranges_by_rank(self.before.target)

    @functools.cached_property
    def _owners(self) -> list[tuple[tuple[int, ...], tuple[Ranges, ...]]]:
        """The distinct shards of the source: (coordinate of the first replica, index ranges)."""
        spec = self.before.target
        choices = [
            range(n) if p.is_shard() else range(1) for n, p in zip(spec.mesh.shape, spec.placements, strict=True)
        ]
        return [(where, self._source_ranges[spec.mesh.rank_at(where)]) for where in itertools.product(*choices)]

    def _sender(self, receiver: int, owner: Sequence[int]) -> int:
        """Return the rank that sends `receiver` the shard of `owner`: itself if it has it, else a replica in turns."""
        spec = self.before.target
        replicated = [axis for axis, placement in enumerate(spec.placements) if placement.is_replicate()]
        own = self._coordinates.get(receiver)
        if own is not None and all(axis in replicated or own[axis] == c for axis, c in enumerate(owner)):
            return receiver
        # Sender and receiver compute the same rank, and the receivers are spread over the replicas.
        turn, where = self._group_ranks[receiver], list(owner)
        for axis in reversed(replicated):
            turn, where[axis] = divmod(turn, spec.mesh.shape[axis])
        return spec.mesh.rank_at(where)

    def __str__(self) -> str:
        meshes = f"{self.source.mesh.describe()} -> {self.target.mesh.describe()}"
        return (
            f"{meshes}: {self.wire_bytes:.0f} bytes per rank\n{self.before}\n"
            f"exchange between {len(self.ranks)} ranks: {self._elements * self.itemsize / len(self.ranks):.0f} bytes\n"
            f"{self.after}"
        )


@cached_by_spec(maxsize=256)
def plan_across(source: TensorSpec, target: TensorSpec, itemsize: int = 4) -> AcrossPlan:
    """Return the plan from one mesh to another of the same world. Plans are cached.

    Planning and the first run take time linear in the number of ranks of both meshes.

    Raises:
        PlacementError: different shapes, or meshes of different worlds.
    """
    if source.shape != target.shape:
        raise PlacementError(f"cannot redistribute between shapes: {list(source.shape)} -> {list(target.shape)}")
    if source.mesh.world is not target.mesh.world:
        raise PlacementError(
            f"cannot redistribute between worlds: {source.mesh.describe()} -> {target.mesh.describe()}"
        )
    before = plan_between(source, _exchangeable(source, divide=True), itemsize)
    after = plan_between(_exchangeable(target, divide=False), target, itemsize)
    ranks = tuple(sorted({*source.mesh.ranks(), *target.mesh.ranks()}))
    return AcrossPlan(source, target, itemsize, before, after, ranks)


def _exchangeable(spec: TensorSpec, divide: bool) -> TensorSpec:
    """Return `spec` without ragged shards and partial results, which become even shards (`divide`) or replicas."""
    result: list[Placement] = []
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, RaggedShard):
            result.append(Shard(placement.dim))
        elif isinstance(placement, Partial):
            ranks = spec.mesh.shape[axis]
            even = [
                Shard(dim)
                for dim, size in enumerate(spec.shape)
                if divide and size % ranks == 0 and not any(p.is_shard(dim) for p in spec.placements)
            ]
            result.append(even[0] if even else Replicate())
        else:
            result.append(placement)
    return spec.with_placements(result)


def _ranges_by_rank(spec: TensorSpec) -> dict[int, tuple[Ranges, ...]]:
    """Return the index ranges of every global rank of the mesh, per dimension; empty where it holds nothing."""
    by_dim = []
    for dim, size in enumerate(spec.shape):
        shardings = shardings_of(spec.placements, dim)
        held: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        # Once for all ranks: `spec.ranges` divides the dimension again for each of them.
        for start, stop, coordinates in segments(size, shardings, spec.mesh.shape):
            held[coordinates].append((start, stop))
        by_dim.append(([axis for axis, _ in shardings], {where: join_ranges(held[where]) for where in held}))
    return {
        spec.mesh.rank_at(where): tuple(ranges.get(tuple([where[a] for a in axes]), ()) for axes, ranges in by_dim)
        for where in itertools.product(*map(range, spec.mesh.shape))
    }


def _common(first: Ranges, second: Ranges) -> Ranges:
    """Return the intersection of two lists of ascending ranges."""
    pairs = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return tuple((start, stop) for start, stop in pairs if start < stop)


def _cell_recipe(owners: dict[tuple[Runs, ...], int], chosen: tuple[tuple[tuple[int, int], Runs], ...]) -> Recipe:
    """Return the recipe for one cell of the result, given by one run per dimension: a region of one message."""
    within = [((sum(n for start, n in runs if start < offset), length),) for (offset, length), runs in chosen]
    sizes = [sum(length for _, length in runs) for _, runs in chosen]
    return FromMessage(owners[tuple(runs for _, runs in chosen)], Region(within, sizes))
