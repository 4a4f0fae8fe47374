"""Muon for matrices of any layout (Jordan et al., https://kellerjordan.github.io/posts/muon/).

Momentum is kept and updated on local shards. A matrix is orthogonalised by one rank, its owner, so that no rank
does another's work and sharded training gives the single-device numbers bit for bit. A parameter of more dimensions,
such as the weights of experts, is a stack of matrices. Where every rank holds whole ones, it works on its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hp_dtensor.exceptions import PlacementError
from hp_dtensor.optim.owner_computes import at_owners
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.conversions import zeros_laid_out_as
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any


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
        self.platform = platform if platform is not None else _platform_of(self._parameters.values())
        with self.platform.no_grad():
            self._momenta = {name: zeros_laid_out_as(self.platform, x) for name, x in self._parameters.items()}

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


def _platform_of(parameters: Iterable[Tensor]) -> Platform:
    return next((x.device_mesh.platform for x in parameters if isinstance(x, DTensor)), None) or get_platform()
