"""`fully_shard` on the device: simulated ranks wait for each other in backward, real ranks communicate over HCCL."""

import pytest
import torch
from torch import nn

from hp_dtensor import current_world, init_device_mesh
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.launch import RankPool
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.testing import run_ranks
from hp_fsdp import CPUOffloadPolicy, fully_shard, stream_optimizer


def trained(shards=True):
    """Return the losses of three steps, each rank with samples of its own."""
    torch.manual_seed(3)
    platform = get_platform("torch")
    world = current_world(platform)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).npu()
    samples = torch.linspace(-1, 1, 6 * 5).view(6, 5).npu()
    if shards:
        mesh = init_device_mesh("npu", (world.size,))
        for each in (model[0], model[2], model):
            fully_shard(each, mesh=mesh)
        samples = samples.chunk(world.size)[world.rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(samples).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def mean_losses(ranks):
    return torch.tensor(ranks).mean(0)


def test_simulated_ranks_wait_for_each_other_in_backward(platform):
    (expected,) = run_ranks(trained, 1, platform, False)
    losses = run_ranks(trained, 2, platform, timeout_seconds=60)
    torch.testing.assert_close(mean_losses(losses), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_offloaded_parameters_cannot_be_streamed(platform):
    def program():
        mesh = init_device_mesh("npu", (1,))
        model = fully_shard(nn.Linear(3, 2).npu(), mesh=mesh, offload_policy=CPUOffloadPolicy())
        with pytest.raises(CapabilityError, match=r"CPUOffloadPolicy\(parameters=False\)"):
            stream_optimizer(torch.optim.AdamW(model.parameters()), model)

    run_ranks(program, 1, platform)


def drawn():
    """Return what this rank draws on the device before and after it has waited for the others."""
    torch.manual_seed(current_world(get_platform("torch")).rank)
    group = init_device_mesh("npu", (2,)).get_group()
    first = torch.rand(2, device="npu")
    group.all_reduce(first.clone())
    return first.tolist(), torch.rand(2, device="npu").tolist()


def test_simulated_ranks_have_random_states_of_their_own(platform):
    for rank, numbers in enumerate(run_ranks(drawn, 2, platform)):
        torch.manual_seed(rank)
        assert list(numbers) == [torch.rand(2, device="npu").tolist() for _ in range(2)]


def on_real_rank():
    """Return the losses, and what a group of the second and third rank has summed, with its options."""
    platform = get_platform("torch")
    world = current_world(platform)
    losses = trained()
    if world.rank == 0:
        return losses, None
    group = world.group((1, 2))
    x = torch.full((2,), float(world.rank), device="npu")
    group.all_reduce(x)
    options = group.connection("npu").options
    return losses, (x.tolist(), list(options.global_ranks_in_group), options.group_id, platform.device.index)


def test_real_ranks_communicate_over_hccl(platform):
    (expected,) = run_ranks(trained, 1, platform, False)
    # No `rank_pool`, whose fork server would import everything before it refuses to fork on an accelerator.
    with RankPool(platform, 3) as pool:
        results = pool.run(on_real_rank)
    losses = mean_losses([losses for losses, _ in results])
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    (sum_1, ranks_1, name_1, device_1), (sum_2, ranks_2, name_2, device_2) = (each for _, each in results[1:])
    assert sum_1 == sum_2 == [3.0, 3.0]
    assert ranks_1 == ranks_2 == [1, 2]
    assert name_1 == name_2
    assert 0 < len(name_1) < 128
    assert (device_1, device_2) == (1, 2)
