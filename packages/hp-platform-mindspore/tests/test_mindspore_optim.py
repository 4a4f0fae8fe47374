"""Optimizers with `param_groups` and `state`, against their definitions in float64, on plain tensors and on shards."""

from __future__ import annotations

import numpy as np
import pytest

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.spec.placements import Replicate, Shard
from hp_dtensor.tensor.conversions import distribute_tensor
from hp_dtensor.testing import run_ranks
from hp_platform_mindspore.optim import SGD, AdamW

SHAPES = {"matrix": (5, 3), "vector": (4,), "scalar": ()}
STEPS = 4
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def values(step):
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def expected_adamw(rates):
    """arXiv 1711.05101, algorithm 2, with bias correction."""
    (beta1, beta2), eps, decay = OPTIONS["betas"], OPTIONS["eps"], OPTIONS["weight_decay"]
    parameters, first, second = values(0), dict.fromkeys(SHAPES, 0.0), dict.fromkeys(SHAPES, 0.0)
    for step in range(1, STEPS + 1):
        for name, grad in values(step).items():
            first[name] = beta1 * first[name] + (1 - beta1) * grad
            second[name] = beta2 * second[name] + (1 - beta2) * grad**2
            update = first[name] / (1 - beta1**step) / (np.sqrt(second[name] / (1 - beta2**step)) + eps)
            parameters[name] = parameters[name] * (1 - rates[name] * decay) - rates[name] * update
    return parameters


def expected_sgd(momentum, weight_decay):
    parameters, buffers = values(0), dict.fromkeys(SHAPES, 0.0)
    for step in range(1, STEPS + 1):
        for name, grad in values(step).items():
            buffers[name] = momentum * buffers[name] + grad + weight_decay * parameters[name]
            parameters[name] = parameters[name] - 0.1 * buffers[name]
    return parameters


def plain(platform, array):
    return platform.from_numpy(array.astype(np.float32))


def made(platform, place=plain):
    return {name: platform.Parameter(place(platform, array)) for name, array in values(0).items()}


def train(platform, parameters, optimizer, place=plain, steps=range(1, STEPS + 1)):
    for step in steps:
        for name, grad in values(step).items():
            platform.set_grad(parameters[name], place(platform, grad))
        optimizer.step()
        optimizer.zero_grad()
        assert all(platform.get_grad(parameter) is None for parameter in parameters.values())


def check(parameters, wanted):
    for name, value in wanted.items():
        np.testing.assert_allclose(parameters[name].asnumpy(), value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_adamw_in_groups(platform):
    parameters = made(platform)
    matrix, *others = parameters.values()
    optimizer = AdamW([{"params": [matrix], "lr": 0.03}, {"params": others}], **OPTIONS)
    train(platform, parameters, optimizer)
    check(parameters, expected_adamw({"matrix": 0.03, "vector": 0.1, "scalar": 0.1}))
    assert all(optimizer.state[parameter]["step"] == STEPS for parameter in parameters.values())


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.1)])
def test_sgd(platform, momentum, weight_decay):
    parameters = made(platform)
    addresses = [parameter.data_ptr() for parameter in parameters.values()]
    train(platform, parameters, SGD(parameters.values(), lr=0.1, momentum=momentum, weight_decay=weight_decay))
    check(parameters, expected_sgd(momentum, weight_decay))
    assert [parameter.data_ptr() for parameter in parameters.values()] == addresses


def test_shards_are_updated_as_the_global_tensor(platform):
    def program(make):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",), platform=platform)

        def place(platform, array):
            placement = Shard(0) if array.ndim else Replicate()
            return distribute_tensor(plain(platform, array), mesh, [placement], src_data_rank=None)

        parameters = made(platform, place)
        optimizer = make(parameters.values())
        train(platform, parameters, optimizer, place)
        slots = [x for x in optimizer.state[parameters["matrix"]].values() if isinstance(x, platform.Tensor)]
        assert slots
        assert all(x.spec == parameters["matrix"].spec for x in slots)
        return {name: platform.from_numpy(parameter.asnumpy()) for name, parameter in parameters.items()}

    for found in run_ranks(program, 3, platform, lambda p: AdamW(p, **OPTIONS)):
        check(found, expected_adamw(dict.fromkeys(SHAPES, 0.1)))
    for found in run_ranks(program, 3, platform, lambda p: SGD(p, lr=0.1, momentum=0.9)):
        check(found, expected_sgd(0.9, 0.0))


def test_training_goes_on_from_a_state_dict(platform):
    parameters = made(platform)
    before = AdamW(parameters.values(), **OPTIONS)
    train(platform, parameters, before, steps=(1, 2))
    after = AdamW(parameters.values(), **{**OPTIONS, "lr": 7.0})
    after.load_state_dict(before.state_dict())
    train(platform, parameters, after, steps=(3, 4))
    check(parameters, expected_adamw(dict.fromkeys(SHAPES, 0.1)))
    with pytest.raises(ValueError, match=r"expected groups of \[1\] parameters, got \[3\]"):
        AdamW([parameters["matrix"]]).load_state_dict(before.state_dict())


def test_a_closure_and_parameters_without_a_gradient(platform):
    used, unused = (platform.Parameter(plain(platform, np.ones(3))) for _ in range(2))

    def closure():
        loss = platform.ops.sum(platform.ops.mul(used, 2.0))
        platform.backward(loss)
        return loss

    with platform.no_grad():
        assert float(SGD([used, unused], lr=0.5).step(closure).asnumpy()) == 6
    np.testing.assert_array_equal(used.asnumpy(), [0, 0, 0])
    np.testing.assert_array_equal(unused.asnumpy(), [1, 1, 1])


def test_what_is_no_optimizer_is_refused(platform):
    parameter = platform.Parameter(plain(platform, np.ones(3)))
    with pytest.raises(ValueError, match="AdamW: expected parameters, got none"):
        AdamW([])
    with pytest.raises(ValueError, match="SGD: a parameter is given twice"):
        SGD([parameter, parameter])
    with pytest.raises(ValueError, match="SGD: unknown options betas; expected lr, momentum, weight_decay"):
        SGD([{"params": [parameter], "betas": 1}])


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_dtypes_lose_no_more_than_their_own_digits(platform, dtype):
    """Factors are rounded to the parameters' dtype at most, and AdamW of 16 bits computes in 32."""

    def place(platform, array):
        return platform.from_numpy(array.astype(dtype))

    adamw, sgd = (made(platform, place) for _ in range(2))
    train(platform, adamw, AdamW(adamw.values(), **OPTIONS), place)
    train(platform, sgd, SGD(sgd.values(), lr=0.1, momentum=0.9, weight_decay=0.2), place)
    expected = expected_adamw(dict.fromkeys(SHAPES, OPTIONS["lr"])), expected_sgd(0.9, 0.2)
    for found, wanted in zip((adamw, sgd), expected, strict=True):
        for name, value in wanted.items():
            error = np.abs(platform.to_numpy(found[name]).astype(np.float64) - value).max()
            assert error < {"float64": 1e-13, "float16": 2.5e-3}[dtype], name
