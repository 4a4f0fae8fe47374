"""Factories, and what shows or forbids communication."""

from __future__ import annotations

import numpy as np
import pytest
from small_model import make_data, make_model

from hp_dtensor import (
    ColwiseParallel,
    CommDebugMode,
    DeviceMesh,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    empty,
    explicit_redistribution,
    full,
    ones,
    parallelize_module,
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


def _counted(platform: Platform) -> tuple[dict[str, int], dict[str, list[str]], dict[str, float], str]:
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("tp",), platform=platform)
    model = parallelize_module(make_model(platform), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x, _ = make_data(platform)
    with CommDebugMode(model, platform) as comm:
        loss = platform.ops.sum(model(x)).full_tensor()
        platform.backward(loss)
    where = {name: [record.name for record in records] for name, records in comm.by_module().items()}
    return comm.get_comm_counts(), where, comm.get_comm_bytes(), comm.table()


def test_collectives_are_told_by_module(hp_platform: Platform) -> None:
    for counts, where, sent, table in run_ranks(_counted, 2, hp_platform, hp_platform):
        assert counts == {"all_reduce": 1}, "the input needs no gradient: only the row-wise sum remains"
        assert where == {"down": ["all_reduce"]}
        assert sent == {"all_reduce": 5 * 5 * 4}, "5 x 5 float32: a ring of two sends half of it twice"
        assert "down" in table


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
