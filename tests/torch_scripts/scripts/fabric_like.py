"""A loop behind a small front, as Lightning Fabric and accelerate have it: `setup`, `backward`, accumulation."""

import contextlib

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Front:
    def __init__(self, mesh, precision):
        self.mesh, self.policy = mesh, MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)

    def setup(self, model, make_optimizer):
        for child in model.children():
            if any(True for _ in child.parameters()):
                fully_shard(child, mesh=self.mesh, mp_policy=self.policy)
        fully_shard(model, mesh=self.mesh, mp_policy=self.policy)
        return model, make_optimizer(model.parameters())

    @contextlib.contextmanager
    def accumulate(self, model, is_last):
        model.set_requires_gradient_sync(is_last)
        yield

    def backward(self, loss):
        loss.backward()


def main():
    front = Front(init_device_mesh("cpu", (2,)), None)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    model, optimizer = front.setup(model, lambda parameters: torch.optim.Adam(parameters, lr=0.02))
    losses = []
    for step in range(2):
        for part in range(2):
            torch.manual_seed(100 * step + 10 * part + front.mesh.get_local_rank())
            with front.accumulate(model, is_last=part == 1):
                loss = model(torch.randn(4, 5)).square().mean() / 2
                front.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: parameter.full_tensor() for name, parameter in model.state_dict().items()}
