"""A tied embedding, parallelized as torch's own test Transformer is: embedding, then layers, then the head."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toy_models import Transformer, tokens


def main():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = Transformer(vocabulary=10, width=8, layers=1)
    model.head.weight = model.embedding.weight
    parallelize_module(
        model, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
    )
    for layer in model.layers:
        plan = {
            "feed_forward.up": ColwiseParallel(),
            "feed_forward.gate": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
    parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=Replicate()))
    model.head.weight = model.embedding.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        ids, labels = tokens(step, 0, vocabulary=10)
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: model.state_dict()[name].full_tensor() for name in ("embedding.weight", "head.weight")}
