"""Small torch modules and batches that tests share."""

from __future__ import annotations

import pytest

from hp_dtensor.comm.mesh import init_device_mesh
from hp_fsdp import fully_shard

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint


class Block(torch.nn.Module):
    """A gated MLP; its middle may be recomputed in backward."""

    def __init__(self, recompute, reentrant):
        super().__init__()
        self.up, self.down = torch.nn.Linear(5, 11), torch.nn.Linear(11, 5)
        self.gate = torch.nn.Parameter(torch.ones(5))
        self.recompute, self.reentrant = recompute, reentrant

    def middle(self, x):
        return self.down(torch.relu(self.up(x)))

    def forward(self, x):
        if self.recompute == "inside":
            return x * self.gate + checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return x * self.gate + self.middle(x)


class Net(torch.nn.Module):
    def __init__(self, recompute=None, reentrant=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(5, 5)
        self.blocks = torch.nn.ModuleList(Block(recompute, reentrant) for _ in range(3))
        self.recompute, self.reentrant = recompute, reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            around = self.recompute == "around"
            x = checkpoint(block, x, use_reentrant=self.reentrant) if around else block(x)
        return x


def shard_net(platform, net, **options):
    mesh = init_device_mesh(platform.device_types[0], (2,), mesh_dim_names=("shard",), platform=platform)
    for block in net.blocks:
        fully_shard(block, mesh, **options)
    return fully_shard(net, mesh, **options)


def batch(rank):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))


def reference_grads():
    net = Net()
    for rank in range(2):
        ((net(batch(rank)) ** 2).mean() / 2).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}
