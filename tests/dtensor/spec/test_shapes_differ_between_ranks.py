"""Ranks that distribute tensors of other shapes or dtypes are told so, instead of computing with what nobody has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_dtensor import DeviceMesh, Shard, current_world, distribute_tensor, get_platform, record_collectives
from hp_dtensor.exceptions import PlacementError, RankMismatchError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks


def refusal_on_a_rank(name: str, kind: str) -> str:
    platform = get_platform(name)
    world = current_world(platform)
    mesh = DeviceMesh("cpu", (world.size,), platform=platform)
    rows, dtype, placements = 4, np.float32, [Shard(0)]
    if world.rank == 1:
        rows = 6 if kind == "shape" else rows
        dtype = np.int32 if kind == "dtype" else dtype
        placements = [Shard(1)] if kind == "placements" else placements
    with pytest.raises(RankMismatchError) as refusal:
        distribute_tensor(platform.from_numpy(np.ones((rows, 2), dtype)), mesh, placements)
    return str(refusal.value)


SAID = {
    "shape": ("rank 1: [6, 2] ", "rank 0: [4, 2] "),
    "dtype": ("rank 1: [4, 2] ", "int32"),
    "placements": ("S(1)", "S(0)"),
}


@pytest.mark.parametrize("kind", SAID)
def test_every_rank_is_told_who_has_what(hp_platform: Platform, kind: str) -> None:
    for message in run_ranks(refusal_on_a_rank, 2, hp_platform, hp_platform.name, kind):
        assert message.startswith("distribute_tensor: ranks differ: ")
        assert all(part in message for part in SAID[kind])


def error_of_every_rank(name: str, kind: str) -> str:
    """Distribute a tensor that is wrong on rank 1 alone, and return the error that this rank got."""
    platform = get_platform(name)
    world = current_world(platform)
    mesh = DeviceMesh("cpu", (world.size,), platform=platform)
    tensor = platform.from_numpy(np.ones((4, 2), np.float32))
    placements = [Shard(0)]
    if world.rank == 1 and kind == "placements":
        placements = [Shard(7)]
    if world.rank == 1 and kind == "gradient":
        platform.set_requires_grad(tensor, True)
    with pytest.raises((RankMismatchError, PlacementError)) as refusal:
        distribute_tensor(tensor, mesh, placements)
    return f"{type(refusal.value).__name__}: {refusal.value}"


def test_the_others_learn_that_one_rank_has_raised(hp_platform: Platform) -> None:
    others, own = run_ranks(error_of_every_rank, 2, hp_platform, hp_platform.name, "placements")
    assert others.startswith("RankMismatchError: distribute_tensor: ranks differ: rank 0: [4, 2]")
    assert own.startswith("PlacementError")
    assert own in others.partition("rank 1: failed, ")[2]


def test_a_leaf_that_requires_a_gradient_on_one_rank_only_is_refused(hp_platform: Platform) -> None:
    for message in run_ranks(error_of_every_rank, 2, hp_platform, hp_platform.name, "gradient"):
        assert "rank 1: [4, 2] float32 (axis0:S(0)), a leaf that requires a gradient" in message


@pytest.mark.real_ranks
def test_real_ranks_learn_that_one_has_raised(hp_platform: Platform, rank_pool: Any) -> None:
    target = "test_shapes_differ_between_ranks:error_of_every_rank"
    others, own = rank_pool(2).run(target, hp_platform.name, "placements")
    assert own in others


@pytest.mark.real_ranks
def test_real_ranks_are_told_too(hp_platform: Platform, rank_pool: Any) -> None:
    target = "test_shapes_differ_between_ranks:refusal_on_a_rank"
    for message in rank_pool(2).run(target, hp_platform.name, "shape"):
        assert all(part in message for part in SAID["shape"])


def test_nothing_is_sent_where_every_rank_has_the_data(hp_platform: Platform) -> None:
    def program() -> int:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        with record_collectives() as log:
            distribute_tensor(hp_platform.from_numpy(np.ones((4, 2), np.float32)), mesh, [Shard(0)], src_data_rank=None)
        return log.count()

    assert run_ranks(program, 2, hp_platform) == [0, 0]
