"""Owner-computes: whole tensors visit one rank each, are worked on there, and go back to where their shards lie.

For work that needs a whole matrix, such as orthogonalisation: it is done once, not on every rank, and spread over
the ranks. All tensors of a mesh travel in two collectives, each element once on the way there.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.exceptions import PlacementError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.tensor_spec import TensorSpec

Tensor = Any
Compute = Callable[[Tensor], Tensor]


def at_owners(locals_: Sequence[Tensor], specs: Sequence[TensorSpec], compute: Compute) -> list[Tensor]:
    """Return the shards of `compute(whole)` for every tensor, each computed by one rank.

    Args:
        locals_: this rank's shards, plain and all of one dtype; specs of the same mesh may mix any placements.
        compute: keeps shape and dtype; not differentiated.

    Returns:
        New shards, in the order given.

    Raises:
        PlacementError: partial tensors.
    """
    by_mesh: dict[DeviceMesh, list[int]] = defaultdict(list)
    for index, spec in enumerate(specs):
        if spec.is_partial:
            raise PlacementError(
                f"tensor {index} is partial ({spec!r}) and has no whole to compute on; reduce it first"
            )
        by_mesh[spec.mesh].append(index)
    results: list[Tensor] = list(locals_)
    for mesh, indices in by_mesh.items():
        if mesh.get_coordinate() is None:
            continue
        trip = _trip(tuple(specs[i] for i in indices))
        platform = mesh.platform
        with platform.no_grad():
            made = _Traveller(platform, trip).run([locals_[i] for i in indices], compute)
        for i, x in zip(indices, made, strict=True):
            results[i] = x
    return results


def assign_owners(costs: Sequence[float], num_owners: int) -> list[int]:
    """Return an owner per task: the dearest first, each to the least loaded (the longest-processing-time rule)."""
    loads = [0.0] * num_owners
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[index] = min(range(num_owners), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += costs[index]
    return owners


Coordinate = tuple[int, ...]
Piece = tuple[int, Coordinate]
"""(tensor, coordinate of the rank that holds the shard)."""


@dataclass(frozen=True)
class _Trip:
    """Owners of a list of tensors, and what this rank sends and gets, by rank of the mesh in its order.

    Attributes:
        leaving: per rank, the tensors whose shard of this rank it needs as owner.
        arriving: per rank, the own tensors of which it sends its shard.
        kept: the tensors that this rank owns.
        owners: per tensor, the owner's position in the mesh.
    """

    specs: tuple[TensorSpec, ...]
    coordinates: tuple[Coordinate, ...]
    me: int
    owners: tuple[int, ...]
    leaving: tuple[tuple[int, ...], ...]
    arriving: tuple[tuple[int, ...], ...]

    @property
    def kept(self) -> list[int]:
        return [index for index, owner in enumerate(self.owners) if owner == self.me]

    def numel(self, tensor: int, position: int) -> int:
        """Return the number of elements of a rank's shard."""
        ranges = self.specs[tensor].ranges(self.coordinates[position])
        return math.prod(sum(stop - start for start, stop in dim) for dim in ranges)


@functools.lru_cache(maxsize=64)
def _trip(specs: tuple[TensorSpec, ...]) -> _Trip:
    mesh = specs[0].mesh
    coordinates = tuple(itertools.product(*map(range, mesh.shape)))
    owners = assign_owners([_cost(spec.shape) for spec in specs], len(coordinates))
    me = coordinates.index(mesh.get_coordinate() or ())
    senders = [
        frozenset(i for i, c in enumerate(coordinates) if _sends(spec, c, coordinates[owner]))
        for spec, owner in zip(specs, owners, strict=True)
    ]
    positions = range(len(coordinates))
    leaving = tuple(tuple(t for t, o in enumerate(owners) if o == rank and me in senders[t]) for rank in positions)
    arriving = tuple(tuple(t for t, o in enumerate(owners) if o == me and rank in senders[t]) for rank in positions)
    return _Trip(specs, coordinates, me, tuple(owners), leaving, arriving)


def _cost(shape: tuple[int, ...]) -> float:
    # Of a product of a matrix with itself; what has more dimensions is a stack of matrices.
    return float(math.prod(shape) * min(shape[-2:], default=1))


def _sends(spec: TensorSpec, coordinate: Coordinate, owner: Coordinate) -> bool:
    """Return whether a rank sends its shard: of replicas, the one does that has the owner's place on the replicated
    axes.
    """
    return all(
        not placement.is_replicate() or mine == its
        for placement, mine, its in zip(spec.placements, coordinate, owner, strict=True)
    )


class _Traveller:
    def __init__(self, platform: Platform, trip: _Trip) -> None:
        self.platform, self.ops, self.trip = platform, platform.ops, trip
        mesh = trip.specs[0].mesh
        self.group = mesh.world.group(mesh.ranks())

    def run(self, shards: Sequence[Tensor], compute: Compute) -> list[Tensor]:
        trip, dtype = self.trip, shards[0].dtype
        sizes = [sum(math.prod(shards[t].shape) for t in tensors) for tensors in trip.leaving]
        expected = [sum(trip.numel(t, rank) for t in tensors) for rank, tensors in enumerate(trip.arriving)]
        arrived = self._exchange([shards[t] for tensors in trip.leaving for t in tensors], sizes, expected, dtype)
        wholes = {t: self.platform.zeros(trip.specs[t].shape, dtype) for t in trip.kept}
        for (t, rank), piece in self._pieces(arrived, trip.arriving):
            for box, part in _parts(self, t, rank, piece):
                self.platform.copy_(box(wholes[t]), part)
        done = {t: compute(whole) for t, whole in wholes.items()}
        return self._back(done, shards, dtype)

    def _back(self, done: dict[int, Tensor], shards: Sequence[Tensor], dtype: Any) -> list[Tensor]:
        trip = self.trip
        positions = range(len(trip.coordinates))
        pieces = [self._cut(done[t], t, rank) for rank in positions for t in trip.kept]
        sizes = [sum(trip.numel(t, rank) for t in trip.kept) for rank in positions]
        owned = tuple(tuple(t for t, owner in enumerate(trip.owners) if owner == rank) for rank in positions)
        expected = [sum(trip.numel(t, trip.me) for t in tensors) for tensors in owned]
        arrived = self._exchange(pieces, sizes, expected, dtype)
        results = list(shards)
        start = 0
        for t in itertools.chain.from_iterable(owned):
            count = trip.numel(t, trip.me)
            results[t] = self.ops.reshape(self.ops.narrow(arrived, 0, start, count), tuple(shards[t].shape))
            start += count
        return results

    def _exchange(self, pieces: Sequence[Tensor], sizes: list[int], expected: list[int], dtype: Any) -> Tensor:
        """Run one all-to-all of elements; `pieces` are in rank order."""
        flat = [self.ops.reshape(piece, (-1,)) for piece in pieces if math.prod(piece.shape)]
        sent = self.platform.contiguous(self.ops.cat(flat, 0)) if flat else self.platform.empty((0,), dtype)
        arrived = self.platform.empty((sum(expected),), dtype)
        self.group.all_to_all_into(arrived, sent, expected, sizes)
        return arrived

    def _pieces(self, flat: Tensor, tensors: Sequence[Sequence[int]]) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Yield ((tensor, rank), its elements) of what has arrived."""
        start = 0
        for rank, theirs in enumerate(tensors):
            for t in theirs:
                count = self.trip.numel(t, rank)
                yield (t, rank), self.ops.narrow(flat, 0, start, count)
                start += count

    def _cut(self, whole: Tensor, tensor: int, rank: int) -> Tensor:
        """Return a rank's shard of a whole tensor."""
        for dim, ranges in enumerate(self.trip.specs[tensor].ranges(self.trip.coordinates[rank])):
            parts = [self.ops.narrow(whole, dim, start, stop - start) for start, stop in ranges if start < stop]
            if not parts:
                return self.ops.narrow(whole, dim, 0, 0)
            whole = parts[0] if len(parts) == 1 else self.ops.cat(parts, dim)
        return whole


def _parts(traveller: _Traveller, tensor: int, rank: int, piece: Tensor) -> Iterator[tuple[Compute, Tensor]]:
    """Yield, per contiguous box of a shard, a function to the view of a whole tensor there, and the shard's elements
    for it.
    """
    ops = traveller.ops
    ranges = traveller.trip.specs[tensor].ranges(traveller.trip.coordinates[rank])
    sizes = tuple(sum(stop - start for start, stop in dim) for dim in ranges)
    if not math.prod(sizes):
        return
    shard = ops.reshape(piece, sizes)
    offsets = [itertools.accumulate((stop - start for start, stop in dim), initial=0) for dim in ranges]
    for box in itertools.product(
        *(zip(dim, begins, strict=False) for dim, begins in zip(ranges, offsets, strict=True))
    ):
        part = shard
        for dim, ((start, stop), begin) in enumerate(box):
            part = ops.narrow(part, dim, begin, stop - start)

        def view(whole: Tensor, box: Any = box) -> Tensor:
            for dim, ((start, stop), _) in enumerate(box):
                whole = ops.narrow(whole, dim, start, stop - start)
            return whole

        yield view, part
