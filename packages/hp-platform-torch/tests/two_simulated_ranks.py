"""A small tensor sharded over two simulated ranks."""

import torch

from hp_dtensor import Shard, distribute_tensor, init_device_mesh
from hp_dtensor.testing import run_ranks

FULL = torch.arange(15.0).view(5, 3)


def on_ranks(fn):
    """`fn(mesh, x)` on two simulated ranks, `x` sharded over rows; the results by rank."""

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        return fn(mesh, distribute_tensor(FULL.clone(), mesh, [Shard(0)]))

    return run_ranks(rank, 2, "torch")
