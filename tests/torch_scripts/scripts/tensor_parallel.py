"""A feed-forward block sharded by columns and rows, with sequence parallelism around it."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from toy_models import FeedForward


def main():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = FeedForward(width=8, hidden=12)
    parallelize_module(
        model,
        mesh,
        {
            "norm": SequenceParallel(),
            "up": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "gate": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        },
    )
    parallelize_module(model, mesh, {"up": ColwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(2, 6, 8)
        part = x.chunk(2, 1)[mesh.get_local_rank()]
        y = model(part).full_tensor()
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: parameter.full_tensor() for name, parameter in model.state_dict().items()}
