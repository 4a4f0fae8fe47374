"""One training step under hp_fsdp, torch's `fully_shard` and DDP, in turns, on two gloo ranks of one thread each.

    python benchmarks/fsdp_step.py [--layers 8] [--rounds 7]

Prints the median step time of each and the ratios; a transformer of about 25 million parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

VOCABULARY = 8192


class Block(nn.Module):
    """Attention and an MLP of four times the width, both before a norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, 8) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def ours(model: Transformer) -> nn.Module:
    from hp_dtensor import get_platform, init_device_mesh
    from hp_fsdp import fully_shard

    platform = get_platform("torch")
    if platform.world is None:
        platform.connect(dist.get_rank(), dist.get_world_size(), "127.0.0.1:0")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",), platform=platform)
    for block in model.blocks:
        fully_shard(block, mesh)
    return fully_shard(model, mesh)


def fsdp2(model: Transformer) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ddp(model: Transformer) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def rank_main(rank: int, size: int, port: int, options: argparse.Namespace, results: object) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    contenders = {}
    for wrap in (ours, fsdp2, ddp):
        torch.manual_seed(0)
        model = wrap(Transformer(options.layers, options.dim))
        contenders[wrap.__name__] = model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    for step in range(options.rounds + 2):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        ids = torch.randint(0, VOCABULARY, (options.batch, options.length + 1), generator=generator)
        for name, (model, optimizer) in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            logits = model(ids[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= 2:
                times[name].append(time.perf_counter() - start)
            losses[name].append(loss.item())
    if rank == 0:
        results.put((times, losses, sum(p.numel() for p in Transformer(options.layers, options.dim).parameters())))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=416)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    port = _free_port()
    ranks = [context.Process(target=rank_main, args=(r, 2, port, options, results)) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed")
    times, losses, num_parameters = results.get()
    medians = {name: statistics.median(values) for name, values in times.items()}
    worst = max(abs(a - b) for a, b in zip(losses["ours"], losses["fsdp2"], strict=True))
    print(f"{num_parameters / 1e6:.1f} M parameters, 2 gloo ranks, {options.rounds} rounds")
    for name, seconds in medians.items():
        print(f"{name:6s} {seconds * 1e3:8.1f} ms   {medians['ours'] / seconds:5.2f} (ours / {name})")
    print(f"largest difference of a loss between ours and fsdp2: {worst:.1e}")
    print(json.dumps({name: round(seconds, 5) for name, seconds in medians.items()}))


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
