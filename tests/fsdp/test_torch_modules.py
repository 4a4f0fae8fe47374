"""`fully_shard` on modules, optimizers and checkpointing that are torch's own."""

from __future__ import annotations

import pytest

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.world import DONE, ProcessGroup, current_world, record_collectives
from hp_dtensor.exceptions import GradientPathError
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    FSDPStateError,
    FullyShardError,
    MixedPrecisionPolicy,
    StateDictError,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    init_optimizer_state,
    set_model_state_dict,
    set_optimizer_state_dict,
    summon_full_params,
)

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
dcp = pytest.importorskip("torch.distributed.checkpoint")
TorchDispatchMode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode


@pytest.fixture(autouse=True)
def _on_torch(hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("torch's own modules")


class Block(torch.nn.Module):
    """A gated MLP; its middle may be recomputed in backward."""

    def __init__(self, recompute, reentrant):
        super().__init__()
        self.up, self.down = torch.nn.Linear(5, 11), torch.nn.Linear(11, 5)
        self.gate = torch.nn.Parameter(torch.ones(5))
        self.recompute, self.reentrant = recompute, reentrant

    def middle(self, x):
        return self.down(torch.relu(self.up(x)))

    def forward(self, x):
        if self.recompute == "inside":
            return x * self.gate + checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return x * self.gate + self.middle(x)


class Net(torch.nn.Module):
    def __init__(self, recompute=None, reentrant=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(5, 5)
        self.blocks = torch.nn.ModuleList(Block(recompute, reentrant) for _ in range(3))
        self.recompute, self.reentrant = recompute, reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            around = self.recompute == "around"
            x = checkpoint(block, x, use_reentrant=self.reentrant) if around else block(x)
        return x


def shard_net(platform, net, **options):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",), platform=platform)
    for block in net.blocks:
        fully_shard(block, mesh, **options)
    return fully_shard(net, mesh, **options)


def batch(rank):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))


def reference_grads():
    net = Net()
    for rank in range(2):
        ((net(batch(rank)) ** 2).mean() / 2).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_activation_checkpointing_costs_no_further_collective(hp_platform, where, reentrant):
    expected = reference_grads()

    def rank():
        net = shard_net(hp_platform, Net(where, reentrant))
        for _ in range(2):
            net.zero_grad()
            with record_collectives() as log:
                (net(batch(current_world(hp_platform).rank)) ** 2).mean().backward()
        assert log.count("all_gather") == 4 + 3
        assert log.count("reduce_scatter") == 4
        assert [block._fsdp.group.held_bytes for block in net.blocks] == [0, 0, 0]
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])

    run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize("bucket_size", [None, 0], ids=["one buffer", "a buffer each"])
def test_two_backwards_through_one_forward(hp_platform, bucket_size):
    """The loss of rank 0 leaves the last block out; all ranks reduce its gradients in both backwards all the same."""

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


def test_optimizer_clipping_and_state_dict_of_torch(hp_platform):
    def train(net, ranks):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
        for _ in range(3):
            optimizer.zero_grad()
            for rank in ranks:
                ((net(batch(rank)) ** 2).mean() * (1 if len(ranks) == 1 else 1 / len(ranks))).backward()
            optimizer.step()
        return net

    expected = dict(train(Net(), [0, 1]).named_parameters())

    def rank():
        net = train(shard_net(hp_platform, Net()), [current_world(hp_platform).rank])
        other = shard_net(hp_platform, Net())
        other.load_state_dict(net.state_dict())
        for name, parameter in other.named_parameters():
            torch.testing.assert_close(parameter.full_tensor(), expected[name])

    run_ranks(rank, 2, hp_platform)


def test_nothing_is_intercepted_in_steps_of_torchs_optimizers(hp_platform, monkeypatch):
    cls = hp_platform.DTensor
    real, stepping, seen = cls.__dict__["__torch_function__"].__func__, set(), []

    def recorded(cls, func, types, args=(), kwargs=None):
        if current_world(hp_platform).rank in stepping:
            seen.append(func)
        return real(cls, func, types, args, kwargs)

    def rank():
        net, rank = shard_net(hp_platform, Net()), current_world(hp_platform).rank
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        for step in range(3):
            optimizer.zero_grad()
            (net(batch(rank)) ** 2).mean().backward()
            if step:
                stepping.add(rank)
            optimizer.step()
            stepping.discard(rank)

    monkeypatch.setattr(cls, "__torch_function__", classmethod(recorded))
    run_ranks(rank, 2, hp_platform)
    assert seen == []


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


def test_parameters_from_meta_may_be_given_values_while_they_are_whole(hp_platform):
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
    """Torch does not count them; a rank may have nothing else of a group."""

    def rank():
        with torch.device("meta"):
            net = torch.nn.Sequential(torch.nn.Linear(5, 20), torch.nn.LayerNorm(20))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",), platform=hp_platform)
        for module in (*net, net):
            fully_shard(module, mesh, **options)
        for module in net:
            module.weight.data.fill_(1.0)
            module.bias.data.zero_()
        return net(batch(0)).shape

    assert run_ranks(rank, 2, hp_platform) == [(4, 20)] * 2


def test_ignored_parameters_that_torch_replaces_stay_ignored(hp_platform):
    """`to_empty` makes other objects of those that come from the meta device."""

    def rank():
        with torch.device("meta"):
            net = Net()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",), platform=hp_platform)
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
        fully_shard(net, init_device_mesh("cpu", (2,), mesh_dim_names=("shard",), platform=hp_platform))
        initialise(net.to_empty(device="cpu"))
        for (name, mine), wanted in zip(net.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), wanted.data, rtol=0, atol=0, msg=name)

    run_ranks(rank, 2, hp_platform)


def test_a_backward_that_is_to_be_differentiated_is_refused(hp_platform):
    net, x = Net(), batch(0).requires_grad_()
    fully_shard(net, init_device_mesh("cpu", (1,), mesh_dim_names=("shard",), platform=hp_platform))
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(net(x).sum(), x, create_graph=True)
    (grad,) = torch.autograd.grad(net(x).sum(), x)
    assert grad.any()


@pytest.mark.parametrize("sync", ["every", "last", "deferred"])
def test_hooks_of_parameters_run_once_their_gradient_is_reduced(hp_platform, sync):
    """Once for each backward that writes it, also of a module that ran twice."""

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
                net._fsdp.schedule.finish_reductions()
        for name, parameter in net.named_parameters():
            assert len(seen[name]) == (1 if sync == "last" else 2), name
            assert torch.equal(seen[name][-1], parameter.grad.full_tensor()), name

    run_ranks(rank, 2, hp_platform)


def test_optimizers_may_take_their_step_in_hooks(hp_platform):
    """The same weights as after a step when the backward is over, and no gradient is left."""

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


def test_a_backward_after_one_that_failed_in_a_recomputed_module_has_gradients(hp_platform):
    """The recomputation is the first to come to the module again: without a root nothing outside of it does."""
    expected = reference_grads()

    def rank():
        net = Net("around", True)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",), platform=hp_platform)
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


def test_hooks_run_once_where_the_loss_has_a_term_in_the_sharded_parameters_themselves(hp_platform):
    """Autograd has the gradient of that term before the others are reduced; none comes from a backward to it alone."""

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
    """What is called in each of two backwards: the first hook removes the second one, and adds another."""
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
    with pytest.raises(FullyShardError, match=r"first\.weight: hooks .* register_post_accumulate_grad_hook is given"):
        fully_shard(net, mesh)
    handle.remove()
    fully_shard(net, mesh)


class Forces(torch.nn.Module):
    """Minus the gradient of an energy in its input, and the energy: interatomic potentials give both."""

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
    """What is in use by this forward stays whole behind it."""

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
    """Calls of the whole and of its parts."""

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
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",), platform=hp_platform)
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


def _grad_of_input(loss, x):
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    return grad


def _backward_to_input(loss, x):
    loss.backward(inputs=[x], retain_graph=True)
    return x.grad


@pytest.mark.parametrize("to_input", [_grad_of_input, _backward_to_input])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_backward_to_named_inputs_leaves_the_gradients_of_parameters(hp_platform, to_input, frozen):
    """None stays None, what is there stays, what waits for its reduction waits on; a backward may follow."""

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


@pytest.mark.parametrize("where", ["before", "after", "around"])
def test_forwards_are_compiled_and_hooks_are_not(hp_platform, where):
    """Dynamo would take seconds for them, and compile them again whenever a pass has another number of groups."""
    counters = pytest.importorskip("torch._dynamo.utils").counters
    if torch.__version__ < "2.12":
        pytest.skip("Dynamo of torch 2.11 ends a process whose threads, the ranks here, compile in turns")

    def compile_(modules):
        for module in modules:
            module.compile(backend="eager")

    def rank():
        net, plain = Net(), Net()
        if where == "before":
            compile_(net.blocks)
        shard_net(hp_platform, net)
        if where != "before":
            compile_(net.blocks if where == "after" else [net])
        for index in range(3):
            x = batch(index)
            net(x).square().sum().backward()
            plain(x).square().sum().backward()
        for parameter, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)

    torch._dynamo.reset()
    counters.clear()
    run_ranks(rank, 2, hp_platform)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


class Normalized(torch.nn.Module):
    """Normalizes its weight before it computes with it."""

    def __init__(self):
        super().__init__()
        self.embed, self.map = torch.nn.Embedding(7, 5, max_norm=1.0), torch.nn.Linear(5, 5)

    def forward(self, ids, writes):
        if writes == "map":
            with torch.no_grad():
                self.map.weight.div_(self.map.weight.norm())
        return self.map(self.embed(ids) if writes == "embed" else self.embed.weight[ids])


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("writes", ["embed", "map"])
def test_a_forward_that_writes_its_parameters_is_refused_by_name(hp_platform, stage, writes):
    """Where every rank computes with a copy; the next step works."""

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",), platform=hp_platform)
        net, ids = fully_shard(Normalized(), mesh, zero_stage=stage), torch.tensor([1, 3])
        for _ in range(2) if stage else ():
            with pytest.raises(FSDPStateError, match=rf"group Normalized .*: {writes}\.weight: written in place"):
                net(ids, writes)
            net(ids, "").sum().backward()
        if not stage:
            net(ids, writes).sum().backward()
        assert all(parameter.grad is not None for parameter in net.parameters())

    run_ranks(rank, 2, hp_platform)


def test_sparse_gradients_are_refused_by_name(hp_platform):
    net = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True))
    fully_shard(net, init_device_mesh("cpu", (1,), mesh_dim_names=("shard",), platform=hp_platform))
    with pytest.raises(FSDPStateError, match=r"rank 0: the gradient of 0\.weight cannot be reduced: .*sparse=False"):
        net(torch.tensor([1, 2])).sum().backward()


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_that_torch_gives_new_memory_are_taken_in(hp_platform, stage):
    """The usual way from meta: `to_empty` and initialisation after `fully_shard`."""
    expected = Net()

    def rank():
        with torch.device("meta"):
            net = Net()
        shard_net(hp_platform, net, zero_stage=stage)
        before = dict(net.named_parameters())
        net.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                assert parameter is before[name]
                mine, wanted = hp_platform.unwrap(parameter), dict(expected.named_parameters())[name]
                offset, shape = parameter.spec.box()
                mine.copy_(wanted[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))])
        torch.testing.assert_close(net(batch(0)), expected(batch(0)))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        assert not net(batch(0)).any()

    run_ranks(rank, 2, hp_platform)


def test_bfloat16_parameters_with_float32_reduction(hp_platform):
    def rank():
        policy = MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32", output_dtype="float32")
        net = shard_net(hp_platform, Net(), mp_policy=policy)
        out = net(batch(0))
        assert out.dtype == torch.float32
        out.sum().backward()
        assert {parameter.grad.dtype for parameter in net.parameters()} == {torch.float32}

    run_ranks(rank, 2, hp_platform)


class CopyCounter(TorchDispatchMode):
    """Counts operations that move data from one buffer to another."""

    MOVES = ("copy_", "_to_copy", "clone", "cat", "split_with_sizes_copy", "_chunk_cat")

    def __init__(self):
        super().__init__()
        self.moves = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.MOVES or name.startswith("_foreach_copy"):
            self.moves.append(name)
        return func(*args, **(kwargs or {}))


def test_nothing_is_copied_but_each_gradient_once(hp_platform, monkeypatch):
    """Between shard and collective, and between collective and parameters; collectives themselves are left out."""
    for name in ("all_gather_into", "reduce_scatter_into"):
        monkeypatch.setattr(ProcessGroup, name, lambda self, output, x, *rest, **options: DONE)

    def rank():
        net = shard_net(hp_platform, Net())
        x = batch(0)
        for _ in range(2):
            net.zero_grad()
            with CopyCounter() as forward:
                loss = net(x).sum()
            with CopyCounter() as backward:
                loss.backward()
        assert forward.moves == []
        assert backward.moves == ["copy_"] * len(list(net.parameters()))

    run_ranks(rank, 2, hp_platform)


def test_mixed_precision_casts_the_shard_once_per_gather(hp_platform, monkeypatch):
    for name in ("all_gather_into", "reduce_scatter_into"):
        monkeypatch.setattr(ProcessGroup, name, lambda self, output, x, *rest, **options: DONE)

    def rank():
        policy = MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32")
        net = shard_net(hp_platform, Net(), mp_policy=policy)
        x = batch(0).bfloat16()
        with CopyCounter() as forward:
            loss = net(x).sum()
        assert forward.moves == ["_to_copy"] * 4
        with CopyCounter() as backward:
            loss.backward()
        assert backward.moves.count("_to_copy") == 3
        assert backward.moves.count("copy_") == len(list(net.parameters()))

    run_ranks(rank, 2, hp_platform)


class Overlap(torch.autograd.Function):
    """The product of two parameters, whose gradients are the parameters themselves and not copies."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return torch.dot(x, y)

    @staticmethod
    def backward(ctx, grad):
        assert grad == 1
        x, y = ctx.saved_tensors
        return y, x


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.arange(5.0))
        self.y = torch.nn.Parameter(torch.arange(5.0) - 7)

    def forward(self):
        return Overlap.apply(self.x, self.y)


def test_a_gradient_may_lie_in_the_memory_of_a_parameter(hp_platform):
    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",), platform=hp_platform)
        pair = fully_shard(Pair(), mesh)
        pair().backward()
        return pair.x.grad.full_tensor(), pair.y.grad.full_tensor()

    for x_grad, y_grad in run_ranks(rank, 2, hp_platform):
        assert torch.equal(x_grad, torch.arange(5.0) - 7)
        assert torch.equal(y_grad, torch.arange(5.0))


def _trained(mesh, steps, **options):
    """A model and an optimizer after some steps, and what goes on with them."""
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh, **options)
    fully_shard(net, mesh, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)

    def train(steps):
        losses = []
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = net(torch.randn(4, 5)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    train(steps)
    return net, optimizer, train


def goes_on_from_a_distributed_checkpoint(folder, options):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",), platform="torch")
    net, optimizer, train = _trained(mesh, range(2), **options)
    dcp.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    replicas = mesh.unflatten("dp", (3, 1), ("replicate", "shard"))
    other, other_optimizer, other_train = _trained(replicas, range(7, 9), **options)
    state = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other_optimizer.load_state_dict(state["optimizer"])
    return train(range(2, 5)), other_train(range(2, 5))


def goes_on_with_a_new_optimizer(folder):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",), platform="torch")
    net, optimizer, train = _trained(mesh, range(2))
    dcp.save(_state_of(net, optimizer), checkpoint_id=folder)
    other, other_optimizer, other_train = _trained(mesh, ())
    state = _state_of(other, other_optimizer)
    dcp.load(state, checkpoint_id=folder)
    with pytest.raises(StateDictError, match=r"all of its state.*init_optimizer_state before get_optimizer_state_dict"):
        set_optimizer_state_dict(other, other_optimizer, state["optimizer"])
    init_optimizer_state(other, other_optimizer)
    state = _state_of(other, other_optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"])
    set_optimizer_state_dict(other, other_optimizer, state["optimizer"])
    return train(range(2, 5)), other_train(range(2, 5))


def _state_of(net, optimizer):
    return {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}


def test_a_new_optimizer_reads_a_distributed_checkpoint_once_it_has_state(rank_pool, tmp_path):
    for there, here in rank_pool(3).run("test_torch_modules:goes_on_with_a_new_optimizer", str(tmp_path)):
        assert there == pytest.approx(here, rel=1e-6)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_distributed_checkpoint_of_torch_goes_on_in_another_layout(rank_pool, tmp_path, reshard):
    """It is read in place, while parameters are whole too; losses of order ten, sums in another order."""
    options = {"reshard_after_forward": reshard}
    for there, here in rank_pool(3).run(
        "test_torch_modules:goes_on_from_a_distributed_checkpoint", str(tmp_path), options
    ):
        assert there == pytest.approx(here, rel=1e-6)


def test_a_container_is_refused(hp_platform):
    modules = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    mesh = init_device_mesh("cpu", (1,), platform=hp_platform)
    with pytest.raises(FullyShardError, match="a ModuleList is never called itself"):
        fully_shard(modules, mesh)
    fully_shard(list(modules), mesh)
