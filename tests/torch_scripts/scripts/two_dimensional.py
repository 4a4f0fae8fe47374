"""Tensor parallelism inside fully sharded data parallelism, on a mesh of two by two."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toy_models import FeedForward


def main():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(FeedForward(width=8, hidden=12) for _ in range(2)))
    for block in model:
        parallelize_module(
            block, mesh["tp"], {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
        )
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: parameter.full_tensor() for name, parameter in model.state_dict().items()}
