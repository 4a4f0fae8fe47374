"""Kinds of backwards of torch through sharded modules: twice, inside of a forward, to inputs, interrupted."""

from __future__ import annotations

import pytest
from torch_blocks import Block, Net, batch, checkpoint, reference_grads, shard_net

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import GradientPathError
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    FullyShardError,
    fully_shard,
)

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _on_torch(hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("torch's own modules")


@pytest.mark.parametrize("bucket_size", [None, 0], ids=["one buffer", "a buffer each"])
def test_two_backwards_through_one_forward(hp_platform, bucket_size):
    """The loss of rank 0 does not use the last block; all ranks reduce its gradients in both backwards."""

    def loss(net, rank):
        x = net.blocks[0](net.first(batch(rank)))
        beside = net.blocks[1](x)
        return ((x if rank == 0 else x + beside) ** 2).mean()

    class Beside(Net):
        def forward(self, rank):
            return loss(self, rank)

    expected = Beside()
    for rank in range(2):
        expected(rank).backward()

    def program():
        net = shard_net(hp_platform, Beside(), bucket_size=bucket_size)
        total = net(current_world(hp_platform).rank)
        net.set_is_last_backward(False)
        total.backward(retain_graph=True)
        net.set_is_last_backward(True)
        total.backward()
        for (name, parameter), reference in zip(net.named_parameters(), expected.parameters(), strict=True):
            if reference.grad is not None:
                torch.testing.assert_close(parameter.grad.full_tensor(), reference.grad, msg=name)

    run_ranks(program, 2, hp_platform)


class CheckpointedBlock(Block):
    """Recomputes its own call, as a `GradientCheckpointingLayer` of transformers does."""

    def __call__(self, x):
        return checkpoint(super().__call__, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_classes_that_checkpoint_their_own_call_have_full_parameters_in_both_runs(hp_platform, reentrant, stage):
    expected = reference_grads()

    def rank():
        net, kinds = Net(reentrant=reentrant), []
        for block in net.blocks:
            block.__class__ = CheckpointedBlock
        shard_net(hp_platform, net, zero_stage=stage)
        for block in net.blocks:
            block.register_forward_pre_hook(lambda module, args: kinds.append(type(module.up.weight)))
        (net(batch(current_world(hp_platform).rank)) ** 2).mean().backward()
        assert len(kinds) == 6
        assert hp_platform.DTensor not in kinds
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], msg=name)

    run_ranks(rank, 2, hp_platform)


def test_an_interrupted_backward_is_noticed(hp_platform):
    expected = reference_grads()

    def rank():
        net = shard_net(hp_platform, Net())
        out = net(batch(current_world(hp_platform).rank))

        def fail(grad):
            raise ArithmeticError("on purpose")

        net.blocks[1].register_full_backward_hook(lambda *_: fail(None))
        handle = next(iter(net.blocks[1]._backward_hooks))
        with pytest.raises(ArithmeticError):
            (net(batch(0)) ** 2).mean().backward()
        del net.blocks[1]._backward_hooks[handle], out
        net.zero_grad()
        (net(batch(current_world(hp_platform).rank)) ** 2).mean().backward()
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])

    run_ranks(rank, 2, hp_platform)


def test_a_backward_that_is_to_be_differentiated_is_refused(hp_platform):
    net, x = Net(), batch(0).requires_grad_()
    fully_shard(
        net, init_device_mesh(hp_platform.device_types[0], (1,), mesh_dim_names=("shard",), platform=hp_platform)
    )
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(net(x).sum(), x, create_graph=True)
    (grad,) = torch.autograd.grad(net(x).sum(), x)
    assert grad.any()


def test_a_backward_after_one_that_failed_in_a_recomputed_module_has_gradients(hp_platform):
    """The recomputation is the first to reach the module again, because there is no root around it."""
    expected = reference_grads()

    def rank():
        net = Net("around", True)
        mesh = init_device_mesh(hp_platform.device_types[0], (2,), mesh_dim_names=("shard",), platform=hp_platform)
        for part in (net.first, *net.blocks):
            fully_shard(part, mesh)
        _, parameters = zip(*net.named_parameters(), strict=True)
        loss = net(batch(current_world(hp_platform).rank)).square().mean()
        trap = net.blocks[-1].down.register_full_backward_hook(_fail)
        with pytest.raises(ArithmeticError, match="on purpose"):
            loss.backward(retain_graph=True)
        trap.remove()
        loss.backward()
        assert [x for x in net.parameters() if not hasattr(x, "placements")] == []
        for parameter, (name, grad) in zip(parameters, expected.items(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), grad, msg=name)

    run_ranks(rank, 2, hp_platform)


def _fail(*args):
    raise ArithmeticError("on purpose")


class Forces(torch.nn.Module):
    """Returns the forces, minus the gradient of an energy with respect to its input, and the energy."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh())])
        self.before, self.after = torch.nn.Linear(5, 5), torch.nn.Linear(7, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = self.after(self.blocks[0](self.before(x)))
            (grad,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
        return self.after.bias * -grad, energy


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_a_forward_may_have_a_backward_to_its_input_inside(hp_platform, grad_enabled):
    """The backward inside frees no parameters that the rest of the forward uses."""

    def rank():
        net, plain = shard_net(hp_platform, Forces()), Forces()
        for _ in range(2):
            with torch.set_grad_enabled(grad_enabled):
                found, expected = net(torch.ones(2, 5)), plain(torch.ones(2, 5))
            torch.testing.assert_close(found, expected)
            if grad_enabled:
                for each in (found, expected):
                    sum(x.square().sum() for x in each).backward()
        for parameter, other in zip(net.parameters(), plain.parameters(), strict=True):
            if grad_enabled:
                torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)
        assert all(module._fsdp.group.held_bytes == 0 for module in [net, *net.blocks])

    run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize("order", ["wpw", "wppw"])
def test_a_part_called_on_its_own_may_have_a_backward_to_its_input_inside(hp_platform, order):
    """Calls of the model and of its modules."""

    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.last = torch.nn.ModuleList([Forces()]), torch.nn.Linear(5, 5)

        def forward(self, x):
            return parts(self, x)

    def parts(net, x):
        grad, energy = net.blocks[0](x)
        return net.last(grad) + energy

    def rank():
        plain, net = Around(), Around()
        net.load_state_dict(plain.state_dict())
        mesh = init_device_mesh(hp_platform.device_types[0], (2,), mesh_dim_names=("shard",), platform=hp_platform)
        for module in (net.blocks[0].blocks[0], net.blocks[0], net.last, net):
            fully_shard(module, mesh)
        for letter in order:
            for each in (net, plain):
                x = torch.ones(2, 5)
                (each(x) if letter == "w" else parts(each, x)).square().sum().backward()
        for parameter, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)

    run_ranks(rank, 2, hp_platform)


def test_a_backward_to_named_parameters_is_refused(hp_platform):
    def rank():
        net = shard_net(hp_platform, Net())
        named = list(net.parameters())
        with pytest.raises(
            GradientPathError, match=r"backward\(inputs=...\): 17 of 17 weights get their gradients from fully_shard"
        ):
            net(torch.ones(2, 5)).sum().backward(inputs=named)
        for allow_unused in (None, True):
            with pytest.raises(GradientPathError, match=r"autograd\.grad: 17 of 17 .* then read weight\.grad"):
                torch.autograd.grad(net(torch.ones(2, 5)).sum(), named, allow_unused=allow_unused)
        assert all(parameter.grad is None for parameter in named)

    run_ranks(rank, 2, hp_platform)


def test_the_gradient_of_an_output_leaves_those_of_parameters(hp_platform):
    """The hooks of the last group then run in a backward that runs none of its nodes."""

    def rank():
        net = shard_net(hp_platform, Net())
        y = net(torch.ones(2, 5))
        torch.autograd.grad(y.square().sum(), y, retain_graph=True)
        assert all(parameter.grad is None for parameter in net.parameters())
        y.square().sum().backward()
        assert all(parameter.grad is not None for parameter in net.parameters())

    run_ranks(rank, 2, hp_platform)


def _grad_of_input(loss, x):
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    return grad


def _backward_to_input(loss, x):
    loss.backward(inputs=[x], retain_graph=True)
    return x.grad


@pytest.mark.parametrize("to_input", [_grad_of_input, _backward_to_input])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_backward_to_named_inputs_leaves_the_gradients_of_parameters(hp_platform, to_input, frozen):
    """None stays None, existing gradients are not changed, pending ones stay pending; a backward may follow."""

    def rank():
        plain, net = Net(), shard_net(hp_platform, Net())
        for each in (plain, net):
            each.blocks[1].requires_grad_(not frozen)
        inputs = [torch.full((2, 5), 1.0 + index, requires_grad=True) for index in range(3)]
        for index, sync in enumerate((False, True, True)):
            net.set_requires_gradient_sync(sync)
            x, before = inputs[index], [parameter.grad for parameter in net.parameters()]
            before = [grad if grad is None else grad.full_tensor().clone() for grad in before]
            loss = net(x).square().sum()
            with record_collectives() as log:
                found = to_input(loss, x)
            assert log.count("reduce_scatter") == 0
            torch.testing.assert_close(found, to_input(plain(x).square().sum(), x))
            for parameter, grad in zip(net.parameters(), before, strict=True):
                assert (parameter.grad is None) == (grad is None)
                assert grad is None or torch.equal(parameter.grad.full_tensor(), grad)
            loss.backward()
            plain(x).square().sum().backward()
        for parameter, expected in zip(net.parameters(), plain.parameters(), strict=True):
            assert (parameter.grad is None) == (expected.grad is None)
            if expected.grad is not None:
                torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
        assert all(module._fsdp.group.held_bytes == 0 for module in [net, *net.blocks])

    run_ranks(rank, 2, hp_platform)


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
    mesh = init_device_mesh(hp_platform.device_types[0], (1,), mesh_dim_names=("shard",), platform=hp_platform)
    with pytest.raises(
        FullyShardError, match=r"first\.weight: hooks .* registered by register_post_accumulate_grad_hook"
    ):
        fully_shard(net, mesh)
    handle.remove()
    fully_shard(net, mesh)


def test_outputs_are_changed_in_place(hp_platform):
    """As the Trainer of transformers scales a loss; one output, and several."""

    class Outputs(Net):
        def __init__(self, several):
            super().__init__()
            self.several = several

        def forward(self, x):
            y = super().forward(x)
            return (y.square().mean(), y + 0) if self.several else y.square().mean()

    def backward(net, x):
        found = net(x)
        loss = found[0] if net.several else found
        loss *= 3
        if net.several:
            found[1].mul_(2)
            loss = loss + found[1].sum()
        loss.backward()

    def rank():
        x = torch.ones(2, 5)
        for several in (False, True):
            plain = Outputs(several)
            net = Outputs(several)
            net.load_state_dict(plain.state_dict())
            backward(plain, x)
            backward(shard_net(hp_platform, net), x)
            for (name, one), other in zip(plain.named_parameters(), net.parameters(), strict=True):
                found = None if other.grad is None else other.grad.full_tensor()
                torch.testing.assert_close(found, one.grad, rtol=1e-5, atol=1e-6, msg=name)

    run_ranks(rank, 2, hp_platform)
