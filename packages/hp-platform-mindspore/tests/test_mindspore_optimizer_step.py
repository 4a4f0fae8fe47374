"""MindSpore's own optimizers on DTensor parameters: the weights are those of one device."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn
from mindspore.experimental import optim

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, from_local, init_device_mesh
from hp_dtensor.exceptions import CapabilityError, PlacementError
from hp_dtensor.testing import run_ranks
from hp_platform_mindspore.patches.optimizers import ELEMENTWISE

RNG = np.random.default_rng(3)
WEIGHT, BIAS, BATCH = (RNG.normal(size=shape).astype(np.float32) for shape in ((5, 3), (3,), (4, 5)))
OPTIMIZERS = sorted((kind for kind in ELEMENTWISE if "experimental" in kind.__module__), key=lambda kind: kind.__name__)
STEPS = 4


def tensor(array):
    return Tensor(array.copy())


def plain(platform):
    return [platform.Parameter(tensor(array)) for array in (WEIGHT, BIAS)]


def distributed(platform):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",), platform=platform)
    placed = ((WEIGHT, Shard(0)), (BIAS, Replicate()))
    return [platform.Parameter(distribute_tensor(tensor(array), mesh, [placement])) for array, placement in placed]


def trained(platform, parameters, optimizer):
    weight, bias = parameters
    batch = tensor(BATCH)
    if isinstance(weight, DTensor):
        batch = distribute_tensor(batch, weight.device_mesh, [Shard(0)])
    ops = platform.ops
    for _ in range(STEPS):
        platform.backward(ops.mean(ops.square(ops.add(ops.matmul(batch, weight), bias))))
        optimizer(tuple(platform.get_grad(parameter) for parameter in parameters))
        for parameter in parameters:
            platform.set_grad(parameter, None)
    return [platform.to_numpy(x.full_tensor() if isinstance(x, DTensor) else x).copy() for x in parameters]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_elementwise_optimizers_update_shards_as_the_global_tensor(platform, kind):
    def program():
        parameters = distributed(platform)
        version = platform.version(parameters[0])
        found = trained(platform, parameters, kind(parameters, lr=0.05))
        assert platform.version(parameters[0]) > version
        return found

    parameters = plain(platform)
    expected = trained(platform, parameters, kind(parameters, lr=0.05))
    assert not np.allclose(expected[0], WEIGHT, atol=1e-5)
    for found in run_ranks(program, 2, platform):
        for array, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(array, wanted, rtol=1e-6, atol=1e-6)  # sums over rows in another order


def test_state_is_placed_as_its_parameter(platform):
    def program():
        parameters = distributed(platform)
        optimizer = optim.AdamW([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}], lr=0.05)
        trained(platform, parameters, optimizer)
        assert [x is y for x, y in zip(optimizer.parameters, parameters, strict=True)] == [True, True]
        return [(x.placements, platform.to_numpy(x.full_tensor()).tolist()) for x in optimizer.exp_avg]

    parameters = plain(platform)
    optimizer = optim.AdamW([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}], lr=0.05)
    trained(platform, parameters, optimizer)
    for states in run_ranks(program, 2, platform):
        assert [placements for placements, _ in states] == [(Shard(0),), (Replicate(),)]
        for (_, values), wanted in zip(states, optimizer.exp_avg, strict=True):
            np.testing.assert_allclose(values, wanted.asnumpy(), rtol=1e-5, atol=1e-7)


REFUSED = {
    "nn.Lamb": lambda parameters: nn.Lamb(parameters, 0.1),
    "nn.Lamb, groups": lambda parameters: nn.Lamb([{"params": parameters}], 0.1),
    "nn.LARS": lambda parameters: nn.LARS(nn.Momentum(parameters, 0.1, 0.9))(
        tuple(ms.ops.zeros_like(x) for x in parameters)
    ),
    "mint.optim.SGD": lambda parameters: mint.optim.SGD(parameters, lr=0.1),
    "mint.optim.AdamW": lambda parameters: mint.optim.AdamW(parameters),
    "a subclass": lambda parameters: type("Mine", (optim.SGD,), {})(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_optimizers_are_refused_with_the_way_out(platform, name):
    def program():
        with pytest.raises(CapabilityError, match=r"mindspore\.experimental\.optim .*AdamW"):
            REFUSED[name](distributed(platform))

    run_ranks(program, 2, platform)


def test_other_optimizers_take_plain_parameters(platform):
    parameters = plain(platform)
    before = parameters[0].asnumpy().copy()
    nn.Momentum(iter(parameters), 0.1, 0.9)(tuple(ms.ops.ones_like(x) for x in parameters))
    np.testing.assert_allclose(parameters[0].asnumpy(), before - 0.1, rtol=1e-6)


def test_wrong_gradients_are_errors_and_change_nothing(platform):
    def program():
        parameters = distributed(platform)
        optimizer = optim.SGD(parameters, lr=0.1)
        mesh = parameters[0].device_mesh
        full = [distribute_tensor(tensor(array), mesh, [Replicate()]) for array in (WEIGHT, BIAS)]
        with pytest.raises(PlacementError, match="redistribute"):
            optimizer(full)
        with pytest.raises(PlacementError, match="the local gradient must be"):
            optimizer([tensor(WEIGHT), full[1]])
        with pytest.raises(ValueError, match="each of 2 parameters, got 1"):
            optimizer(full[:1])
        with pytest.raises(ValueError, match="has no gradient"):
            optimizer([None, full[1]])
        return platform.to_numpy(parameters[0].full_tensor())

    for found in run_ranks(program, 2, platform):
        np.testing.assert_array_equal(found, WEIGHT)


def test_a_partial_parameter_is_refused(platform):
    def program():
        mesh = init_device_mesh("cpu", (2,), platform=platform)
        with pytest.raises(PlacementError, match="redistribute it first"):
            optim.SGD([platform.Parameter(from_local(tensor(BIAS), mesh, [Partial()]))], lr=0.1)

    run_ranks(program, 2, platform)


def test_a_refused_group_is_not_added(platform):
    def rank():
        weight, _ = distributed(platform)
        optimizer = optim.SGD([weight], lr=0.1)
        part = from_local(tensor(BIAS), weight.device_mesh, [Partial()])
        with pytest.raises(PlacementError, match="redistribute it first"):
            optimizer.add_param_group({"params": [platform.Parameter(part)]})
        assert len(optimizer.parameters) == len(optimizer.param_groups) == 1

    run_ranks(rank, 2, platform)


def test_a_copy_of_a_parameter_keeps_placement_and_dtype(platform):
    def program():
        mesh = init_device_mesh("cpu", (2,), platform=platform)
        full = distribute_tensor(tensor(WEIGHT).astype(ms.bfloat16), mesh, [Shard(0)])
        parameter = platform.Parameter(full)
        same, ones = parameter.clone(), parameter.clone(init="ones")
        assert same.data_ptr() != parameter.data_ptr()
        with pytest.raises(CapabilityError, match="same, zeros, ones or a number"):
            parameter.clone(init="normal")
        found = [(x.dtype, x.placements, platform.to_numpy(x.full_tensor()).tolist()) for x in (parameter, same, ones)]
        return found, str(parameter)

    (first, same, ones), shown = run_ranks(program, 2, platform)[0]
    assert first == same
    assert (ones[:2], np.unique(ones[2])) == (first[:2], 0x3F80)
    assert "local=[[ 2.04" in shown
