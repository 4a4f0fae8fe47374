"""Cross entropy of logits that are sharded along the classes."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module


def main():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10, bias=False))
    style = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"0": style})
    labels = torch.tensor([1, 9, 4, 0])
    with loss_parallel():
        loss = torch.nn.functional.cross_entropy(model(torch.randn(4, 6)), labels)
        loss.backward()
    return [loss.full_tensor().item()], {"grad": model[0].weight.grad.full_tensor()}
