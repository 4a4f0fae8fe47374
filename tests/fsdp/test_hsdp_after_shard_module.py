"""`hsdp` and `fully_shard` after `shard_module`: the data-parallel ranks are found, and it trains as on one rank."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from hp_dtensor import DTensor, Shard, ShardingPlan, distribute_tensor, init_device_mesh, shard_module
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.distribute_module import place_parameter
from hp_dtensor.testing import run_ranks
from hp_fsdp import HSDPError, fully_shard, hsdp

INPUTS = np.linspace(-1, 2, 32, dtype=np.float32).reshape(8, 4)
COLUMNS_THEN_ROWS = {"up.weight": ("tp", "None"), "down.weight": ("None", "tp")}
BATCH = {"input": ("dp", "None")}


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.down(self.platform.ops.tanh(self.up(x)))


def build(platform):
    with nn.building(platform):
        model = TwoLayers()
    for i, (_, parameter) in enumerate(platform.named_parameters(model)):
        values = np.cos(np.arange(parameter.shape[0] * parameter.shape[1]) + i).astype(np.float32)
        platform.copy_(parameter, platform.from_numpy(values.reshape(parameter.shape)))
    return model


def trained(platform, model, x):
    """Return the full parameters after three steps of gradient descent."""
    parameters = dict(platform.named_parameters(model))
    for _ in range(3):
        platform.backward(platform.ops.mean(platform.ops.square(model(x))))
        for parameter in parameters.values():
            with platform.no_grad(), platform.local_op():
                local, grad = platform.unwrap(parameter), platform.unwrap(platform.get_grad(parameter))
                platform.copy_(parameter, platform.ops.sub(local, platform.ops.mul(grad, 0.1)))
            platform.set_grad(parameter, None)
    full = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in parameters.items()}
    return {name: platform.to_numpy(platform.detach(each)) for name, each in full.items()}


def rank(platform, shape, names, plan, shard):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, platform=platform)
    model = shard_module(build(platform), mesh, ShardingPlan(plan, BATCH))
    shard(model, mesh)
    weight = model.up.weight.spec
    result = trained(platform, model, distribute_tensor(platform.from_numpy(INPUTS), mesh))
    return result, dict(zip(weight.mesh.mesh_dim_names, weight.mesh.shape, strict=True))


def with_hsdp(**options):
    return lambda model, mesh: hsdp(model, threshold=0, **options)


CASES = {
    "beside tp": ((2, 2), ("dp", "tp"), COLUMNS_THEN_ROWS, with_hsdp(), {"tp": 2, "hsdp": 2}),
    "outer tp": (
        (2, 2),
        ("tp", "dp"),
        COLUMNS_THEN_ROWS,
        with_hsdp(optimizer_level="level3", comm_fusion=True),
        {"tp": 2, "hsdp": 2},
    ),
    "all ranks": ((3,), ("dp",), {}, with_hsdp(optimizer_level="level3"), {"hsdp": 3}),
    "part of the axis": ((4,), ("dp",), {}, with_hsdp(shard_size=2), {"hsdp_replicate": 2, "hsdp_shard": 2}),
    "two axes": ((2, 2, 2), ("dp", "cp", "tp"), COLUMNS_THEN_ROWS, with_hsdp(comm_fusion=True), {"tp": 2, "hsdp": 4}),
    "fully_shard": (
        (2, 2),
        ("dp", "tp"),
        COLUMNS_THEN_ROWS,
        lambda model, mesh: fully_shard(model, mesh["dp"]),
        {"tp": 2, "dp": 2},
    ),
}


@functools.cache
def on_one_rank(platform):
    return trained(platform, build(platform), platform.from_numpy(INPUTS))


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_on_one_rank(hp_platform, case):
    shape, names, plan, shard, expected_axes = CASES[case]
    for weights, axes in run_ranks(rank, int(np.prod(shape)), hp_platform, hp_platform, shape, names, plan, shard):
        assert axes == expected_axes
        for name, values in on_one_rank(hp_platform).items():
            # float32: the same sums in another order, over three steps.
            np.testing.assert_allclose(weights[name], values, rtol=2e-5, atol=2e-6)


def test_ranks_beyond_the_meshes_of_the_parameters_are_found(hp_platform):
    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), platform=hp_platform)
        model = shard_module(build(hp_platform), mesh["tp"], ShardingPlan(COLUMNS_THEN_ROWS))
        hsdp(model, threshold=0)
        half = np.split(INPUTS, 2)[mesh.get_local_rank("dp")]
        x = distribute_tensor(hp_platform.from_numpy(half.copy()), mesh["tp"])
        return trained(hp_platform, model, x), model.up.weight.device_mesh.mesh_dim_names

    for weights, axes in run_ranks(program, 4, hp_platform):
        assert axes == ("tp", "hsdp")
        for name, values in on_one_rank(hp_platform).items():
            np.testing.assert_allclose(weights[name], values, rtol=2e-5, atol=2e-6)


def test_meshes_that_do_not_go_together_are_named(hp_platform):
    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), platform=hp_platform)
        model = build(hp_platform)
        place_parameter(model.up, "weight", mesh["tp"], [Shard(0)])
        place_parameter(model.down, "weight", mesh.flatten("all"), [Shard(0)])
        with pytest.raises(HSDPError, match=r"axes 'tp' and 'all' share ranks.*; pass mesh="):
            hsdp(model)

    run_ranks(program, 4, hp_platform)
