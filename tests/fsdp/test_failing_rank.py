"""A rank that `fully_shard` refuses alone reports it to the others, which would wait for it otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from hp_dtensor import DeviceMesh, current_world, get_platform
from hp_dtensor.exceptions import RankMismatchError
from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks
from hp_fsdp import fully_shard
from hp_fsdp.exceptions import FullyShardError


def error_of_every_rank(name: str) -> str:
    """Shard a module that has been sharded before on rank 1 alone, and return the error that this rank got."""
    platform = get_platform(name)
    world = current_world(platform)
    mesh = DeviceMesh("cpu", (world.size,), platform=platform)
    alone = DeviceMesh("cpu", (1,), world=world) if world.rank == 0 else DeviceMesh("cpu", [1], world=world)
    with nn.building(platform):
        model = nn.Linear(4, 6)
    if world.rank == 1:
        fully_shard(model, alone)
    with pytest.raises((FullyShardError, RankMismatchError)) as refusal:
        fully_shard(model, mesh)
    return f"{type(refusal.value).__name__}: {refusal.value}"


def test_the_others_learn_what_one_rank_has_raised(hp_platform: Platform) -> None:
    others, own = run_ranks(error_of_every_rank, 2, hp_platform, hp_platform.name)
    assert own.startswith("FullyShardError: module: ")
    assert own.endswith("Linear has been through fully_shard already")
    assert others.startswith("RankMismatchError: fully_shard(Linear): ranks differ: ")
    assert f"rank 1: failed, {own}" in others


@pytest.mark.real_ranks
def test_real_ranks_learn_it_too(hp_platform: Platform, rank_pool: Any) -> None:
    others, own = rank_pool(2).run("test_failing_rank:error_of_every_rank", hp_platform.name)
    assert own in others
