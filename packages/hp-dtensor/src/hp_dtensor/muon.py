"""The Muon optimizer and owner computation, for parameters with any placements.

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

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.exceptions import PlacementError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.tensor_spec import TensorSpec, cached_by_spec
from hp_dtensor.tensor.conversions import platform_of, zeros_placed_like
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any

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
        """Send `tensors`, `sizes` elements to each rank, in their order; return `expected` ones by rank, flat."""
        flat = [self.ops.reshape(x, (-1,)) for x in tensors if math.prod(x.shape)]
        sent = self.platform.contiguous(self.ops.cat(flat, 0)) if flat else self.platform.empty((0,), dtype)
        received = self.platform.empty((sum(expected),), dtype)
        self.mesh.world.group(self.mesh.ranks()).all_to_all_into(received, sent, expected, sizes)
        return received

    def _sends(self, tensor: int, rank: int, owner: int) -> bool:
        """Return whether a rank sends its shard to the owner; of replicas only one, in line with the owner, does."""
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
        self.platform = platform if platform is not None else platform_of(list(self._parameters.values()))
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
    """Return whether owners compute the parameter's matrices: sharded ones, or a single one, which is divided so."""
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
