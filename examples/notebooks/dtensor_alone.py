"""Distributed tensors alone: `python examples/notebooks/dtensor_alone.py`, or cell by cell in an editor.

Needs hp-dtensor and a platform. Four ranks are simulated in this process; under torchrun the same function runs on real
ones.
"""

# %% A mesh of ranks, and a matrix that is sharded by rows
from hp_dtensor import Replicate, Shard, init_device_mesh, randn
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.testing import run_ranks

platform = get_platform()


def shapes():
    mesh = init_device_mesh(platform.device_types[0], (4,), mesh_dim_names=("tp",))
    weight = randn(8, 6, device_mesh=mesh, placements=[Shard(0)])
    return tuple(weight.shape), tuple(weight.to_local().shape)


print("global and local shapes:", run_ranks(shapes, 4, platform)[0])

# %% Operations are the framework's own; the placements of results follow from those of the arguments


def product():
    mesh = init_device_mesh(platform.device_types[0], (4,), mesh_dim_names=("tp",))
    x = randn(2, 6, device_mesh=mesh, placements=[Replicate()])
    weight = randn(8, 6, device_mesh=mesh, placements=[Shard(0)])
    y = platform.ops.linear(x, weight)
    return y.placements, tuple(y.full_tensor().shape)


print("sharded by columns, and its full shape:", run_ranks(product, 4, platform)[0])

# %% Gradients need no further code: a replicated leaf gets the full gradient


def gradient():
    mesh = init_device_mesh(platform.device_types[0], (4,), mesh_dim_names=("tp",))
    x = platform.Parameter(randn(2, 6, device_mesh=mesh, placements=[Replicate()]))
    weight = randn(8, 6, device_mesh=mesh, placements=[Shard(0)])
    platform.backward(platform.ops.sum(platform.ops.linear(x, weight)))
    return platform.get_grad(x).placements


print("the gradient of x:", run_ranks(gradient, 4, platform)[0])
