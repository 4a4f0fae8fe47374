"""A distributed checkpoint of a sharded model, read into another layout."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def main():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    full = torch.randn(5, 3)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "checkpoint")
    dcp.save({"weight": distribute_tensor(full, mesh, [Shard(0)])}, checkpoint_id=path)
    other = {"weight": distribute_tensor(torch.zeros(5, 3), mesh, [Shard(1)])}
    dcp.load(other, checkpoint_id=path)
    same = {"weight": distribute_tensor(torch.zeros(5, 3), mesh, [Replicate()])}
    dcp.load(same, checkpoint_id=path)
    return [], {"sharded": other["weight"].full_tensor(), "full": same["weight"].full_tensor()}
