"""Exhaustive tests of redistributions and sharding rules: all placements of all arguments, compared with one device.

Of every redistribution, values, gradients and bytes are exact."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import SilentWorld
from hp_dtensor.exceptions import CapabilityError, ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute import plan_between
from hp_dtensor.spec.placements import Partial, Placement, Replicate, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec, grad_spec
from hp_dtensor.tensor import conversions
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing.pytest_plugin import ALL, Share, chosen
from hp_dtensor.testing.rule_samples import Sample

Placements = tuple[Placement, ...]
Array = np.ndarray[Any, Any]


@dataclass
class RedistributionReport:
    """Report of a proof on one rank.

    Attributes:
        tried: number of pairs.
        wrong: the problems, one line each.
        planned, sent: per pair, the bytes of the plan (mean over ranks) and the bytes that this rank sent.
    """

    tried: int = 0
    wrong: list[str] = field(default_factory=list)
    planned: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)


def prove_redistribution(
    platform: Platform,
    mesh_shape: tuple[int, ...],
    shape: tuple[int, ...],
    more: Sequence[Placement] = (),
    limit: int | None = None,
    flattened: bool = False,
    share: Share = ALL,
) -> RedistributionReport:
    """Try pairs of placements (replicated, partial sum, every shard and `more`, on every axis) of a tensor.

    Values are integers, so every comparison is exact. Call it on every rank of a world of the mesh's size.

    Args:
        more: further placements. Those that do not fit an axis or a dimension are skipped.
        limit: maximum number of pairs; None: all.
        flattened: also give the mesh a flattened axis.
        share: share of the pairs to run.
    """
    names = tuple(f"a{i}" for i in range(len(mesh_shape)))
    mesh = DeviceMesh("cpu", mesh_shape, mesh_dim_names=names, platform=platform)
    if flattened:
        mesh.flatten("all")
    proof = _Proof(platform, mesh, shape)
    # options ** (2 * mesh axes) pairs, each with two plans and a backward: `limit` keeps larger meshes affordable.
    pairs = list(itertools.product(proof.all_placements(more), repeat=2))
    report = RedistributionReport()
    for source, target in chosen(pairs, limit, share):
        proof.check(source, target, report)
    return report


class _Proof:
    """Redistributions of one tensor on one mesh, compared with its full values."""

    def __init__(self, platform: Platform, mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
        self.platform, self.mesh, self.shape = platform, mesh, shape
        # Each value is its own flat index, so a misplaced element shows where it came from. Weights differ from values,
        # so that a gradient cannot be right by accident.
        self.array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        self.weight = np.flip(self.array).copy() + 1

    def all_placements(self, more: Sequence[Placement]) -> list[Placements]:
        options = placement_options(len(self.shape), *more)
        return [some for some in itertools.product(options, repeat=self.mesh.ndim) if self._fits(some)]

    def _fits(self, placements: Placements) -> bool:
        """Return whether the placements are valid on every rank (ragged shards must add up to the dimension)."""
        try:
            spec = self._spec(placements)
            # All coordinates and not only this rank's, so that every rank tries the same pairs in the same order.
            for coordinate in itertools.product(*map(range, self.mesh.shape)):
                spec.ranges(coordinate)
        except ValueError:
            return False
        return True

    def check(self, source: Placements, target: Placements, report: RedistributionReport) -> None:
        """Run `source` -> `target` -> replicated, and add wrong shards, full values and gradients to the report."""
        platform, plan = self.platform, self._plan(source, target)
        x = platform.from_numpy(self._local(source))
        platform.set_requires_grad(x, True)
        # Only the first plan is measured: the second one replicates the result for the comparison.
        with record_collectives() as log:
            y = plan.run(x)
        full = self._plan(target, (Replicate(),) * self.mesh.ndim).run(y)
        weighted = platform.ops.sum(platform.ops.mul(full, platform.from_numpy(self.weight)))
        (grad,) = platform.grad([weighted], [x])
        report.tried += 1
        report.planned.append(plan.wire_bytes)
        report.sent.append(log.wire_bytes())
        report.wrong += [
            f"{source} -> {target} rank {self.mesh.world.rank}: {problem}\n{plan}"
            for problem in self._problems(source, target, y, full, grad)
        ]

    def _problems(self, source: Placements, target: Placements, y: Any, full: Any, grad: Any) -> list[str]:
        to_numpy = self.platform.to_numpy
        found = []
        if tuple(y.shape) != self._spec(target).local_shape:
            found.append(f"local shape {tuple(y.shape)}, expected {self._spec(target).local_shape}")
        # How a sum is divided among ranks is the planner's choice, so a partial result is compared after replication
        # only.
        elif not any(p.is_partial() for p in target) and not np.array_equal(to_numpy(y), self._local(target)):
            found.append(f"wrong local values {to_numpy(y).tolist()}, expected {self._local(target).tolist()}")
        if not np.array_equal(to_numpy(full), self.array):
            found.append("wrong values after replication")
        if not np.array_equal(to_numpy(grad), self._gradient(source)):
            found.append(f"wrong gradient {to_numpy(grad).tolist()}, expected {self._gradient(source).tolist()}")
        return found

    def _local(self, placements: Placements) -> Array:
        return local_values(self.array, self.mesh, placements)

    def _gradient(self, placements: Placements) -> Array:
        """Return the expected gradient: the weights' shard, divided by the number of contributions to an average."""
        ranks = [n for n, p in zip(self.mesh.shape, placements, strict=True) if p == Partial("avg")]
        return _shard(self.weight, self.mesh, placements) / np.float32(np.prod(ranks, initial=1.0))

    def _plan(self, source: Placements, target: Placements) -> Any:
        return plan_between(self._spec(source), self._spec(target), self.array.itemsize)

    def _spec(self, placements: Placements) -> TensorSpec:
        return TensorSpec(self.mesh, placements, self.shape, "float32")


def local_values(array: Array, mesh: DeviceMesh, placements: Sequence[Placement]) -> Array:
    """Return this rank's local array of a global one. On partial axes, ranks have different contributions."""
    shard = _shard(array, mesh, placements)
    coordinate = mesh.get_coordinate()
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Partial) or coordinate is None:
            continue
        # Ranks must contribute different values, or a sum over the wrong ranks would go unnoticed. Each rank but the
        # first contributes its own offset, and the first one the value without their sum.
        rank, ranks = coordinate[axis], mesh.shape[axis]
        offset = ranks * (ranks - 1) / 2 if rank == 0 else -rank
        has_value = placement.reduce_op == "avg" or rank == 0
        shard = shard + np.float32(offset) if has_value else np.full_like(shard, offset)
    return np.ascontiguousarray(shard, dtype=array.dtype).reshape(shard.shape)  # 0-d arrays become 1-d


def _shard(array: Array, mesh: DeviceMesh, placements: Sequence[Placement]) -> Array:
    """Return this rank's shard of an array, element by element: strided shards are not contiguous."""
    for dim, ranges in enumerate(TensorSpec(mesh, placements, array.shape, "float32").ranges()):
        indices = [i for start, stop in ranges for i in range(start, stop)]
        array = np.take(array, np.array(indices, dtype=np.int64), axis=dim)
    return array


def placement_options(ndim: int, *more: Placement) -> list[Placement]:
    """Return the replicated, partial-sum and sharded placements of a tensor, and `more`."""
    return [Replicate(), Partial(), *(Shard(dim) for dim in range(ndim)), *more]


Tensor = Any
RTOL, ATOL = 2e-4, 2e-5
"""Tolerances for float32 values of order one after up to two dozen operations summed in another order."""


class Operations:
    """Functions by name: those of `platform.ops`, else the framework's own, or a CapabilityError."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        function = self._platform.operation(name)
        if function is None:
            raise CapabilityError(f"platform {self._platform.name!r} has no operation {name!r}")
        return function


def provable(platform: Platform, sample: Sample) -> Sample | None:
    """Return the sample that the platform can run on plain tensors: as given, without gradients, or None."""
    # Only the unsharded operation is run, so no rank needs to communicate.
    mesh = DeviceMesh("cpu", (1,), world=SilentWorld(0, 1, platform))
    for tried in (sample, dataclasses.replace(sample, gradients=False)):
        with contextlib.suppress(CapabilityError):
            _Case(platform, mesh, tried)
            return tried
    return None


@dataclass
class Report:
    """Report of a proof on one rank.

    Attributes:
        right: number of cases with the values and gradients of one device.
        declared: number of cases refused with the message that the sample allows.
        refused: other refusals, with their message.
        wrong: wrong results, one line each.
    """

    right: int = 0
    declared: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def prove(
    platform: Platform,
    mesh_shape: tuple[int, ...],
    samples: Sequence[Sample],
    limit: int | None = None,
    share: Share = ALL,
    strided: bool = False,
) -> Report:
    """Compare samples in at most `limit` placements each, or a share of these, with one device, on every rank."""
    names = tuple(f"a{i}" for i in range(len(mesh_shape)))
    mesh = DeviceMesh("cpu", mesh_shape, mesh_dim_names=names, platform=platform)
    report = Report()
    for sample in samples:
        case = _Case(platform, mesh, sample)
        # Every rank must draw the same combinations in the same order, because each case runs collectives. `chosen`
        # depends on the number of cases only.
        for placements in chosen(list(case.all_placements(strided)), limit, share):
            case.check(placements, report)
    return report


class _Case:
    """One sample with its unsharded outputs and gradients."""

    def __init__(self, platform: Platform, mesh: DeviceMesh, sample: Sample) -> None:
        self.platform, self.mesh, self.sample = platform, mesh, sample
        self.ops = Operations(platform)
        # One seed for all ranks, which therefore build the same global tensors without communication.
        rng = np.random.default_rng(7)
        self.arrays = [self._values(rng, i, shape) for i, shape in enumerate(sample.shapes)]
        leaves = [self._leaf(array) for array in self.arrays]
        self.outputs = _outputs(sample.call(self.ops, *leaves))
        # Random weights, so that the gradients of a wrong permutation of the outputs differ.
        self.weights = [
            platform.from_numpy(rng.uniform(0.5, 1.5, tuple(x.shape)).astype(np.float32)) for x in self.outputs
        ]
        self.grads = self._gradients(self.outputs, leaves)
        self.expected = [platform.to_numpy(x).copy() for x in self.outputs]
        self._locals: dict[tuple[int, Placements], np.ndarray] = {}
        self._gradient_parts: dict[tuple[int, Placements], np.ndarray] = {}

    def _values(self, rng: np.random.Generator, index: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return the values of an argument. Floating-point ones differ from each other, so that none are tied."""
        highest = (self.sample.integers or {}).get(index)
        if highest is not None:
            return rng.integers(0, highest, shape)
        if self.sample.positive:
            return rng.uniform(0.5, 2.0, shape).astype(np.float32)
        # Equal values would be selected, and get gradients, in an order that frameworks leave open.
        return rng.permutation(np.linspace(-2.0, 2.0, int(np.prod(shape)))).reshape(shape).astype(np.float32)

    def _leaf(self, array: np.ndarray) -> Tensor:
        # A copy: `from_numpy` may share memory, and operations in place would change the values of later cases.
        x = self.platform.from_numpy(array.copy())
        if self._differentiable(array):
            self.platform.set_requires_grad(x, True)
        return x

    def _differentiable(self, array: np.ndarray) -> bool:
        return self.sample.gradients and array.dtype == np.float32

    def _gradients(self, outputs: list[Tensor], leaves: list[Tensor]) -> list[np.ndarray | None]:
        """Return the gradients of a fixed weighted sum of all outputs."""
        wanted = [x for x, array in zip(leaves, self.arrays, strict=True) if self._differentiable(array)]
        if not wanted:
            return []
        ops = self.platform.ops
        loss = None
        for x, weight in zip(outputs, self.weights, strict=True):
            term = ops.sum(ops.mul(x, weight))
            loss = term if loss is None else ops.add(loss, term)
        return [None if g is None else self.platform.to_numpy(g).copy() for g in self.platform.grad([loss], wanted)]

    def all_placements(self, strided: bool = False) -> Iterator[tuple[Placements, ...]]:
        # (dimensions + 2) ** mesh axes combinations for each argument, multiplied over the arguments.
        per_tensor = []
        for index, shape in enumerate(self.sample.shapes):
            options: list[Placement] = [Replicate(), *(Shard(d) for d in range(len(shape)))]
            options += [StridedShard(d, 2) for d in range(len(shape))] if strided else []
            # Contributions to an index would be no valid positions.
            if (self.sample.integers or {}).get(index) is None:
                options.append(Partial())
            per_tensor.append(list(itertools.product(options, repeat=self.mesh.ndim)))
        return itertools.product(*per_tensor)

    def check(self, placements: tuple[Placements, ...], report: Report) -> None:
        described = f"{self.sample.name} {placements}"
        leaves = [self._leaf(self._local(i, placed)) for i, placed in enumerate(placements)]
        sharded = [
            conversions.from_local(leaf, self.mesh, placed, shape=array.shape)
            for leaf, array, placed in zip(leaves, self.arrays, placements, strict=True)
        ]
        try:
            outputs = _outputs(self.sample.call(self.ops, *sharded))
        # Rules see placements and shapes, which are the same on all ranks. So all of them refuse a case, and none is
        # left waiting in a collective.
        except ShardingRuleError as error:
            if self.sample.may_refuse and self.sample.may_refuse in str(error):
                report.declared += 1
            else:
                report.refused.append(f"{described}: {error}")
            return
        problems = self._problems(outputs, leaves, placements)
        report.right += not problems
        report.wrong += [f"{described} rank {self.mesh.world.rank}: {problem}" for problem in problems]

    def _problems(self, outputs: list[Tensor], leaves: list[Tensor], placements: tuple[Placements, ...]) -> list[str]:
        """Return the differences of full outputs and local gradients from those of one device."""
        if not all(isinstance(x, DTensor) for x in outputs):
            return ["an output is no DTensor"]
        # Compared in full, not by shard: the placements of an output are the rule's choice.
        full = [x.full_tensor() for x in outputs]
        problems = [_compare(a, self.platform.to_numpy(b)) for a, b in zip(self.expected, full, strict=True)]
        problems += self._gradient_problems(self._gradients(full, leaves), placements)
        return [problem for problem in problems if problem]

    def _gradient_problems(self, grads: list[np.ndarray | None], placements: tuple[Placements, ...]) -> list[str]:
        differentiable = [i for i, array in enumerate(self.arrays) if self._differentiable(array)]
        problems = []
        for index, got, full in zip(differentiable, grads, self.grads, strict=True):
            # On one device the outputs do not depend on this argument.
            if full is None:
                continue
            part = self._gradient_part(index, placements[index], full)
            # A framework may give None where this rank's outputs do not depend on its shard.
            problem = _compare(part, np.zeros_like(part) if got is None else got)
            problems.append(f"gradient of argument {index}: {problem}" if problem else "")
        return problems

    def _local(self, index: int, placed: Placements) -> np.ndarray:
        """Return this rank's local array of an argument, cached because many cases share it."""
        if (index, placed) not in self._locals:
            self._locals[index, placed] = local_values(self.arrays[index], self.mesh, placed)
        return self._locals[index, placed]

    def _gradient_part(self, index: int, placed: Placements, full: np.ndarray) -> np.ndarray:
        if (index, placed) not in self._gradient_parts:
            # The gradient of a partial value is replicated: every contribution has the gradient of the sum.
            spec = grad_spec(TensorSpec(self.mesh, placed, full.shape, str(full.dtype)))
            self._gradient_parts[index, placed] = local_values(full, self.mesh, spec.placements)
        return self._gradient_parts[index, placed]


def _compare(expected: np.ndarray, got: np.ndarray) -> str:
    if expected.shape != got.shape:
        return f"shape {got.shape}, expected {expected.shape}"
    # Integers and booleans must be equal, and are compared without a conversion. Only floating-point results reach the
    # tolerances.
    if not np.array_equal(got, expected) and not np.allclose(got, expected, rtol=RTOL, atol=ATOL):
        return f"off by up to {np.max(np.abs(got.astype(np.float64) - expected)):.3g}"
    return ""


def _outputs(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]
