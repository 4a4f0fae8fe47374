"""Meshes that `torch.distributed.device_mesh` made, in torch's own job, wherever a mesh is an argument."""

from __future__ import annotations

import pytest

from hp_dtensor import (
    ColwiseParallel,
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    local_map,
    parallelize_module,
    zeros,
)
from hp_dtensor.comm.mesh import DeviceMesh
from hp_fsdp import FSDPModule, fully_shard

torch = pytest.importorskip("torch")
interop = pytest.importorskip("hp_platform_torch.tensor.interop")

dist = torch.distributed


@pytest.fixture
def job_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradient(model):
    model(torch.ones(2, 4)).square().sum().backward()
    grad = model.weight.grad
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


@pytest.mark.usefixtures("job_of_one")
@pytest.mark.parametrize("shape", [(1,), (1, 1)], ids=["sharded", "replicated and sharded"])
def test_a_mesh_of_torch_is_taken_as_ours(shape):
    theirs = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    expected = gradient(model)
    model.zero_grad()
    fully_shard(model, mesh=theirs)
    assert isinstance(model, FSDPModule)
    assert isinstance(model.weight.device_mesh, DeviceMesh)
    assert model.weight.device_mesh == interop.from_torch_mesh(theirs)
    torch.testing.assert_close(gradient(model), expected)


@pytest.mark.usefixtures("job_of_one")
def test_functions_and_methods_take_a_mesh_of_torch():
    both = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    mesh = both["tp"]
    x, doubled = torch.ones(2, 4), {"out_placements": [Shard(0)], "in_placements": ([Shard(0)],)}
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    results = [
        sharded,
        sharded.redistribute(mesh, [Replicate()]),
        DTensor.from_local(x, device_mesh=mesh, placements=[Shard(0)]),
        zeros(2, 4, device_mesh=mesh, placements=[Shard(0)]) + sharded,
        local_map(lambda local: local * 2, device_mesh=mesh, **doubled)(sharded) / 2,
        distribute_module(torch.nn.Identity(), mesh)(sharded),
    ]
    for result in results:
        assert result.device_mesh == interop.from_torch_mesh(mesh)
        assert torch.equal(result.full_tensor(), x)
    model = parallelize_module(torch.nn.Linear(4, 3), mesh, ColwiseParallel())
    assert model.weight.placements == (Shard(0),)
    assert fully_shard(model, mesh=both["dp"])(x).shape == (2, 3)
