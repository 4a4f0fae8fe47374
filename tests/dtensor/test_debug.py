"""Factories, and what shows or forbids communication."""

from __future__ import annotations

import numpy as np
import pytest

from hp_dtensor import (
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    empty,
    explicit_redistribution,
    full,
    ones,
    zeros,
)
from hp_dtensor.exceptions import ImplicitRedistributionError, PlacementError
from hp_dtensor.platform import Platform
from hp_dtensor.testing import run_ranks


def _made(platform: Platform) -> dict[str, np.ndarray]:
    mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), platform=platform)
    placed = {"device_mesh": mesh, "placements": (Shard(0), Shard(1))}
    made = {
        "zeros": zeros(5, 3, **placed),
        "ones": ones((5, 3), dtype="float64", **placed),
        "full": full((5, 3), 2.5, **placed),
    }
    assert tuple(empty(5, 3, **placed).shape) == (5, 3)
    assert made["ones"].dtype == platform.dtype("float64")
    with pytest.raises(PlacementError, match="partial"):
        zeros(5, device_mesh=mesh, placements=(Partial(), Replicate()))
    return {name: platform.to_numpy(x.full_tensor()) for name, x in made.items()}


def test_factories_make_each_shard(hp_platform: Platform) -> None:
    for made in run_ranks(_made, 4, hp_platform, hp_platform):
        for name, value in {"zeros": 0.0, "ones": 1.0, "full": 2.5}.items():
            np.testing.assert_array_equal(made[name], np.full((5, 3), value))


def _implicit(platform: Platform) -> str:
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("tp",), platform=platform)
    x = distribute_tensor(platform.from_numpy(np.ones((4, 6), np.float32)), mesh, (Shard(0),))
    y = distribute_tensor(platform.from_numpy(np.ones((4, 6), np.float32)), mesh, (Shard(1),))
    z = distribute_tensor(platform.from_numpy(np.ones((4, 6), np.float32)), mesh, (Replicate(),))
    with explicit_redistribution():
        platform.ops.add(x, z)  # cutting a replicated operand sends nothing
        with pytest.raises(ImplicitRedistributionError) as refusal:
            platform.ops.add(x, y)
    platform.ops.add(x, y)
    return str(refusal.value)


def test_implicit_redistribution_can_be_forbidden(hp_platform: Platform) -> None:
    message = run_ranks(_implicit, 2, hp_platform, hp_platform)[0]
    assert message == (
        "add would redistribute its argument [1] [4, 6] from (tp:S(1)) to (tp:S(0)), sending 24 bytes per rank. Do it "
        "yourself before: x.redistribute(placements=[Shard(0)]), or place the other arguments to fit."
    )
