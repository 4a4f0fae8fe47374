"""Gradient clipping over any mix of layouts and meshes, with one reduction.

Owner-computes: whole tensors visit one rank each, are worked on there, and go back to where their shards lie.

For work that needs a whole matrix, such as orthogonalisation: it is done once, not on every rank, and spread over
the ranks. All tensors of a mesh travel in two collectives, each element once on the way there.

Muon for matrices of any layout (Jordan et al., https://kellerjordan.github.io/posts/muon/).

Momentum is kept and updated on local shards. A matrix is orthogonalised by one rank, its owner, so that no rank
does another's work and sharded training gives the single-device numbers bit for bit. A parameter of more dimensions,
such as the weights of experts, is a stack of matrices. Where every rank holds whole ones, it works on its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import World, current_world
from hp_dtensor.exceptions import MeshError, PlacementError, RankMismatchError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.conversions import local_of, zeros_placed_like
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    platform: Platform | None = None,
    copies_over: DeviceMesh | None = None,
    not_counted: Iterable[Tensor] = (),
) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`, and return the norm before that.

    Every rank of the world calls it with its own shards. Plain parameters count as equal on all ranks, and a
    DTensor on a smaller mesh, such as `mesh["tp"]`, as one of equal ones that tile the world. One all-reduce of
    three numbers; no host synchronization on devices that have a queue.

    Args:
        norm_type: 2 or infinity.
        copies_over: the mesh (seen from this rank) of the ranks that have the same parameters, where others have
            different ones, such as the ranks of one pipeline stage; default: all ranks.
        not_counted: those of `parameters` that other ranks count, such as copies of tied weights; they are scaled too.

    Returns:
        The total norm, a plain 0-d float32 tensor, the same on every rank.

    Raises:
        MeshError: a parameter whose mesh does not tile those ranks, or that this rank is outside of.
        RankMismatchError: without `copies_over`, ranks have gradients of different shapes, so that each would
            count as copied to ranks that have it not. On devices with a queue the norm is NaN instead.

    Example:
        >>> def program():
        ...     weight = platform.Parameter(ones(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)]))
        ...     platform.backward(platform.ops.sum(weight))
        ...     return round(float(platform.to_numpy(clip_grad_norm_([weight], 1.0))), 4)
        >>> run_ranks(program, 2)  # of all four elements
        [2.0, 2.0]
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"clip_grad_norm_: norm_type must be 2 or inf, got {norm_type}")
    found = list(parameters)
    platform = platform if platform is not None else _platform_of(found)
    elsewhere = {id(parameter) for parameter in not_counted}
    pairs = [(id(p), grad) for p in found if (grad := platform.get_grad(p)) is not None]
    grads = [grad for _, grad in pairs]
    total = total_norm([grad for key, grad in pairs if key not in elsewhere], norm_type, platform, copies_over)
    factor = platform.ops.clamp(platform.ops.div(float(max_norm), platform.ops.add(total, 1e-6)), max=1.0)
    with platform.no_grad():
        platform.scale_([local_of(platform, grad) for grad in grads], factor)
    return total


def total_norm(
    tensors: Iterable[Tensor], norm_type: float, platform: Platform, copies_over: DeviceMesh | None = None
) -> Tensor:
    """Return the joint norm of tensors of any layouts; see `clip_grad_norm_`."""
    ops, world = platform.ops, current_world(platform)
    holders = world.size if copies_over is None else copies_over.size()
    tensors = list(tensors)
    _check_tiling(tensors, holders, world)
    with platform.no_grad():
        if norm_type == math.inf:
            return _reduce(platform, world, _largest(platform, tensors), "max", tensors, copies_over)
        total = platform.zeros((), platform.dtype("float32"))
        for distinct, locals_ in _by_distinct_shards(platform, tensors).items():
            total = ops.add(total, ops.mul(platform.sum_of_squares(locals_), distinct / holders))
        return ops.sqrt(_reduce(platform, world, total, "sum", tensors, copies_over))


def _check_tiling(tensors: Iterable[Tensor], holders: int, world: World) -> None:
    """Refuse meshes of which no number of equal ones makes up the ranks that have the same parameters."""
    meshes = dict.fromkeys(x.spec.mesh for x in tensors if isinstance(x, DTensor))
    problems = [
        f"{mesh.describe()}" + (" does not hold this rank" if mesh.get_coordinate() is None else "")
        for mesh in meshes
        if mesh.get_coordinate() is None or holders % mesh.size()
    ]
    if problems:
        raise MeshError(
            f"clip_grad_norm_ on rank {world.rank}: parameters lie on meshes of which copies cannot make up {holders} "
            f"ranks: {', '.join(problems)}. Pass a rank's own parameters only, and copies_over=, the mesh of the ranks "
            "that have the same ones."
        )


def _by_distinct_shards(platform: Platform, tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """Group local shards by the number of different shards that exist: each is held by holders / number ranks."""
    groups: dict[int, list[Tensor]] = defaultdict(list)
    for x in tensors:
        distinct = x.spec.mesh.size() // x.spec.num_replicas() if isinstance(x, DTensor) else 1
        groups[distinct].append(local_of(platform, x))
    return dict(groups)


def _largest(platform: Platform, tensors: Iterable[Tensor]) -> Tensor:
    ops = platform.ops
    largest = platform.zeros((), platform.dtype("float32"))
    for x in tensors:
        local = local_of(platform, x)
        if math.prod(local.shape):
            peak = ops.amax(ops.reshape(ops.abs(local), (-1,)), 0)
            largest = ops.maximum(largest, ops.cast(peak, largest.dtype))
    return largest


def _reduce(
    platform: Platform, world: World, x: Tensor, op: str, tensors: Sequence[Tensor], copies_over: DeviceMesh | None
) -> Tensor:
    """Return `x` reduced over all ranks, together with two numbers by which ranks know that they reduce the same."""
    mark = 0.0 if copies_over is not None else _mark(tensors, world.size)
    marks = (mark, -mark) if op == "max" else (mark, mark * mark)
    both = platform.ops.cat([platform.ops.reshape(x, (1,)), _on_device(platform, x, marks)], 0)
    world.all.all_reduce(both, op)
    total, first, second = (platform.ops.reshape(part, ()) for part in platform.ops.split(both, [1, 1, 1], 0))
    if op == "max":
        same = platform.ops.eq(first, platform.ops.neg(second))
    else:
        # The mean of the squares is the square of the mean where all are equal; whole numbers, so exact.
        same = platform.ops.eq(platform.ops.mul(second, float(world.size)), platform.ops.mul(first, first))
    if str(platform.device_of(both)).startswith("cpu") and not bool(platform.to_numpy(same)):
        raise RankMismatchError(
            f"clip_grad_norm_: rank {world.rank} has {len(tensors)} gradients whose number or shapes are not those of "
            "the other ranks. Where ranks hold different modules (pipeline stages), pass the mesh of those that hold "
            "the same ones as copies_over; otherwise give every rank the same parameters, and unused ones zeros"
        )
    return platform.ops.where(same, total, platform.ops.mul(total, math.nan))


def _on_device(platform: Platform, like: Tensor, values: Sequence[float]) -> Tensor:
    return platform.from_numpy(numpy.array(values, numpy.float32), platform.device_of(like))


def _mark(tensors: Sequence[Tensor], size: int) -> float:
    """Return a small whole number that depends on the tensors' global shapes and the sizes of their meshes.

    Sums of `size` of its squares are exact in float32.
    """
    # Hashes of tuples of integers are the same in every process.
    facts = tuple((tuple(x.shape), x.spec.mesh.shape if isinstance(x, DTensor) else ()) for x in tensors)
    return float(hash(facts) % max(2, math.isqrt((1 << 24) // size)))


def _platform_of(parameters: list[Tensor]) -> Platform:
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            return parameter.spec.mesh.platform
    return get_platform()


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


@dataclass(frozen=True, kw_only=True)
class MuonOptions:
    """Options of `Muon`.

    Attributes:
        momentum, nesterov: of the running mean of gradients.
        weight_decay: decoupled, times the learning rate.
        steps, coefficients, eps: of the Newton-Schulz iteration.
        match_rms: scale updates to the size of AdamW's (arXiv 2502.16982); else by the root of rows per column.
        compute_dtype: of the iteration and of what travels.

    Example:
        >>> MuonOptions(momentum=0.9).steps
        5
    """

    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    steps: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    match_rms: bool = False
    compute_dtype: str = "bfloat16"

    def scale(self, shape: tuple[int, ...]) -> float:
        """Return the factor of the learning rate for a matrix, or a stack of matrices, of `shape`."""
        rows, columns = shape[-2:]
        return 0.2 * math.sqrt(max(rows, columns)) if self.match_rms else math.sqrt(max(1.0, rows / columns))


class Muon:
    """Optimizer of matrices: parameters of two dimensions or stacks of them, DTensors not partial, or plain.

    Every rank of the parameters' meshes calls `step`, which communicates: two all-to-alls per mesh, for everything but
    stacks that are cut between their matrices alone. Other stacks visit one owner as a whole.

    Args:
        parameters: (name, parameter).
        platform: default: that of a DTensor among them, else the selected one.

    Attributes:
        num_steps: updates done.

    Raises:
        PlacementError: parameters that are no matrices, or partial; all of them listed.

    Example:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     weight = platform.Parameter(randn(6, 4, device_mesh=mesh, placements=[Shard(0)]))
        ...     optimizer = Muon([("weight", weight)], MuonOptions(weight_decay=0.0))
        ...     platform.backward(platform.ops.sum(platform.ops.mul(weight, weight)))
        ...     optimizer.step(0.1)
        ...     return weight.placements
        >>> run_ranks(program, 2)[0]
        (Shard(0),)
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        options: MuonOptions | None = None,
        *,
        platform: Platform | None = None,
    ) -> None:
        self.num_steps = 0
        self.options = options if options is not None else MuonOptions()
        self._parameters = dict(parameters)
        _check(self._parameters)
        self.platform = platform if platform is not None else _platform_of_weights(self._parameters.values())
        with self.platform.no_grad():
            self._momenta = {name: zeros_placed_like(self.platform, x) for name, x in self._parameters.items()}

    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient."""
        platform = self.platform
        grads = {name: grad for name, x in self._parameters.items() if (grad := platform.get_grad(x)) is not None}
        with platform.no_grad():
            directions = {name: self._direction(name, platform.unwrap(grad)) for name, grad in grads.items()}
            for name, update in self._orthogonalised(directions).items():
                self._apply(name, update, learning_rate)
        self.num_steps += 1

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters.values():
            self.platform.set_grad(parameter, None)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the momentum of each parameter by name, laid out as the parameter."""
        return {name: {"momentum_buffer": momentum} for name, momentum in self._momenta.items()}

    def _direction(self, name: str, grad: Tensor) -> Tensor:
        """Return the momentum with `grad` taken in, on the shard, in the dtype of the iteration."""
        ops, options = self.platform.ops, self.options
        momentum = self.platform.unwrap(self._momenta[name])
        new = _mix(ops, momentum, grad, 1.0 - options.momentum)
        self.platform.copy_(momentum, new)
        direction = _mix(ops, grad, new, options.momentum) if options.nesterov else new
        return ops.cast(direction, self.platform.dtype(options.compute_dtype))

    def _orthogonalised(self, directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = [name for name in directions if _travels(self._parameters[name])]
        specs = [self._parameters[name].spec for name in names]
        shards = at_owners([directions[name] for name in names], specs, self._newton_schulz)
        updates = dict(zip(names, shards, strict=True))
        return {name: updates[name] if name in updates else self._newton_schulz(x) for name, x in directions.items()}

    def _newton_schulz(self, matrix: Tensor) -> Tensor:
        """Return the nearest matrix with singular values near one, or those of a stack."""
        shape, ops, (a, b, c) = tuple(matrix.shape), self.platform.ops, self.options.coefficients
        if not math.prod(shape):
            return matrix
        row, column = len(shape) - 2, len(shape) - 1
        # Of a matrix and its transpose, the wide one has the smaller Gram matrix.
        tall = shape[row] > shape[column]
        x = ops.transpose(matrix, row, column) if tall else matrix
        # The Frobenius norm bounds the largest singular value, which may not be above 1 for the iteration to converge.
        squares = ops.square(ops.cast(x, self.platform.dtype("float32")))
        norm = ops.sqrt(ops.sum(ops.sum(squares, column, True), row, True))
        x = ops.div(x, ops.cast(ops.clamp(norm, min=self.options.eps), x.dtype))
        for _ in range(self.options.steps):
            # x <- a x + (b A + c A A) x with A = x x^T: a polynomial of fifth degree of the singular values.
            gram = ops.matmul(x, ops.transpose(x, row, column))
            polynomial = ops.add(ops.mul(gram, b), ops.mul(ops.matmul(gram, gram), c))
            x = ops.add(ops.mul(x, a), ops.matmul(polynomial, x))
        return ops.transpose(x, row, column) if tall else x

    def _apply(self, name: str, update: Tensor, learning_rate: float) -> None:
        ops, parameter = self.platform.ops, self._parameters[name]
        local = self.platform.unwrap(parameter)
        decayed = ops.mul(local, 1.0 - learning_rate * self.options.weight_decay)
        scaled = ops.mul(ops.cast(update, local.dtype), learning_rate * self.options.scale(tuple(parameter.shape)))
        self.platform.copy_(local, ops.sub(decayed, scaled))


def _travels(parameter: Tensor) -> bool:
    """Tell whether a parameter must be put together somewhere: ranks hold parts of its matrices."""
    if not isinstance(parameter, DTensor):
        return False
    spec = parameter.spec
    cut = [getattr(placement, "dim", None) for placement in spec.placements]
    return spec.ndim == 2 or any(dim is not None and dim >= spec.ndim - 2 for dim in cut)


def _mix(ops: Any, x: Tensor, y: Tensor, share: float) -> Tensor:
    """Return x + share * (y - x)."""
    return ops.add(x, ops.mul(ops.sub(y, x), share))


def _check(parameters: Mapping[str, Tensor]) -> None:
    problems = []
    for name, x in parameters.items():
        if len(x.shape) < 2:
            problems.append(f"{name} has shape {list(x.shape)}")
        elif isinstance(x, DTensor) and x.spec.is_partial:
            problems.append(f"{name} is partial: {x.spec.describe_placements()}")
    if problems:
        raise PlacementError(f"Muon takes matrices and stacks of them, sharded or replicated; {'; '.join(problems)}")


def _platform_of_weights(parameters: Iterable[Tensor]) -> Platform:
    return next((x.device_mesh.platform for x in parameters if isinstance(x, DTensor)), None) or get_platform()
