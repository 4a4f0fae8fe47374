"""`fully_shard` on modules, optimizers and checkpointing that are torch's own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from torch_blocks import Net, batch, reference_grads, shard_net

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import DONE, ProcessGroup, record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    FSDPStateError,
    FullyShardError,
    MixedPrecisionPolicy,
    fully_shard,
)

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
TorchDispatchMode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode


@pytest.fixture(autouse=True)
def _on_torch(hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("torch's own modules")


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
    """A write to an unsharded parameter would be lost. The next step works."""

    def rank():
        mesh = init_device_mesh(hp_platform.device_types[0], (2,), mesh_dim_names=("shard",), platform=hp_platform)
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
    fully_shard(
        net, init_device_mesh(hp_platform.device_types[0], (1,), mesh_dim_names=("shard",), platform=hp_platform)
    )
    with pytest.raises(FSDPStateError, match=r"rank 0: the gradient of 0\.weight cannot be reduced: .*sparse=False"):
        net(torch.tensor([1, 2])).sum().backward()


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_that_torch_gives_new_memory_are_taken_in(hp_platform, stage):
    """The usual initialisation from meta: `to_empty` and `reset_parameters` after `fully_shard`."""
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


def test_hooks_get_cast_inputs_and_outputs_before_their_cast(hp_platform):
    """Wherever they were added; what the last one returns is cast. Torch's order depends on when they were added."""

    def rank():
        seen, net = [], torch.nn.Sequential(torch.nn.Linear(5, 5))

        def pre(module, args):
            seen.append(args[0].dtype)

        def post(module, args, output):
            seen.append(output.dtype)
            return output.double()

        def add(prepend):
            net.register_forward_pre_hook(pre, prepend=prepend)
            net.register_forward_hook(post, prepend=prepend)

        add(prepend=False)
        policy = MixedPrecisionPolicy(param_dtype="bfloat16", output_dtype="float32")
        mesh = init_device_mesh(hp_platform.device_types[0], (2,), mesh_dim_names=("shard",), platform=hp_platform)
        fully_shard(net, mesh, mp_policy=policy)
        add(prepend=True)
        assert net(batch(0)).dtype == torch.float32
        assert seen == [torch.bfloat16] * 3 + [torch.float64]

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
    """Between shard and collective, and between collective and parameters. Collectives are not counted."""
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


def test_a_gradient_is_written_while_a_graph_saves_another_one(hp_platform):
    """Gradients are parts of one buffer, each with a version counter of its own."""

    def rank():
        net = shard_net(hp_platform, Net())
        (net(batch(current_world(hp_platform).rank)) ** 2).mean().backward()
        scale = torch.ones((), requires_grad=True)
        weight, bias = (x.grad.to_local() for x in net.blocks[0].down.parameters())
        saving = (weight * scale).sum()
        bias.mul_(2)
        saving.backward()
        torch.testing.assert_close(scale.grad, weight.sum())

    run_ranks(rank, 2, hp_platform)


def test_a_gradient_may_lie_in_the_memory_of_a_parameter(hp_platform):
    def rank():
        mesh = init_device_mesh(hp_platform.device_types[0], (2,), mesh_dim_names=("shard",), platform=hp_platform)
        pair = fully_shard(Pair(), mesh)
        pair().backward()
        return pair.x.grad.full_tensor(), pair.y.grad.full_tensor()

    for x_grad, y_grad in run_ranks(rank, 2, hp_platform):
        assert torch.equal(x_grad, torch.arange(5.0) - 7)
        assert torch.equal(y_grad, torch.arange(5.0))


def _trained(mesh, steps, **options):
    """Return a model and an optimizer after some steps, and a function that takes further steps."""
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


@pytest.mark.parametrize("reshard", [True, False])
def test_a_distributed_checkpoint_of_torch_goes_on_in_another_layout(rank_pool, tmp_path, reshard):
    """It is read in place, while parameters are unsharded too; losses of order ten, sums in another order."""
    options = {"reshard_after_forward": reshard}
    for there, here in rank_pool(3).run(f"{__file__}:goes_on_from_a_distributed_checkpoint", str(tmp_path), options):
        assert there == pytest.approx(here, rel=1e-6)


def test_a_container_is_refused(hp_platform):
    modules = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    mesh = init_device_mesh(hp_platform.device_types[0], (1,), platform=hp_platform)
    with pytest.raises(FullyShardError, match="a ModuleList is never called itself"):
        fully_shard(modules, mesh)
    fully_shard(list(modules), mesh)


LATER = """
import sys
import torch
from hp_dtensor import ColwiseParallel, init_device_mesh, parallelize_module
from hp_fsdp import fully_shard
mesh = init_device_mesh("cpu", (1,), platform="torch")
models = [torch.nn.Sequential(torch.nn.Linear(3, 4)) for _ in range(2)]
fully_shard(models[0], mesh)
parallelize_module(models[1], mesh, {"0": ColwiseParallel()})
assert "torch.distributed.fsdp" not in sys.modules
from torch.distributed.fsdp import fully_shard
for model in models:
    fully_shard(model)
    try:
        model(torch.ones(2, 3))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.real_ranks
def test_the_fully_shard_of_torch_loaded_later_is_refused_by_the_first_forward(free_port):
    job = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, "-c", LATER]
    ran = subprocess.run(command, env=os.environ | job, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    ours, parallel = ran.stdout.splitlines()
    assert "is not the parameter that fully_shard has set there" in ours
    assert "give a sharded model to no other fully_shard" in ours
    assert parallel.startswith("MixedOperandsError")
