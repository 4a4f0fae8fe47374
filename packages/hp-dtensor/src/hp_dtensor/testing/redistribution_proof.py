"""Proof of redistribution by brute force: every pair of placements, values, gradients and bytes exact."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute import plan_between
from hp_dtensor.spec.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.testing.shares import ALL, Share, chosen

Placements = tuple[Placement, ...]
Array = np.ndarray[Any, Any]


@dataclass
class RedistributionReport:
    """Report of a proof on one rank.

    Attributes:
        tried: number of pairs.
        wrong: the problems, one line each.
        promised, sent: per pair the bytes that the plan promises (mean over ranks) and that this rank sent.
    """

    tried: int = 0
    wrong: list[str] = field(default_factory=list)
    promised: list[float] = field(default_factory=list)
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

    Values are integers, so every comparison is exact. To be called on every rank of a world of the mesh's size.

    Args:
        more: further placements; those that do not fit an axis or a dimension there are left out.
        limit: at most so many pairs; None: all.
        flattened: the mesh's axes are also known flattened, by a name of their own.
        share: which of the pairs.
    """
    names = tuple(f"a{i}" for i in range(len(mesh_shape)))
    mesh = DeviceMesh("cpu", mesh_shape, mesh_dim_names=names, platform=platform)
    if flattened:
        mesh.flatten("all")
    proof = _Proof(platform, mesh, shape)
    pairs = list(itertools.product(proof.all_placements(more), repeat=2))
    report = RedistributionReport()
    for source, target in chosen(pairs, limit, share):
        proof.check(source, target, report)
    return report


class _Proof:
    def __init__(self, platform: Platform, mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
        self.platform, self.mesh, self.shape = platform, mesh, shape
        self.array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        self.weight = np.flip(self.array).copy() + 1

    def all_placements(self, more: Sequence[Placement]) -> list[Placements]:
        options = [Replicate(), Partial(), *(Shard(d) for d in range(len(self.shape))), *more]
        return [some for some in itertools.product(options, repeat=self.mesh.ndim) if self._fits(some)]

    def _fits(self, placements: Placements) -> bool:
        """Return whether every rank can hold its part (ragged parts must sum up on every line)."""
        try:
            spec = self._spec(placements)
            for coordinate in itertools.product(*map(range, self.mesh.shape)):
                spec.ranges(coordinate)
        except ValueError:
            return False
        return True

    def check(self, source: Placements, target: Placements, report: RedistributionReport) -> None:
        """Return whether `source` -> `target` -> replicated gives each rank its part, and its gradient the source's
        part.
        """
        platform, plan = self.platform, self._plan(source, target)
        x = platform.from_numpy(self._local(source))
        platform.set_requires_grad(x, True)
        with record_collectives() as log:
            y = plan.run(x)
        full = self._plan(target, (Replicate(),) * self.mesh.ndim).run(y)
        weighted = platform.ops.sum(platform.ops.mul(full, platform.from_numpy(self.weight)))
        (grad,) = platform.grad([weighted], [x])
        report.tried += 1
        report.promised.append(plan.wire_bytes)
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
        """Return the weights' part, of which each contribution to an average has its share."""
        ranks = [n for n, p in zip(self.mesh.shape, placements, strict=True) if p == Partial("avg")]
        return _part(self.weight, self.mesh, placements) / np.float32(np.prod(ranks, initial=1.0))

    def _plan(self, source: Placements, target: Placements) -> Any:
        return plan_between(self._spec(source), self._spec(target), self.array.itemsize)

    def _spec(self, placements: Placements) -> TensorSpec:
        return TensorSpec(self.mesh, placements, self.shape, "float32")


def local_values(array: Array, mesh: DeviceMesh, placements: Sequence[Placement]) -> Array:
    """Return this rank's part of a whole array; partial axes hold uneven contributions that differ per rank."""
    part = _part(array, mesh, placements)
    coordinate = mesh.get_coordinate()
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial) and coordinate is not None:
            part = _contribution(part, placement.reduce_op, coordinate[axis], mesh.shape[axis])
    return np.ascontiguousarray(part, dtype=array.dtype).reshape(part.shape)  # 0-d arrays become 1-d


def _part(array: Array, mesh: DeviceMesh, placements: Sequence[Placement]) -> Array:
    for dim, ranges in enumerate(TensorSpec(mesh, placements, array.shape, "float32").ranges()):
        indices = [i for start, stop in ranges for i in range(start, stop)]
        array = np.take(array, np.array(indices, dtype=np.int64), axis=dim)
    return array


def _contribution(part: Array, op: str, rank: int, ranks: int) -> Array:
    """Return this rank's contribution: all but the first are off by different amounts, for which the first makes up."""
    offset = ranks * (ranks - 1) / 2 if rank == 0 else -rank
    if op == "avg" or rank == 0:
        return part + np.float32(offset)
    return np.full_like(part, offset)
