"""Factories, and what shows or forbids communication."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hp_dtensor import (
    CommDebugMode,
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    batch_redistribute,
    distribute_tensor,
    empty,
    explicit_redistribution,
    full,
    nn,
    ones,
    zeros,
)
from hp_dtensor.exceptions import ImplicitRedistributionError, PlacementError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute.collectives import AllGather
from hp_dtensor.spec.placements import Placement
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


def _placed(platform: Platform, mesh: DeviceMesh, placement: Placement, shape: tuple[int, ...] = (4, 6)) -> Any:
    x = distribute_tensor(platform.from_numpy(np.ones(shape, np.float32)), mesh, (Replicate(),))
    return x.redistribute(placements=(placement,))


def _implicit(platform: Platform) -> str:
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("tp",), platform=platform)
    x, y, z = (_placed(platform, mesh, placement) for placement in (Shard(0), Shard(1), Replicate()))
    with explicit_redistribution():
        platform.ops.add(x, z)  # sharding a replicated operand sends nothing
        line = sys._getframe().f_lineno + 2
        with pytest.raises(ImplicitRedistributionError) as refusal:
            platform.ops.add(x, y)
    platform.ops.add(x, y)
    return str(refusal.value).replace(f":{line}", ":LINE")


def test_implicit_redistribution_can_be_forbidden(hp_platform: Platform) -> None:
    message = run_ranks(_implicit, 2, hp_platform, hp_platform)[0]
    assert message == (
        "add at test_explicit.py:LINE "
        "would redistribute its argument [1] [4, 6] from (tp:S(1)) to (tp:S(0)), sending 24 "
        "bytes per rank. Redistribute it explicitly before: x.redistribute(placements=[Shard(0)]), or "
        "place the other arguments to fit."
    )


class Inner(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return self.ops.matmul(x, y)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(), Inner()])

    def forward(self, x: Any, y: Any) -> Any:
        return self.layers[1](x, y)


def _in_module(platform: Platform) -> str:
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("tp",), platform=platform)
    with nn.building(platform):
        model = Outer()
    x, y = _placed(platform, mesh, Shard(0), (4, 4)), _placed(platform, mesh, Shard(0), (4, 4))
    with explicit_redistribution(), pytest.raises(ImplicitRedistributionError) as refusal:
        model(x, y)
    return str(refusal.value)


def test_the_refusal_names_the_module(hp_platform: Platform) -> None:
    for message in run_ranks(_in_module, 2, hp_platform, hp_platform):
        assert re.match(
            r"matmul at test_explicit\.py:\d+ in module layers\.1 would redistribute its argument \[0\]",
            message,
        )


def _reads(platform: Platform) -> None:
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("tp",), platform=platform)
    sharded, partial, full_value = (_placed(platform, mesh, p, (2,)) for p in (Shard(0), Partial(), Replicate()))
    total = platform.ops.sum(sharded)
    readings = [(sharded, "tolist"), (partial, "tolist"), (sharded, "__array__"), (total, "item"), (total, "__float__")]
    with explicit_redistribution():
        assert full_value.tolist() == [1.0, 1.0]
        for x, method in readings:
            with pytest.raises(
                ImplicitRedistributionError, match=r"at test_explicit\.py:\d+ would .*\[Replicate\(\)\]"
            ):
                getattr(x, method)()
        assert total.full_tensor().item() == 2.0
    for x, method in readings:
        np.testing.assert_array_equal(getattr(x, method)(), 2.0 if x is total else [1.0, 1.0])


def test_reading_values_gathers_by_itself(hp_platform: Platform) -> None:
    run_ranks(_reads, 2, hp_platform, hp_platform)


def _reductions(platform: Platform) -> None:
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("tp",), platform=platform)
    x = _placed(platform, mesh, Shard(0))
    with explicit_redistribution():
        with CommDebugMode() as mode:
            along = platform.ops.softmax(x, 0)
            assert bool((x == x).all())
        assert along.placements == (Shard(0),)
        assert set(mode.get_comm_counts()) == {"all_reduce"}


def test_what_is_part_of_a_result_is_allowed_where_redistribution_is_explicit(hp_platform: Platform) -> None:
    run_ranks(_reductions, 2, hp_platform, hp_platform)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_collective_that_fails_says_where(
    hp_platform: Platform, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    def timed_out(*_: Any) -> Any:
        raise RuntimeError("Timed out waiting 1800000ms for recv operation to complete")

    pending = SimpleNamespace(wait=timed_out)
    monkeypatch.setattr(AllGather, "communicate", lambda *_: pending if asynchronous else timed_out())

    def rank() -> list[str]:
        mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("tp",), platform=hp_platform)
        x = zeros(6, 3, device_mesh=mesh, placements=(Shard(0),))
        with pytest.raises(RuntimeError, match="Timed out") as failure:
            x.redistribute(mesh, (Replicate(),), async_op=asynchronous).wait()
        return failure.value.__notes__

    for number, notes in enumerate(run_ranks(rank, 2, hp_platform)):
        (note,) = notes
        assert note.startswith(f"On rank {number}, in all_gather of the redistribution of TensorSpec([6, 3]")
        assert "to (tp:R). If other ranks did not call it: hp_dtensor.check_mode()" in note


def test_a_batch_that_fails_says_where(hp_platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed_out(*_: Any) -> Any:
        raise RuntimeError("Timed out waiting 1800000ms for recv operation to complete")

    monkeypatch.setattr(AllGather, "communicate", timed_out)

    def rank() -> list[str]:
        mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("tp",), platform=hp_platform)
        tensors = [zeros(6, 3, device_mesh=mesh, placements=(Shard(0),)) for _ in range(2)]
        with pytest.raises(TypeError, match="takes many DTensors, got one"):
            batch_redistribute(tensors[0])
        with pytest.raises(RuntimeError, match="Timed out") as failure:
            batch_redistribute(tensors)
        return failure.value.__notes__

    for number, (note,) in enumerate(run_ranks(rank, 2, hp_platform)):
        assert note.startswith(f"On rank {number}, in all_gather of a batch of 2 redistributions on mesh (tp=2)")
