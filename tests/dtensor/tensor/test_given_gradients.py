"""A backward that starts from a gradient that somebody gives, placed as the output or not."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hp_dtensor import (
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    explicit_redistribution,
    from_local,
    record_collectives,
)
from hp_dtensor.exceptions import ImplicitRedistributionError, PlacementError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Placement
from hp_dtensor.testing import run_ranks

VALUES = np.arange(16, dtype=np.float32).reshape(4, 4)
PLACEMENTS = (Shard(0), Shard(1), Replicate(), Partial())


def _leaf(platform: Platform) -> tuple[Any, DeviceMesh]:
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("tp",), platform=platform)
    x = distribute_tensor(platform.from_numpy(VALUES.copy()), mesh, (Shard(0),))
    platform.set_requires_grad(x, True)
    return x, mesh


def _gradients(platform: Platform, output: Placement, given: Placement) -> None:
    """Of a leaf whose triple is placed as `output`, from its doubled values as gradient."""
    x, mesh = _leaf(platform)
    seed = distribute_tensor(platform.from_numpy(2 * VALUES), mesh, (Replicate(),)).redistribute(placements=(given,))

    def triple() -> Any:
        return platform.ops.mul(x, 3.0).redistribute(placements=(output,))

    platform.backward(triple(), seed)
    found = [platform.get_grad(x), *platform.grad([triple()], [x], [seed])]
    for gradient in found:
        np.testing.assert_array_equal(platform.to_numpy(gradient.full_tensor()), 6 * VALUES)
    comes = Replicate() if output.is_partial() else output
    if given != comes and not given.is_replicate():
        with explicit_redistribution(), pytest.raises(ImplicitRedistributionError, match=r"its argument \[gradient\]"):
            platform.backward(triple(), seed)


@pytest.mark.parametrize(("output", "given"), list(itertools.product(PLACEMENTS, repeat=2)))
def test_a_gradient_of_any_placement_counts_as_a_whole(
    hp_platform: Platform, output: Placement, given: Placement
) -> None:
    run_ranks(_gradients, 2, hp_platform, hp_platform, output, given)


def _averaged(platform: Platform, op: str, is_given: bool) -> list[np.ndarray]:
    """Gradients of a leaf with columns cut, whose row sums are averaged (or the largest taken) over other ranks."""
    mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), platform=platform)
    rank = mesh.get_local_rank("dp")
    x = platform.from_numpy(VALUES * (1 + rank) + np.arange(4, dtype=np.float32) * mesh.get_local_rank("tp"))
    platform.set_requires_grad(x, True)
    y = from_local(platform.ops.mul(x, 3.0), mesh, (Partial(op), Shard(1)), shape=(4, 8))
    seed = distribute_tensor(platform.from_numpy(np.ones((4, 8), np.float32)), mesh, (Replicate(), Shard(1)))
    platform.backward(y, seed) if is_given else platform.backward(platform.ops.sum(y.reduce_partial()))
    return [platform.to_numpy(platform.get_grad(x)).copy()]


@pytest.mark.parametrize("op", ["avg", "max"])
def test_an_output_that_is_partial_in_another_way_than_a_sum(hp_platform: Platform, op: str) -> None:
    """As if it had been reduced first."""
    given, reduced = (run_ranks(_averaged, 4, hp_platform, hp_platform, op, flag) for flag in (True, False))
    for a, b in zip(given, reduced, strict=True):
        np.testing.assert_array_equal(a, b)
    assert {float(np.max(a)) for (a,) in given} == ({1.5} if op == "avg" else {1.5, 3.0})


def _wrong_shape(platform: Platform) -> None:
    x, mesh = _leaf(platform)
    for seed in (
        platform.from_numpy(VALUES.copy()),
        distribute_tensor(platform.from_numpy(VALUES[:, :2].copy()), mesh, (Shard(0),)),
    ):
        with pytest.raises(PlacementError, match=r"expected a gradient \[4, 4\], or .* \[2, 4\]; got"):
            platform.backward(platform.ops.mul(x, 3.0), seed)
    platform.backward(platform.ops.mul(x, 3.0), platform.from_numpy(np.ones((2, 4), np.float32)))
    np.testing.assert_array_equal(platform.to_numpy(platform.get_grad(x).to_local()), np.full((2, 4), 3.0))


def test_a_gradient_of_another_shape_is_refused(hp_platform: Platform) -> None:
    run_ranks(_wrong_shape, 2, hp_platform, hp_platform)


def _own_gradients(platform: Platform) -> tuple[Any, int]:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    local = platform.from_numpy(np.ones((2,), np.float32))
    platform.set_requires_grad(local, True)
    x = from_local(platform.ops.mul(local, 1.0), mesh, [Replicate()], grad_placements=[Partial()])
    loss = platform.ops.sum(platform.ops.mul(x, 3.0))
    with record_collectives() as log:
        platform.backward(loss)
    return platform.to_numpy(platform.get_grad(local)), log.count()


def test_from_local_leaves_a_replicated_gradient_that_may_be_partial(hp_platform: Platform) -> None:
    """As torch: each rank gets its own gradient, and nothing is sent or replaced by zeros."""
    for grad, count in run_ranks(_own_gradients, 2, hp_platform, hp_platform):
        np.testing.assert_array_equal(grad, np.full((2,), 3.0, np.float32))
        assert count == 0
