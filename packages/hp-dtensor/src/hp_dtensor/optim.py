"""Gradient clipping, owner computation and the Muon optimizer, for parameters with any placements.

Clipping sums over all shards, each counted once, in one reduction for all meshes.

`at_owners` is for computations on full matrices, such as orthogonalisation. Each matrix is computed by one rank, its
owner; matrices are spread over the ranks. All shards of a mesh are sent to the owners in one all-to-all and the results
back in another.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) updates the momentum on local shards and orthogonalises
it at the owners, so sharded training equals training on a single device bit for bit. A parameter with more dimensions,
such as the weights of experts, is a stack of matrices. If its matrices are not sharded, each rank computes its own.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import World, current_world
from hp_dtensor.exceptions import MeshError, PlacementError, RankMismatchError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.spec.tensor_spec import TensorSpec, cached_by_spec
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
    """Scale all gradients so that their total norm is at most `max_norm`, and return the norm before scaling.

    Every rank of the world makes the call with its own shards. Plain parameters count as equal on all ranks. A DTensor
    on a smaller mesh, such as `mesh["tp"]`, counts as replicated on the other meshes of this size. Communicates three
    numbers in one all-reduce, and does not synchronize the device with the host.

    Args:
        norm_type: 2 or infinity.
        platform: default: that of a DTensor among the parameters, else the selected one.
        copies_over: the mesh of the ranks that hold the same parameters as this rank, such as the ranks of its pipeline
            stage; default: all ranks.
        not_counted: those of `parameters` that other ranks count, such as copies of tied weights. They are scaled too.

    Returns:
        The total norm, a plain 0-d float32 tensor, equal on every rank.

    Raises:
        MeshError: the size of a parameter's mesh does not divide the number of ranks with the same parameters, or this
            rank is outside that mesh.
        RankMismatchError: without `copies_over`, ranks have gradients of different shapes, which would be counted
            wrongly. On an asynchronous device the norm is NaN instead, because reading the result would synchronize.

    Examples:
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
    # By identity: `==` compares the elements of tensors.
    excluded = {id(parameter) for parameter in not_counted}
    pairs = [(id(p), grad) for p in found if (grad := platform.get_grad(p)) is not None]
    grads = [grad for _, grad in pairs]
    total = total_norm([grad for key, grad in pairs if key not in excluded], norm_type, platform, copies_over)
    # Gradients are scaled by 1 too: to skip it, the host would have to wait for the norm. 1e-6 as in torch.
    factor = platform.ops.clamp(platform.ops.div(float(max_norm), platform.ops.add(total, 1e-6)), max=1.0)
    with platform.no_grad():
        platform.scale_([local_of(platform, grad) for grad in grads], factor)
    return total


def total_norm(
    tensors: Iterable[Tensor], norm_type: float, platform: Platform, copies_over: DeviceMesh | None = None
) -> Tensor:
    """Return the total norm of tensors with any placements; see `clip_grad_norm_`."""
    ops, world = platform.ops, current_world(platform)
    holders = world.size if copies_over is None else copies_over.size()
    tensors = list(tensors)
    _check_tiling(tensors, holders, world)
    with platform.no_grad():
        if norm_type == math.inf:
            return _reduce(platform, world, _largest(platform, tensors), "max", tensors, copies_over)
        total = platform.zeros((), platform.dtype("float32"))
        groups: dict[int, list[Tensor]] = defaultdict(list)
        for x in tensors:
            distinct = x.spec.mesh.size() // x.spec.num_replicas() if isinstance(x, DTensor) else 1
            groups[distinct].append(local_of(platform, x))
        for distinct, locals_ in groups.items():
            # The reduction below sums every shard once per replica; this factor makes it count once.
            total = ops.add(total, ops.mul(platform.sum_of_squares(locals_), distinct / holders))
        return ops.sqrt(_reduce(platform, world, total, "sum", tensors, copies_over))


def _check_tiling(tensors: Iterable[Tensor], holders: int, world: World) -> None:
    """Check that the size of each mesh divides `holders`, the number of ranks with the same parameters."""
    meshes = dict.fromkeys(x.spec.mesh for x in tensors if isinstance(x, DTensor))
    problems = [
        f"{mesh.describe()}" + (" does not hold this rank" if mesh.get_coordinate() is None else "")
        for mesh in meshes
        if mesh.get_coordinate() is None or holders % mesh.size()
    ]
    if problems:
        raise MeshError(
            f"clip_grad_norm_ on rank {world.rank}: parameters are on meshes whose sizes do not divide {holders} "
            f"ranks: {', '.join(problems)}. Pass this rank's own parameters only, and the mesh of the ranks with the "
            "same parameters as copies_over."
        )


def _largest(platform: Platform, tensors: Iterable[Tensor]) -> Tensor:
    """Return the largest absolute value of this rank's shards, a 0-d float32 tensor; 0 without elements."""
    ops = platform.ops
    largest = platform.zeros((), platform.dtype("float32"))
    for x in tensors:
        local = local_of(platform, x)
        # An empty shard has no maximum.
        if math.prod(local.shape):
            peak = ops.amax(ops.reshape(ops.abs(local), (-1,)), 0)
            largest = ops.maximum(largest, ops.cast(peak, largest.dtype))
    return largest


def _reduce(
    platform: Platform, world: World, x: Tensor, op: str, tensors: Sequence[Tensor], copies_over: DeviceMesh | None
) -> Tensor:
    """Return the 0-d `x` reduced over all ranks by `op`, after checking that all have `tensors` of the same shapes.

    The check takes two more numbers in the same all-reduce: each rank adds a hash of its shapes. With `copies_over`
    shapes may differ, and are not checked.
    """
    code = 0.0 if copies_over is not None else _shape_code(tensors, world.size)
    # The maximum of codes and that of their negatives, the minimum, are opposite only if all codes are equal.
    codes = (code, -code) if op == "max" else (code, code * code)
    on_device = platform.from_numpy(numpy.array(codes, numpy.float32), platform.device_of(x))
    packed = platform.ops.cat([platform.ops.reshape(x, (1,)), on_device], 0)
    world.all.all_reduce(packed, op)
    total, first, second = (platform.ops.reshape(each, ()) for each in platform.ops.split(packed, [1, 1, 1], 0))
    if op == "max":
        same = platform.ops.eq(first, platform.ops.neg(second))
    else:
        # The mean of the squares equals the square of the mean only if all codes are equal. Both sums are exact, and
        # for equal codes both products round the same integer.
        same = platform.ops.eq(platform.ops.mul(second, float(world.size)), platform.ops.mul(first, first))
    if str(platform.device_of(packed)).startswith("cpu") and not bool(platform.to_numpy(same)):
        raise RankMismatchError(
            f"clip_grad_norm_: rank {world.rank} has {len(tensors)} gradients whose number or shapes differ from "
            "the other ranks. If ranks hold different modules (pipeline stages), pass the mesh of the ranks with the "
            "same ones as copies_over; otherwise pass the same parameters on every rank, with zeros for unused ones"
        )
    return platform.ops.where(same, total, platform.ops.mul(total, math.nan))


def _shape_code(tensors: Sequence[Tensor], size: int) -> float:
    """Return a small integer that depends on the global shapes of the tensors and on their meshes.

    The sum of `size` squares of such integers is exact in float32.
    """
    # Unlike those of strings, hashes of tuples of integers are equal in all processes.
    facts = tuple((tuple(x.shape), x.spec.mesh.shape if isinstance(x, DTensor) else ()) for x in tensors)
    return float(hash(facts) % max(2, math.isqrt((1 << 24) // size)))


def _platform_of(parameters: list[Tensor]) -> Platform:
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            return parameter.spec.mesh.platform
    return get_platform()


# Owner computation ----------------------------------------------------------------------------------------

Compute = Callable[[Tensor], Tensor]


def at_owners(locals_: Sequence[Tensor], specs: Sequence[TensorSpec], compute: Compute) -> list[Tensor]:
    """Return this rank's shards of `compute(full tensor)` for every tensor, each computed by one rank.

    Every rank of the tensors' meshes makes the call.

    Args:
        locals_: this rank's shards, plain and all of one dtype.
        specs: the spec of each tensor. Placements may differ.
        compute: function that preserves shape and dtype. Not differentiated.

    Returns:
        The new shards, in the order of `locals_`.

    Raises:
        PlacementError: partial tensors.
    """
    by_mesh: dict[DeviceMesh, list[int]] = defaultdict(list)
    for index, spec in enumerate(specs):
        if spec.is_partial:
            raise PlacementError(
                f"tensor {index} is partial ({spec!r}), not a full tensor to compute on; reduce it first"
            )
        by_mesh[spec.mesh].append(index)
    results: list[Tensor] = list(locals_)
    for mesh, indices in by_mesh.items():
        # This rank holds nothing of these tensors and takes part in no exchange.
        if mesh.get_coordinate() is None:
            continue
        exchange = _owner_exchange(tuple(specs[i] for i in indices))
        with mesh.platform.no_grad():
            computed = exchange.run([locals_[i] for i in indices], compute)
        for i, x in zip(indices, computed, strict=True):
            results[i] = x
    return results


def assign_owners(costs: Sequence[float], num_owners: int) -> list[int]:
    """Return an owner per task: the most expensive first, each to the least loaded (longest-processing-time rule)."""
    loads = [0.0] * num_owners
    owners = [0] * len(costs)
    # Ties are broken by index and rank, so that every rank finds the same owners.
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[index] = min(range(num_owners), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += costs[index]
    return owners


class _OwnerExchange:
    """Sends shards of the tensors of one mesh to their owners, computes there, and sends the results back.

    Ranks are indices in mesh order, tensors are indices into `specs`.

    Attributes:
        me: this rank.
        owned: for each rank, the tensors that it owns.
        outgoing: for each owner, the tensors whose shards this rank sends to it.
        incoming: for each sender, the tensors owned by this rank whose shards it receives from that sender.
    """

    def __init__(self, specs: tuple[TensorSpec, ...]) -> None:
        self.mesh = mesh = specs[0].mesh
        self.specs, self.platform, self.ops = specs, mesh.platform, mesh.platform.ops
        self.coordinates = tuple(itertools.product(*map(range, mesh.shape)))
        self.me = self.coordinates.index(mesh.get_coordinate() or ())
        # Operations of a product of a matrix with its transpose. Outer dimensions are a stack of matrices.
        costs = [float(math.prod(spec.shape) * min(spec.shape[-2:], default=1)) for spec in specs]
        owners = assign_owners(costs, len(self.coordinates))
        self.owned: list[list[int]] = [[] for _ in self.coordinates]
        self.outgoing: list[list[int]] = [[] for _ in self.coordinates]
        self.incoming: list[list[int]] = [[] for _ in self.coordinates]
        for t, owner in enumerate(owners):
            self.owned[owner].append(t)
            if self._sends(t, self.me, owner):
                self.outgoing[owner].append(t)
        for t in self.owned[self.me]:
            for rank in range(len(self.coordinates)):
                if self._sends(t, rank, self.me):
                    self.incoming[rank].append(t)

    def run(self, shards: Sequence[Tensor], compute: Compute) -> list[Tensor]:
        """Return this rank's shards of `compute(full tensor)`."""
        dtype = shards[0].dtype
        received = self._all_to_all(
            [shards[t] for tensors in self.outgoing for t in tensors],
            [sum(math.prod(shards[t].shape) for t in tensors) for tensors in self.outgoing],
            [sum(self._numel(t, rank) for t in tensors) for rank, tensors in enumerate(self.incoming)],
            dtype,
        )
        full = {t: self.platform.zeros(self.specs[t].shape, dtype) for t in self.owned[self.me]}
        start = 0
        for rank, tensors in enumerate(self.incoming):
            for t in tensors:
                count = self._numel(t, rank)
                self._fill(full[t], t, rank, self.ops.narrow(received, 0, start, count))
                start += count
        return self._return_shards({t: compute(x) for t, x in full.items()}, shards, dtype)

    def _return_shards(self, results: dict[int, Tensor], shards: Sequence[Tensor], dtype: Any) -> list[Tensor]:
        """Send the shards of the owners' results to the ranks that hold them; replicas all receive one."""
        ranks, mine = range(len(self.coordinates)), self.owned[self.me]
        received = self._all_to_all(
            [self._shard_of(results[t], t, rank) for rank in ranks for t in mine],
            [sum(self._numel(t, rank) for t in mine) for rank in ranks],
            [sum(self._numel(t, self.me) for t in tensors) for tensors in self.owned],
            dtype,
        )
        new, start = list(shards), 0
        for t in itertools.chain.from_iterable(self.owned):
            count = self._numel(t, self.me)
            new[t] = self.ops.reshape(self.ops.narrow(received, 0, start, count), tuple(shards[t].shape))
            start += count
        return new

    def _all_to_all(self, tensors: Sequence[Tensor], sizes: list[int], expected: list[int], dtype: Any) -> Tensor:
        """Send `tensors`, in the order of their receivers; return the received elements in rank order, flat.

        `sizes` and `expected` are the numbers of elements sent to and received from each rank.
        """
        flat = [self.ops.reshape(x, (-1,)) for x in tensors if math.prod(x.shape)]
        sent = self.platform.contiguous(self.ops.cat(flat, 0)) if flat else self.platform.empty((0,), dtype)
        received = self.platform.empty((sum(expected),), dtype)
        self.mesh.world.group(self.mesh.ranks()).all_to_all_into(received, sent, expected, sizes)
        return received

    def _sends(self, tensor: int, rank: int, owner: int) -> bool:
        """Return whether a rank sends its shard of a tensor to the owner.

        Of several replicas of a shard only one sends: the one whose coordinates on the replicated axes are the owner's.
        """
        triples = zip(self.specs[tensor].placements, self.coordinates[rank], self.coordinates[owner], strict=True)
        return all(not placement.is_replicate() or mine == its for placement, mine, its in triples)

    def _numel(self, tensor: int, rank: int) -> int:
        ranges = self.specs[tensor].ranges(self.coordinates[rank])
        return math.prod(sum(stop - start for start, stop in dim) for dim in ranges)

    def _shard_of(self, full: Tensor, tensor: int, rank: int) -> Tensor:
        """Return a rank's shard of a full tensor."""
        for dim, ranges in enumerate(self.specs[tensor].ranges(self.coordinates[rank])):
            slices = [self.ops.narrow(full, dim, start, stop - start) for start, stop in ranges if start < stop]
            if not slices:
                return self.ops.narrow(full, dim, 0, 0)
            full = slices[0] if len(slices) == 1 else self.ops.cat(slices, dim)
        return full

    def _fill(self, full: Tensor, tensor: int, rank: int, elements: Tensor) -> None:
        """Copy a rank's shard, received as `elements`, into the full tensor."""
        ranges = self.specs[tensor].ranges(self.coordinates[rank])
        sizes = tuple(sum(stop - start for start, stop in dim) for dim in ranges)
        if not math.prod(sizes):
            return
        shard = self.ops.reshape(elements, sizes)
        offsets = [itertools.accumulate((stop - start for start, stop in dim), initial=0) for dim in ranges]
        # Strided and nested shards hold several ranges of a dimension. Each combination of ranges is one box.
        for box in itertools.product(*(zip(*each, strict=False) for each in zip(ranges, offsets, strict=True))):
            source, target = shard, full
            for dim, ((start, stop), offset) in enumerate(box):
                source = self.ops.narrow(source, dim, offset, stop - start)
                target = self.ops.narrow(target, dim, start, stop - start)
            self.platform.copy_(target, source)


# The same parameters are updated in every step, so owners and messages are found once.
_owner_exchange = cached_by_spec(maxsize=64)(_OwnerExchange)


# Muon -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MuonOptions:
    """Options of `Muon`.

    Attributes:
        momentum, nesterov: options of the moving average of gradients.
        weight_decay: decoupled weight decay; it is multiplied by the learning rate.
        steps, coefficients, eps: options of the Newton-Schulz iteration.
        match_rms: scale updates to the RMS of AdamW's (arXiv 2502.16982); otherwise by sqrt(max(1, rows / columns)).
        compute_dtype: dtype of the iteration and of the communication.

    Examples:
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
        """Return the factor on the learning rate for matrices, or stacks of them, of `shape`."""
        rows, columns = shape[-2:]
        return 0.2 * math.sqrt(max(rows, columns)) if self.match_rms else math.sqrt(max(1.0, rows / columns))


class Muon:
    """The Muon optimizer for matrices and stacks of matrices, which are plain or DTensors that are not partial.

    Every rank of the parameters' meshes calls `step`, which communicates in two all-to-alls per mesh. Stacks with
    unsharded matrices are computed locally. Any other stack, and any single matrix, is computed by one owner.

    Args:
        parameters: (name, parameter) pairs.
        platform: default: that of a DTensor among the parameters, else the selected one.

    Attributes:
        num_steps: number of updates so far.

    Raises:
        PlacementError: parameters that are not matrices, or partial. Lists all of them.

    Examples:
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
        _check_matrices(self._parameters)
        self.platform = platform if platform is not None else _platform_of(list(self._parameters.values()))
        with self.platform.no_grad():
            self._momenta = {name: zeros_placed_like(self.platform, x) for name, x in self._parameters.items()}

    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient, on all ranks of its mesh or on none."""
        platform = self.platform
        grads = {name: grad for name, x in self._parameters.items() if (grad := platform.get_grad(x)) is not None}
        with platform.no_grad():
            directions = {name: self._direction(name, platform.unwrap(grad)) for name, grad in grads.items()}
            names = [name for name in directions if _needs_owner(self._parameters[name])]
            specs = [self._parameters[name].spec for name in names]
            # All shards of a mesh are sent together, in one all-to-all there and one back.
            shards = at_owners([directions[name] for name in names], specs, self._newton_schulz)
            updates = dict(zip(names, shards, strict=True))
            for name, direction in directions.items():
                update = updates[name] if name in updates else self._newton_schulz(direction)
                self._apply(name, update, learning_rate)
        self.num_steps += 1

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self._parameters.values():
            self.platform.set_grad(parameter, None)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the momentum of each parameter by name, with the placements of the parameter."""
        return {name: {"momentum_buffer": momentum} for name, momentum in self._momenta.items()}

    def _direction(self, name: str, grad: Tensor) -> Tensor:
        """Update the momentum by `grad` and return the shard of the update direction, in the dtype of the iteration."""
        ops, options = self.platform.ops, self.options
        momentum = self.platform.unwrap(self._momenta[name])
        new = _mix(ops, momentum, grad, 1.0 - options.momentum)
        self.platform.copy_(momentum, new)
        direction = _mix(ops, grad, new, options.momentum) if options.nesterov else new
        return ops.cast(direction, self.platform.dtype(options.compute_dtype))

    def _newton_schulz(self, matrix: Tensor) -> Tensor:
        """Return the matrix (or stack) with the same singular vectors and singular values close to one."""
        shape, ops, (a, b, c) = tuple(matrix.shape), self.platform.ops, self.options.coefficients
        if not math.prod(shape):
            return matrix
        row, column = len(shape) - 2, len(shape) - 1
        # A wide matrix has a smaller Gram matrix x x^T than its transpose.
        tall = shape[row] > shape[column]
        x = ops.transpose(matrix, row, column) if tall else matrix
        # The iteration converges for singular values up to 1. The Frobenius norm bounds the largest one.
        squares = ops.square(ops.cast(x, self.platform.dtype("float32")))
        norm = ops.sqrt(ops.sum(ops.sum(squares, column, True), row, True))
        x = ops.div(x, ops.cast(ops.clamp(norm, min=self.options.eps), x.dtype))
        for _ in range(self.options.steps):
            # x <- a x + (b A + c A A) x with A = x x^T: a polynomial of degree five in the singular values.
            gram = ops.matmul(x, ops.transpose(x, row, column))
            polynomial = ops.add(ops.mul(gram, b), ops.mul(ops.matmul(gram, gram), c))
            x = ops.add(ops.mul(x, a), ops.matmul(polynomial, x))
        return ops.transpose(x, row, column) if tall else x

    def _apply(self, name: str, update: Tensor, learning_rate: float) -> None:
        ops, parameter = self.platform.ops, self._parameters[name]
        local = self.platform.unwrap(parameter)
        # Decoupled weight decay, as in AdamW: it does not enter the momentum.
        decayed = ops.mul(local, 1.0 - learning_rate * self.options.weight_decay)
        scaled = ops.mul(ops.cast(update, local.dtype), learning_rate * self.options.scale(tuple(parameter.shape)))
        self.platform.copy_(local, ops.sub(decayed, scaled))


def _needs_owner(parameter: Tensor) -> bool:
    """Return whether owners compute the parameter's matrices: if they are sharded, or if there is only one.

    A single matrix is computed by one rank even if it is replicated, so that ranks divide the matrices among them.
    """
    if not isinstance(parameter, DTensor):
        return False
    spec = parameter.spec
    sharded = [getattr(placement, "dim", None) for placement in spec.placements]
    return spec.ndim == 2 or any(dim is not None and dim >= spec.ndim - 2 for dim in sharded)


def _mix(ops: Any, x: Tensor, y: Tensor, share: float) -> Tensor:
    """Return x + share * (y - x)."""
    return ops.add(x, ops.mul(ops.sub(y, x), share))


def _check_matrices(parameters: Mapping[str, Tensor]) -> None:
    problems = []
    for name, x in parameters.items():
        if len(x.shape) < 2:
            problems.append(f"{name} has shape {list(x.shape)}")
        elif isinstance(x, DTensor) and x.spec.is_partial:
            problems.append(f"{name} is partial: {x.spec.describe_placements()}")
    if problems:
        raise PlacementError(f"Muon takes matrices and stacks of them, sharded or replicated; {'; '.join(problems)}")
