"""Proof of redistribution by brute force: every pair of placements, values and gradients exact."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.platform import Platform
from hp_dtensor.redistribute import plan_between
from hp_dtensor.spec import TensorSpec
from hp_dtensor.testing.rule_proof import Report, local_part

Placements = tuple[Placement, ...]


def prove_redistribution(platform: Platform, mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> Report:
    """Try every pair of placements (replicated, partial sum, every shard, on every axis) of a tensor of `shape`.

    Values are integers, so every comparison is exact.
    """
    names = tuple(f"a{i}" for i in range(len(mesh_shape)))
    proof = _Proof(platform, DeviceMesh("cpu", mesh_shape, mesh_dim_names=names, platform=platform), shape)
    options: list[Placement] = [Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))]
    report = Report(0, [], [])
    every = list(itertools.product(options, repeat=len(mesh_shape)))
    for source, target in itertools.product(every, every):
        report.tried += 1
        report.wrong += [f"{source} -> {target}: {problem}" for problem in proof.problems(source, target)]
    return report


class _Proof:
    def __init__(self, platform: Platform, mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
        self.platform, self.mesh, self.shape = platform, mesh, shape
        self.array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        self.weight = self.array[..., ::-1].copy() + 1

    def problems(self, source: Placements, target: Placements) -> list[str]:
        """Whether `source` -> `target` -> replicated gives the whole tensor, and its gradient the source's part."""
        platform = self.platform
        x = platform.from_numpy(local_part(self.array, self.mesh, source))
        platform.set_requires_grad(x, True)
        y = self._plan(source, target).run(x)
        full = self._plan(target, (Replicate(),) * self.mesh.ndim).run(y)
        weighted = platform.ops.sum(platform.ops.mul(full, platform.from_numpy(self.weight)))
        (grad,) = platform.grad([weighted], [x])
        found = []
        if tuple(y.shape) != self._spec(target).local_shape:
            found.append(f"local shape {tuple(y.shape)}, expected {self._spec(target).local_shape}")
        if not np.array_equal(platform.to_numpy(full), self.array):
            found.append("wrong values")
        if not np.array_equal(platform.to_numpy(grad), self._part_of_weight(source)):
            found.append("wrong gradient")
        return found

    def _part_of_weight(self, source: Placements) -> np.ndarray:
        """The gradient's placement is the source's with partial replaced by replicated."""
        offset, shape = self._spec(source).box()
        part: np.ndarray = self.weight[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        return part

    def _plan(self, source: Placements, target: Placements) -> Any:
        return plan_between(self._spec(source), self._spec(target))

    def _spec(self, placements: Placements) -> TensorSpec:
        return TensorSpec(self.mesh, placements, self.shape, "float32")
