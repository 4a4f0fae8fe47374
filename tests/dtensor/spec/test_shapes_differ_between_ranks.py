"""Ranks that distribute tensors of other shapes or dtypes are told so, instead of computing with what nobody has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_dtensor import DeviceMesh, Shard, current_world, distribute_tensor, get_platform, record_collectives
from hp_dtensor.exceptions import RankMismatchError
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


@pytest.mark.real_ranks
def test_real_ranks_are_told_too(hp_platform: Platform, rank_pool: Any) -> None:
    target = "test_shapes_differ_between_ranks:refusal_on_a_rank"
    for message in rank_pool(2).run(target, hp_platform.name, "shape", timeout_seconds=60.0):
        assert all(part in message for part in SAID["shape"])


def test_nothing_is_sent_where_every_rank_has_the_data(hp_platform: Platform) -> None:
    def program() -> int:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        with record_collectives() as log:
            distribute_tensor(hp_platform.from_numpy(np.ones((4, 2), np.float32)), mesh, [Shard(0)], src_data_rank=None)
        return log.count()

    assert run_ranks(program, 2, hp_platform) == [0, 0]
