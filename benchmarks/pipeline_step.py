"""One step of a pipeline here and by torch.distributed.pipelining, on gloo ranks of one thread each.

    python benchmarks/pipeline_step.py [--ranks 2 | --ranks 4] [--schedule 1F1B] [--dim 256] [--rounds 9]

A stack of transformer blocks, the same stages and weights for both. Prints the median step time of each, measured in
turns in the same processes (the slowest rank's), and the largest resident memory of a rank, measured in processes of
its own. In brackets what ours takes of torch's.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

WARM_UP = 3
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class Block(nn.Module):
    """Attention and an MLP of four times the width, both before a norm."""

    def __init__(self, dim: int, heads: int = 8) -> None:
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


class Contender:
    """A pipeline of one of the two packages, with stages of its own."""

    def __init__(self, package: str, options: argparse.Namespace) -> None:
        if package == "torch":
            from torch.distributed import pipelining
            from torch.distributed.pipelining.schedules import get_schedule_class
        else:
            from hp_dtensor import get_platform
            from hp_trainer import pipeline as pipelining
            from hp_trainer.pipeline import get_schedule_class

            platform = get_platform("torch")
            if platform.world is None:
                platform.connect(dist.get_rank(), dist.get_world_size(), "127.0.0.1:0")
        rank, size = dist.get_rank(), dist.get_world_size()
        per_rank = 2 if options.schedule in V_SHAPED or options.schedule.startswith("Interleaved") else 1
        self.num_stages = size * per_rank
        last = self.num_stages - 1
        self.mine = [rank, last - rank] if options.schedule in V_SHAPED else list(range(rank, last + 1, size))
        torch.manual_seed(rank)
        self.modules = [
            nn.Sequential(*[Block(options.dim) for _ in range(options.layers // self.num_stages)]) for _ in self.mine
        ]
        stages = [
            pipelining.PipelineStage(module, index, self.num_stages, torch.device("cpu"))
            for module, index in zip(self.modules, self.mine, strict=True)
        ]
        schedule = get_schedule_class(options.schedule)
        self.schedule: Any = schedule(
            stages if per_rank > 1 else stages[0], n_microbatches=options.microbatches, loss_fn=mse_loss
        )
        shape = (options.microbatches, options.length, options.dim)
        self.x, self.target = torch.randn(shape), torch.randn(shape)

    def step(self) -> float:
        """Take a step; the seconds of the slowest rank."""
        for module in self.modules:
            module.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        args = (self.x,) if 0 in self.mine else ()
        is_last = self.num_stages - 1 in self.mine
        self.schedule.step(*args, target=self.target if is_last else None, losses=[] if is_last else None)
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()


def rank_main(rank: int, port: int, names: list[str], options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), HP_PLATFORM="torch")
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    contenders = {name: Contender(name, options) for name in names}
    for contender in contenders.values():
        for _ in range(WARM_UP):
            contender.step()
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name, contender in contenders.items():
            times[name].append(contender.step())
    peak = torch.tensor(float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1024)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if rank == 0:
        results.put(({name: statistics.median(each) for name, each in times.items()}, peak.item()))
    dist.barrier()
    dist.destroy_process_group()


def run(names: list[str], options: argparse.Namespace) -> tuple[dict[str, float], float]:
    """Start the ranks; return the median seconds of each contender, and the largest resident MiB of a rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(rank_main, (port, names, options, results), nprocs=options.ranks)
    return results.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    times, _ = run(["ours", "torch"], options)
    peaks = {name: run([name], options)[1] for name in ("ours", "torch")}
    print(f"{options.schedule} on {options.ranks} ranks, {options.microbatches} micro-batches, width {options.dim}")
    for what, found, unit in (("step", {n: 1e3 * t for n, t in times.items()}, "ms"), ("resident", peaks, "MiB")):
        share = found["ours"] / found["torch"]
        print(f"  {what}: ours {found['ours']:.1f} {unit}, torch {found['torch']:.1f} {unit} ({share:.2f})")


if __name__ == "__main__":
    main()
