"""A transformer whose linear weights are gathered in float8 by a tensor subclass, as float8 libraries do."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy_models import Transformer, tokens
from toy_weights import send_in_float8


def main():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = send_in_float8(Transformer(vocabulary=32, width=16, layers=2))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        inputs, labels = tokens(step, mesh.get_local_rank(), vocabulary=32)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {}
