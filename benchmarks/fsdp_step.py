"""One training step under hp_fsdp, torch's `fully_shard` and DDP, on two gloo ranks of one thread each.

    python benchmarks/fsdp_step.py [--size 25 | --size 100] [--rounds 7]
    python benchmarks/fsdp_step.py --device cuda          # one rank: what sharding costs over the plain module

A transformer of about 25 or 100 million parameters. Prints the median step time of each contender, measured in
turns in the same processes; what of the step is not the forward and backward of the plain module; and the largest
resident memory of each, measured in processes of its own (on CUDA: allocated, by the device's own count). In
brackets what ours takes of it.
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
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

VOCABULARY = 8192
WARM_UP = 2
# Millions of parameters: layers, width.
SIZES = {25: (8, 416), 100: (12, 768)}


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


def plain(model: Transformer, device: str) -> nn.Module:
    return model


def ours(model: Transformer, device: str) -> nn.Module:
    from hp_dtensor import get_platform, init_device_mesh
    from hp_fsdp import fully_shard

    platform = get_platform("torch")
    if platform.world is None:
        platform.connect(dist.get_rank(), dist.get_world_size(), "127.0.0.1:0")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",), platform=platform)
    for block in model.blocks:
        fully_shard(block, mesh)
    return fully_shard(model, mesh)


def fsdp2(model: Transformer, device: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ddp(model: Transformer, device: str) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


CONTENDERS: dict[str, Callable[[Transformer, str], nn.Module]] = {
    "ours": ours,
    "fsdp2": fsdp2,
    "ddp": ddp,
    "plain": plain,
}


@dataclass
class Measured:
    """Of each contender on rank 0: seconds of steps, and of their forwards and backwards; losses; and peak bytes."""

    steps: dict[str, list[float]]
    passes: dict[str, list[float]]
    losses: dict[str, list[float]]
    peak: int


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_bytes(device: str) -> int:
    return (
        torch.cuda.max_memory_allocated()
        if device == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )


def rank_main(rank: int, port: int, names: Sequence[str], options: argparse.Namespace, results: object) -> None:
    """One rank: every contender takes each step in turn."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = options.device
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", rank=rank, world_size=options.ranks)
    measured = Measured({name: [] for name in names}, {name: [] for name in names}, {name: [] for name in names}, 0)
    trained = {}
    for name in names:
        torch.manual_seed(0)
        model = CONTENDERS[name](Transformer(options.layers, options.dim).to(device), device)
        trained[name] = model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    for step in range(options.rounds + WARM_UP):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        ids = torch.randint(0, VOCABULARY, (options.batch, options.length + 1), generator=generator).to(device)
        for name, (model, optimizer) in trained.items():
            dist.barrier()
            start = clock(device)
            loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            middle = clock(device)
            optimizer.step()
            optimizer.zero_grad()
            if step >= WARM_UP:
                measured.steps[name].append(clock(device) - start)
                measured.passes[name].append(middle - start)
            measured.losses[name].append(loss.item())
    measured.peak = peak_bytes(device)
    if rank == 0:
        results.put(measured)
    dist.barrier()
    dist.destroy_process_group()


def run(names: Sequence[str], options: argparse.Namespace) -> Measured:
    """All ranks with these contenders."""
    context = torch.multiprocessing.get_context("spawn")
    results, port = context.SimpleQueue(), _free_port()
    ranks = range(options.ranks)
    processes = [context.Process(target=rank_main, args=(rank, port, names, options, results)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a rank failed; its error is above")
    return results.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, choices=SIZES, default=25, help="millions of parameters")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    options.layers, options.dim = SIZES[options.size]
    options.ranks = 1 if options.device == "cuda" else 2
    names = [name for name in CONTENDERS if options.ranks > 1 or name != "ddp"]
    measured = run(names, options)
    step = {name: statistics.median(values) for name, values in measured.steps.items()}
    passes = {name: statistics.median(values) for name, values in measured.passes.items()}
    options.rounds = 1
    peak = {name: run([name], options).peak for name in names}
    print(f"{options.size} M parameters, {options.ranks} ranks on {options.device}; in brackets what ours takes of it")
    for name in names:
        added = (passes[name] - passes["plain"]) / step[name]
        print(
            f"{name:6s} {step[name] * 1e3:8.1f} ms ({step['ours'] / step[name]:4.2f}), not compute {added:5.1%},"
            f" {peak[name] / 2**20:8.0f} MiB ({peak['ours'] / peak[name]:4.2f})"
        )
    worst = max(abs(a - b) for a, b in zip(measured.losses["ours"], measured.losses["fsdp2"], strict=True))
    print(f"largest difference of a loss between ours and fsdp2: {worst:.1e}")
    print(json.dumps({"seconds": step, "forward_backward_seconds": passes, "peak_bytes": peak}))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
