"""Redistributions of tensors that are smaller than the mesh, so that parts are empty in one dimension or in several."""

from __future__ import annotations

import itertools
import os
import re
import sys
from pathlib import Path

import numpy
import pytest

from hp_dtensor import DTensor, Partial, RaggedShard, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.testing import run_ranks
from hp_dtensor.testing.pytest_plugin import chosen

PLAIN = [Replicate(), Shard(0), Shard(1), Partial()]
LIMIT = None if "HP_ALL_CASES" in os.environ else 80  # of 384 cases each; the session `proof` runs all


def _sources(shape, mesh_shape):
    ragged = [
        RaggedShard(0, (*[0] * (mesh_shape[0] - 1), shape[0])),
        RaggedShard(0, (shape[0], *[0] * (mesh_shape[0] - 1))),
    ]
    return list(itertools.product([*PLAIN, *ragged], PLAIN))


def _place(platform, mesh, value, placements):
    """A DTensor of `value`, of which the first rank of an axis with partial results contributes all."""
    sharded = [Replicate() if p.is_partial() else p for p in placements]
    local = platform.detach(distribute_tensor(platform.from_numpy(value), mesh, sharded).to_local())
    pairs = zip(mesh.get_coordinate(), placements, strict=True)
    if any(digit and p.is_partial() for digit, p in pairs):
        local = platform.ops.mul(local, 0.0)
    return DTensor.from_local(local, mesh, placements, shape=value.shape)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3)], ids=str)
def test_values_shapes_and_gradients(torch_or, hp_platform, shape, mesh_shape):
    torch_or(shape == (2, 1) and mesh_shape == (3, 2))
    value = numpy.arange(1, 1 + numpy.prod(shape), dtype=numpy.float32).reshape(shape)

    cases = list(itertools.product(_sources(shape, mesh_shape), itertools.product(PLAIN, PLAIN)))

    def rank():
        mesh = init_device_mesh("cpu", mesh_shape, platform=hp_platform)
        for source, target in chosen(cases, LIMIT):
            where = f"{source} -> {target}"
            x = _place(hp_platform, mesh, value, source)
            hp_platform.set_requires_grad(x, True)
            y = x.redistribute(mesh, target)
            assert tuple(y.to_local().shape) == y.spec.local_shape, where
            numpy.testing.assert_array_equal(hp_platform.to_numpy(y.full_tensor()), value, err_msg=where)
            hp_platform.backward(hp_platform.ops.sum(hp_platform.ops.mul(y, y)).full_tensor())
            grad = hp_platform.to_numpy(x.grad.full_tensor())
            numpy.testing.assert_array_equal(grad, 2 * value, err_msg=where)

    run_ranks(rank, mesh_shape[0] * mesh_shape[1], hp_platform)


BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "redistribute_bytes.py"


@pytest.mark.real_ranks
@pytest.mark.skipif(os.environ.get("HP_PLATFORM") == "mindspore", reason="compares with torch")
def test_bytes_are_never_more_than_those_of_torch_and_of_a_search(fork_server) -> None:
    pytest.importorskip("torch")
    done = fork_server.run([sys.executable, str(BENCHMARK)], 300)
    assert done.returncode == 0, f"pairs that need more:\n{done.stdout}{done.stderr}"
    rows = {row.split(" pairs:")[0].strip(): row for row in done.stdout.splitlines() if " pairs:" in row}
    assert [int(label.split()[-1]) for label in rows if label.startswith("mesh")] == [196, 196, 2744], "every pair"
    ratios = {name: float(ratio) for name, ratio in re.findall(r"([a-z ]+) \d+ \(([\d.]+)\)", rows["all"])}
    assert set(ratios) == {" ours", " torch cpu", " torch gpu", " torch gpu flattened", " search"}
    assert max(ratios[" torch cpu"], ratios[" torch gpu"], ratios[" torch gpu flattened"]) <= 0.6
