"""Hooks for accumulated gradients of torch's parameters, around `fully_shard`."""

from __future__ import annotations

import pytest
from torch_blocks import Net, shard_net

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    FullyShardError,
    fully_shard,
)

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint


@pytest.fixture(autouse=True)
def _on_torch(hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("torch's own modules")


@pytest.mark.parametrize("sync", ["every", "last", "deferred"])
def test_hooks_of_parameters_run_once_their_gradient_is_reduced(hp_platform, sync):
    """Once for each backward that sets it, also for a module that ran twice."""

    def rank():
        net = shard_net(hp_platform, Net())
        net(torch.ones(1, 5))
        net._fsdp.group.settings.defers_reduction = sync == "deferred"
        seen = {name: [] for name, _ in net.named_parameters()}
        for name, parameter in net.named_parameters():

            def hook(parameter, name=name):
                assert not torch.is_grad_enabled()
                assert not parameter.grad.requires_grad
                seen[name].append(parameter.grad.full_tensor())

            parameter.register_post_accumulate_grad_hook(hook)
        for micro in range(2):
            net.set_requires_gradient_sync(sync != "last" or micro == 1)
            x = torch.full((2, 5), current_world(hp_platform).rank + 1.0)
            (net(x) + net.blocks[0](x)).sum().backward()
            if sync == "deferred":
                assert len(seen["first.weight"]) == micro
                net._fsdp.schedule.context.finish_reductions()
        for name, parameter in net.named_parameters():
            assert len(seen[name]) == (1 if sync == "last" else 2), name
            assert torch.equal(seen[name][-1], parameter.grad.full_tensor()), name

    run_ranks(rank, 2, hp_platform)


def test_optimizers_may_take_their_step_in_hooks(hp_platform):
    """The weights equal those of a step after the backward, and no gradient remains."""

    def rank(in_hooks):
        net = shard_net(hp_platform, Net())
        optimizers = {parameter: torch.optim.AdamW([parameter], lr=0.1) for parameter in net.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in net.parameters() if in_hooks else ():
            parameter.register_post_accumulate_grad_hook(step)
        for index in range(3):
            net(torch.full((2, 5), current_world(hp_platform).rank + index + 1.0)).square().sum().backward()
            assert all((parameter.grad is None) == in_hooks for parameter in net.parameters())
            for parameter in () if in_hooks else net.parameters():
                step(parameter)
        return [parameter.full_tensor().detach() for parameter in net.parameters()]

    found, expected = (run_ranks(rank, 2, hp_platform, in_hooks)[0] for in_hooks in (True, False))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_hooks_run_once_where_all_is_recomputed_below_a_root_without_parameters(hp_platform, num_blocks):
    """Each group is gathered twice and reduced once, however many there are."""

    class Root(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(num_blocks))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    def rank():
        net, calls = shard_net(hp_platform, Root()), []
        for name, parameter in net.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: calls.append(name))
        with record_collectives() as log:
            net(torch.ones(2, 5, requires_grad=True)).sum().backward()
        assert sorted(calls) == sorted(name for name, _ in net.named_parameters())
        assert (log.count("all_gather"), log.count("reduce_scatter")) == (2 * num_blocks, num_blocks)

    run_ranks(rank, 2, hp_platform)


def test_hooks_run_once_where_the_loss_has_a_term_in_the_sharded_parameters_themselves(hp_platform):
    """Autograd has the gradient of that term before the others are reduced. A backward to it alone runs no hook."""

    def rank():
        net, plain, seen = shard_net(hp_platform, Net()), Net(), []
        weight = net.blocks[1].up.weight
        weight.register_post_accumulate_grad_hook(lambda x: seen.append(x.grad.full_tensor().clone()))
        x = torch.ones(2, 5)
        (net(x).sum() + (weight * weight).sum().full_tensor()).backward()
        (plain(x).sum() + plain.blocks[1].up.weight.square().sum()).backward()
        (found,) = seen
        torch.testing.assert_close(found, plain.blocks[1].up.weight.grad)

    run_ranks(rank, 2, hp_platform)


def _hooked(parameter, backward):
    """Return the hooks called in two backwards, of which the first one removes the second and adds a third."""
    calls, handles = [], []

    def first(parameter):
        calls.append("first")
        handles.pop().remove() if handles else None
        if "third" not in calls:
            parameter.register_post_accumulate_grad_hook(lambda parameter: calls.append("third"))

    parameter.register_post_accumulate_grad_hook(first)
    handles.append(parameter.register_post_accumulate_grad_hook(lambda parameter: calls.append("second")))
    for _ in range(2):
        backward()
        calls.append("over")
    handle = parameter.register_post_accumulate_grad_hook(lambda parameter: parameter.grad)
    with pytest.raises(RuntimeError, match="should return None"):
        backward()
    handle.remove()
    return calls


def test_hooks_are_called_and_removed_as_by_autograd(hp_platform):
    def rank():
        net, plain, x = shard_net(hp_platform, Net()), Net(), torch.ones(2, 5)
        found = _hooked(net.first.weight, lambda: net(x).sum().backward())
        assert found == _hooked(plain.first.weight, lambda: plain(x).sum().backward())
        with pytest.raises(RuntimeError, match="doesn't require gradient"):
            net.requires_grad_(False).first.weight.register_post_accumulate_grad_hook(print)

    run_ranks(rank, 2, hp_platform)


def test_hooks_for_accumulated_gradients_before_sharding_are_refused(hp_platform):
    net = Net()
    handle = net.first.weight.register_post_accumulate_grad_hook(print)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",), platform=hp_platform)
    with pytest.raises(
        FullyShardError, match=r"first\.weight: hooks .* registered by register_post_accumulate_grad_hook"
    ):
        fully_shard(net, mesh)
    handle.remove()
    fully_shard(net, mesh)
