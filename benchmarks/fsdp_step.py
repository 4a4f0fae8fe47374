"""One training step under hp_fsdp, torch's `fully_shard` and DDP, on two gloo ranks of one thread each.

    python benchmarks/fsdp_step.py [--layers 8] [--rounds 7]

A transformer of about 25 million parameters. Prints the median step time of each contender, measured in turns in
the same processes, and the largest resident memory of each, measured in processes of its own; both as ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

VOCABULARY = 8192
WARM_UP = 2


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


CONTENDERS: dict[str, Callable[[Transformer], nn.Module]] = {"ours": ours, "fsdp2": fsdp2, "ddp": ddp}


def rank_main(rank: int, port: int, names: Sequence[str], options: argparse.Namespace, results: object) -> None:
    """One rank: every contender takes each step in turn; rank 0 reports times, losses and its peak memory."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    trained = {}
    for name in names:
        torch.manual_seed(0)
        model = CONTENDERS[name](Transformer(options.layers, options.dim))
        trained[name] = model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    times: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for step in range(options.rounds + WARM_UP):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        ids = torch.randint(0, VOCABULARY, (options.batch, options.length + 1), generator=generator)
        for name, (model, optimizer) in trained.items():
            dist.barrier()
            start = time.perf_counter()
            loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= WARM_UP:
                times[name].append(time.perf_counter() - start)
            losses[name].append(loss.item())
    if rank == 0:
        results.put((times, losses, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    dist.barrier()
    dist.destroy_process_group()


def run(
    names: Sequence[str], options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[float]], int]:
    """Both ranks with these contenders: (seconds, losses, peak bytes) of rank 0."""
    context = torch.multiprocessing.get_context("spawn")
    results, port = context.SimpleQueue(), _free_port()
    ranks = [context.Process(target=rank_main, args=(rank, port, names, options, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed; its error is above")
    return results.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=416)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    times, losses, _ = run(list(CONTENDERS), options)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    options.rounds = 1
    peak = {name: run([name], options)[2] for name in CONTENDERS}
    num_parameters = sum(p.numel() for p in Transformer(options.layers, options.dim).parameters())
    print(f"{num_parameters / 1e6:.1f} M parameters, 2 gloo ranks; in brackets what ours takes of it")
    for name in CONTENDERS:
        step, memory = seconds[name], peak[name]
        print(
            f"{name:6s} {step * 1e3:8.1f} ms ({seconds['ours'] / step:4.2f})"
            f" {memory / 2**20:8.0f} MiB ({peak['ours'] / memory:4.2f})"
        )
    worst = max(abs(a - b) for a, b in zip(losses["ours"], losses["fsdp2"], strict=True))
    print(f"largest difference of a loss between ours and fsdp2: {worst:.1e}")
    print(json.dumps({"seconds": seconds, "peak_bytes": peak}))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
