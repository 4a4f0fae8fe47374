"""The trainer's AdamW against the platform's own, on plain tensors and on shards."""

from __future__ import annotations

from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.spec.placements import Replicate, Shard
from hp_dtensor.tensor.conversions import distribute_tensor
from hp_dtensor.testing import run_ranks
from hp_platform_mindspore import optim
from hp_platform_mindspore.trainer.optimizers import AdamW
from hp_trainer.plugins import registries

OPTIONS = SimpleNamespace(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
SHAPES = {"matrix": (5, 3), "vector": (4,), "scalar": ()}
SLOTS = ("exp_avg", "exp_avg_sq")
RATES = [0.1, 0.05, 0.2, 0.1, 0.01]


def plain(name, array):
    return ms.Tensor(array.astype(np.float32))


def values(step):
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def made(platform, place):
    return {name: platform.Parameter(place(name, array)) for name, array in values(0).items()}


def expected(platform):
    """Return weights and moments of the platform's own AdamW, whose tests compare it with its definition."""
    parameters = made(platform, plain)
    optimizer = optim.AdamW(parameters.values(), lr=0.0, **vars(OPTIONS))
    for step, rate in enumerate(RATES, 1):
        optimizer.param_groups[0]["lr"] = rate
        for name, grad in values(step).items():
            platform.set_grad(parameters[name], plain(name, grad))
        optimizer.step()
    weights = {name: parameter.asnumpy() for name, parameter in parameters.items()}
    states = {name: optimizer.state[parameter] for name, parameter in parameters.items()}
    return weights, *({name: state[slot].asnumpy() for name, state in states.items()} for slot in SLOTS)


def train(platform, parameters, place, optimizer=None, start=0):
    optimizer = optimizer or AdamW(parameters.items(), OPTIONS, platform)
    for step in range(start + 1, len(RATES) + 1):
        for name, grad in values(step).items():
            platform.set_grad(parameters[name], place(name, grad))
        optimizer.step(RATES[step - 1])
        optimizer.zero_grad()
        assert all(platform.get_grad(parameter) is None for parameter in parameters.values())
    return optimizer


def test_five_steps(platform):
    parameters = made(platform, plain)
    addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    optimizer = train(platform, parameters, plain)
    assert optimizer.num_steps == len(RATES)
    wanted, *moments = expected(platform)
    for name, parameter in parameters.items():
        assert parameter.data_ptr() == addresses[name]
        np.testing.assert_array_equal(parameter.asnumpy(), wanted[name])
        for slot, moment in zip(SLOTS, moments, strict=True):
            np.testing.assert_array_equal(optimizer.state()[name][slot].asnumpy(), moment[name])


def test_shards_are_updated_as_the_global_tensor(platform):
    def program():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",), platform=platform)

        def place(name, array):
            placement = Shard(0) if array.ndim else Replicate()
            return distribute_tensor(plain(name, array), mesh, [placement], src_data_rank=None)

        parameters = made(platform, place)
        optimizer = train(platform, parameters, place)
        state = optimizer.state()["matrix"]["exp_avg"]
        assert state.placements == (Shard(0),)
        return {name: parameter.asnumpy() for name, parameter in parameters.items()}, state.asnumpy()

    wanted, first, _ = expected(platform)
    for parameters, exp_avg in run_ranks(program, 3, platform):
        for name, found in parameters.items():
            np.testing.assert_array_equal(found, wanted[name])
        np.testing.assert_array_equal(exp_avg, first["matrix"])


def test_training_goes_on_from_loaded_state(platform):
    parameters = made(platform, plain)
    before = AdamW(parameters.items(), OPTIONS, platform)
    assert all((slot.asnumpy() == 0).all() for slots in before.state().values() for slot in slots.values())
    for name, grad in values(1).items():
        platform.set_grad(parameters[name], plain(name, grad))
    before.step(RATES[0])
    after = AdamW(parameters.items(), OPTIONS, platform)
    for name, slots in before.state().items():
        for slot, value in slots.items():
            platform.copy_(after.state()[name][slot], value)
    after.num_steps = before.num_steps
    train(platform, parameters, plain, after, start=1)
    for name, wanted in expected(platform)[0].items():
        np.testing.assert_array_equal(parameters[name].asnumpy(), wanted)


def test_parameters_without_a_gradient_stay(platform):
    parameter = platform.Parameter(platform.from_numpy(np.ones(3, np.float32)))
    AdamW([("w", parameter)], OPTIONS, platform).step(0.1)
    np.testing.assert_array_equal(parameter.asnumpy(), [1, 1, 1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision(platform, dtype):
    start, grad = np.array([1.0, -2.0]), np.array([0.5, 0.25])
    dtype = platform.dtype(dtype)
    parameter = platform.Parameter(platform.ops.cast(platform.from_numpy(start), dtype))
    platform.set_grad(parameter, platform.ops.cast(platform.from_numpy(grad), dtype))
    AdamW([("w", parameter)], OPTIONS, platform).step(0.1)
    found = platform.ops.cast(platform.detach(parameter), ms.float32).asnumpy()
    np.testing.assert_allclose(found, start * 0.99 - 0.1, rtol=1e-2)


def test_the_trainer_finds_it(platform):
    entry = registries().optimizers.get("adamw", "mindspore")
    optimizer = entry.build([("w", platform.Parameter(platform.zeros((2,), ms.float32)))], entry.options(), platform)
    assert isinstance(optimizer, AdamW)
