"""The services of this platform for hp-trainer."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.platform.registry import Registry
from hp_dtensor.spec.placements import Replicate, Shard
from hp_dtensor.tensor.conversions import distribute_tensor
from hp_dtensor.testing import run_ranks
from hp_platform_torch.trainer import plugin
from hp_trainer.config import AdamWConfig

SHAPES = {"weight": (5, 3), "bias": (3,), "norm": (1,)}
OPTIONS = AdamWConfig(lr=9.0, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
LEARNING_RATES = [0.1, 0.02, 0.3]


@pytest.fixture
def build(platform):
    registry = Registry("optimizer", "hp_platform_torch")
    with registry.registering("torch"):
        plugin.hp_optimizers(registry)
    entry = registry.get("adamw", "torch")
    assert entry.options is AdamWConfig
    return lambda parameters: entry.build(parameters.items(), OPTIONS, platform)


def values(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def train(parameters, optimizer, place):
    for step, learning_rate in enumerate(LEARNING_RATES, start=1):
        for name, grad in values(step).items():
            parameters[name].grad = place(name, grad)
        optimizer.step(learning_rate)
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in parameters.values())


def by_torch():
    """The same steps by torch's optimizer on full tensors."""
    parameters = {name: torch.nn.Parameter(x) for name, x in values(0).items()}
    options = {"betas": OPTIONS.betas, "eps": OPTIONS.eps, "weight_decay": OPTIONS.weight_decay}
    optimizer = torch.optim.AdamW(parameters.values(), foreach=False, **options)
    for step, learning_rate in enumerate(LEARNING_RATES, start=1):
        optimizer.param_groups[0]["lr"] = learning_rate
        for name, grad in values(step).items():
            parameters[name].grad = grad
        optimizer.step()
    state = {name: optimizer.state[parameter] for name, parameter in parameters.items()}
    return {name: x.detach() for name, x in parameters.items()}, state


def test_registering_imports_no_framework():
    code = (
        "import sys; from hp_platform_torch.trainer import plugin; from hp_dtensor.platform.registry import Registry; "
        "plugin.hp_optimizers(Registry('optimizer', 'hp_platform_torch')); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_steps_equal_those_of_torch(build):
    expected, state = by_torch()
    parameters = {name: torch.nn.Parameter(x) for name, x in values(0).items()}
    optimizer = build(parameters)
    train(parameters, optimizer, lambda name, grad: grad)
    assert optimizer.num_steps == 3
    for name, x in expected.items():
        # one rounding per operation: the fused kernel orders them otherwise
        torch.testing.assert_close(parameters[name].detach(), x, rtol=1e-6, atol=1e-7)
        for slot in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state()[name][slot], state[name][slot], rtol=1e-6, atol=1e-7)


def test_shards_are_trained_as_the_full_tensors(build):
    expected, _ = by_torch()
    placements = {"weight": Shard(0), "bias": Replicate(), "norm": Shard(0)}

    def run():
        mesh = init_device_mesh("cpu", (2,))

        def place(name, full):
            return distribute_tensor(full, mesh, [placements[name]], src_data_rank=None)

        parameters = {name: torch.nn.Parameter(place(name, x)) for name, x in values(0).items()}
        optimizer = build(parameters)
        for name, slots in optimizer.state().items():
            assert all(slot.spec is parameters[name].spec for slot in slots.values())
        train(parameters, optimizer, place)
        return {name: x.full_tensor().detach() for name, x in parameters.items()}

    for got in run_ranks(run, 2, "torch"):
        for name, x in expected.items():
            torch.testing.assert_close(got[name], x, rtol=1e-6, atol=1e-7)


def test_a_written_state_and_step_count_continue_the_run(build):
    """As a checkpoint does it: the state's tensors are overwritten, then the number of steps is set."""
    parameters = {name: torch.nn.Parameter(x) for name, x in values(0).items()}
    optimizer = build(parameters)
    train(parameters, optimizer, lambda name, grad: grad)
    twins = {name: torch.nn.Parameter(x.detach().clone()) for name, x in parameters.items()}
    resumed = build(twins)
    for name, slots in resumed.state().items():
        for slot, x in slots.items():
            x.copy_(optimizer.state()[name][slot])
    resumed.num_steps = optimizer.num_steps
    for tensors, one in ((parameters, optimizer), (twins, resumed)):
        for name, grad in values(7).items():
            tensors[name].grad = grad
        one.step(0.1)
    assert all(torch.equal(parameters[name], twins[name]) for name in SHAPES)


def test_parameters_without_a_gradient_stay(build):
    parameters = {name: torch.nn.Parameter(x) for name, x in values(0).items()}
    parameters["weight"].grad = torch.ones(5, 3)
    build(parameters).step(0.1)
    assert torch.equal(parameters["bias"], values(0)["bias"])
    assert not torch.equal(parameters["weight"], values(0)["weight"])
