"""Host time that sharding adds per layer and step, for 40 small linear layers with a group each and no-op collectives.

    python benchmarks/fsdp_host.py

Prints microseconds per layer, forward and backward, beyond the plain model, for hp_fsdp and torch's `fully_shard`.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_dtensor import DeviceMesh, ProcessGroup, World, get_platform
from hp_dtensor.comm.process_group import DONE, Work

NUM_LAYERS, NUM_RANKS, ROUNDS = 40, 8, 30


class NothingGroup(ProcessGroup):
    """Collectives that return at once and write nothing."""

    def _nothing(self, *_: object) -> Work:
        return DONE

    _all_reduce = _all_gather_into = _reduce_scatter_into = _all_to_all_into = _broadcast = _nothing

    def _exchange(self, sends: object, receives: object) -> None:
        return None

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self.size


class NothingWorld(World):
    def _create_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        return NothingGroup(ranks, ranks.index(self.rank), self.platform)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def ours() -> nn.Module:
    from hp_fsdp import fully_shard

    world = NothingWorld(0, NUM_RANKS, get_platform("torch"))
    mesh = DeviceMesh("cpu", (NUM_RANKS,), mesh_dim_names=("shard",), world=world)
    model = Chain()
    for layer in model.layers:
        fully_shard(layer, mesh)
    return fully_shard(model, mesh)


def fsdp2() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model = Chain()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    models = {"plain": Chain(), "ours": ours(), "fsdp2": fsdp2()}
    best = dict.fromkeys(models, float("inf"))
    x = torch.randn(4, 16)
    for _ in range(ROUNDS):
        for name, model in models.items():
            start = time.perf_counter()
            model(x).sum().backward()
            best[name] = min(best[name], time.perf_counter() - start)
            for parameter in model.parameters():
                parameter.grad = None
    added = {name: (best[name] - best["plain"]) / NUM_LAYERS * 1e6 for name in ("ours", "fsdp2")}
    ratio = added["ours"] / added["fsdp2"]
    print(f"ours {added['ours']:.0f} us per layer, fsdp2 {added['fsdp2']:.0f}; ratio {ratio:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
