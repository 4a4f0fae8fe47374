"""Models that are sharded already are refused by torch's own ways to train on many ranks, which would shard them again.

accelerate and Lightning Fabric wrap models in these, so their users get the same error.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp
from two_simulated_ranks import on_ranks

from hp_dtensor import ColwiseParallel, Shard, distribute_tensor, from_local, parallelize_module
from hp_dtensor.exceptions import CapabilityError, PlacementError, ShardingRuleError
from hp_platform_torch import patches
from hp_platform_torch.tensor import interop

WRAPPERS = {
    "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
    "FullyShardedDataParallel": torch.distributed.fsdp.FullyShardedDataParallel,
    "torch.distributed.fsdp.fully_shard": lambda model: torch.distributed.fsdp.fully_shard(
        model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    ),
}


@pytest.fixture(autouse=True)
def installed(platform):
    patches.refuse_in_fsdp_if_loaded()


@pytest.fixture
def job_of_one():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_sharded_model_is_refused_and_the_error_says_what_to_prepare(name, job_of_one):
    def rank(mesh, x):
        return parallelize_module(torch.nn.Sequential(torch.nn.Linear(3, 4)), mesh, {"0": ColwiseParallel()})

    with pytest.raises(
        ShardingRuleError, match=rf"^{name} of a model whose .*prepare the optimizer and the data loader"
    ):
        WRAPPERS[name](on_ranks(rank)[0])
    if name != "FullyShardedDataParallel":  # which trains on accelerators only
        WRAPPERS[name](torch.nn.Sequential(torch.nn.Linear(3, 4)))


def test_tensors_and_placements_of_torch_are_named(job_of_one):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    theirs = torch.distributed.tensor.distribute_tensor(torch.ones(4, 3), mesh, [torch.distributed.tensor.Shard(0)])

    def rank(ours, x):
        for make in (distribute_tensor, from_local):
            with pytest.raises(
                CapabilityError, match=r"got a DTensor of torch\.distributed\.tensor; .*from_torch_dtensor"
            ):
                make(theirs, ours, [Shard(0)])
            with pytest.raises(PlacementError, match=r"torch\.distributed\..*Shard, expected .* of hp_dtensor"):
                make(torch.ones(4, 3), ours, [torch.distributed.tensor.Shard(0)])
        return True

    assert all(on_ranks(rank))
    assert interop.from_torch_dtensor(theirs).placements == (Shard(0),)
