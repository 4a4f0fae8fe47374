"""A small transformer, fully sharded layer by layer, trained with AdamW and clipped gradients."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy_models import Transformer, tokens


def main():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = Transformer(vocabulary=31, width=16, layers=2)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        inputs, labels = tokens(step, mesh.get_local_rank(), vocabulary=31)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.full_tensor().item()]
    return losses, {name: parameter.full_tensor() for name, parameter in model.state_dict().items()}
