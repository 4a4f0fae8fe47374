"""Modules of torch from the meta device: initialised before, during or after sharding."""

from __future__ import annotations

import pytest
from torch_blocks import Net, batch, shard_net

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    FSDPStateError,
    fully_shard,
    summon_full_params,
)

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _on_torch(hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("torch's own modules")


def test_parameters_from_meta_must_be_given_values(hp_platform):
    def rank():
        with torch.device("meta"):
            net = Net()
        shard_net(hp_platform, net)
        assert all(not parameter.is_meta for parameter in net.parameters())
        for _ in range(2):
            with pytest.raises(FSDPStateError, match=r"weight.* came from the meta device and have no values yet"):
                net(batch(0))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        assert net(batch(0)).shape == (4, 5)

    run_ranks(rank, 2, hp_platform)


def test_parameters_from_meta_may_be_given_values_while_they_are_unsharded(hp_platform):
    def rank():
        with torch.device("meta"):
            net = Net()
        shard_net(hp_platform, net)
        with summon_full_params(net), torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.1)
        return net(batch(0)).detach()

    plain = Net()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.fill_(0.1)
    for found in run_ranks(rank, 2, hp_platform):
        torch.testing.assert_close(found, plain(batch(0)).detach())


@pytest.mark.parametrize("options", [{"threshold": 0.25}, {"bucket_size": 0}, {}])
def test_zeros_written_through_data_are_values(hp_platform, options):
    """torch does not count such writes, and a rank may hold nothing else of a group."""

    def rank():
        with torch.device("meta"):
            net = torch.nn.Sequential(torch.nn.Linear(5, 20), torch.nn.LayerNorm(20))
        mesh = init_device_mesh(hp_platform.device_types[0], (2,), mesh_dim_names=("shard",), platform=hp_platform)
        for module in (*net, net):
            fully_shard(module, mesh, **options)
        for module in net:
            module.weight.data.fill_(1.0)
            module.bias.data.zero_()
        return net(batch(0)).shape

    assert run_ranks(rank, 2, hp_platform) == [(4, 20)] * 2


def test_ignored_parameters_that_torch_replaces_stay_ignored(hp_platform):
    """`to_empty` replaces the parameter objects from the meta device."""

    def rank():
        with torch.device("meta"):
            net = Net()
        mesh = init_device_mesh(hp_platform.device_types[0], (2,), mesh_dim_names=("shard",), platform=hp_platform)
        fully_shard(net, mesh, ignored_params=net.first.parameters())
        before = net.first.weight
        net.to_empty(device="cpu")
        assert net.first.weight is not before
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.1)
        net(batch(0)).sum().backward()
        assert net.first.weight.grad.shape == net.first.weight.shape

    run_ranks(rank, 2, hp_platform)


def test_modules_that_come_from_meta_initialise_themselves_as_unsharded_ones(hp_platform):
    """`to_empty`, then `reset_parameters` and `torch.nn.init`: the values of one device."""

    def initialise(net):
        torch.manual_seed(3)
        for module in net.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        first = next(net.parameters())
        torch.nn.init.normal_(first, 0.5, std=0.1)
        torch.nn.init.constant_(list(net.parameters())[-1], 0.25)
        return net

    def make():
        return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Embedding(3, 5))

    expected = initialise(make())

    def rank():
        with torch.device("meta"):
            net = make()
        fully_shard(
            net, init_device_mesh(hp_platform.device_types[0], (2,), mesh_dim_names=("shard",), platform=hp_platform)
        )
        initialise(net.to_empty(device="cpu"))
        for (name, mine), wanted in zip(net.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), wanted.data, rtol=0, atol=0, msg=name)

    run_ranks(rank, 2, hp_platform)
