"""One step of a pipeline here and by torch.distributed.pipelining, on gloo ranks of one thread each.

    python benchmarks/pipeline_step.py [--ranks 2 | --ranks 4] [--schedule 1F1B] [--dim 256] [--rounds 9]

A stack of transformer blocks, the same stages and weights for both. Prints the median step time of each, measured in
turns in the same processes (the slowest rank's), and the largest resident memory of a rank, measured in processes of
its own. In brackets what ours takes of torch's.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from _torch_ranks import Block, connected_platform, run_torch_ranks
from torch import nn
from torch.nn.functional import mse_loss

WARM_UP = 3
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def stages_per_rank(schedule: str) -> int:
    return 2 if schedule in V_SHAPED or schedule.startswith("Interleaved") else 1


class Contender:
    """A pipeline of one of the two packages, with stages of its own."""

    def __init__(self, package: str, options: argparse.Namespace) -> None:
        if package == "torch":
            from torch.distributed import pipelining
            from torch.distributed.pipelining.schedules import get_schedule_class
        else:
            from hp_trainer import pipeline as pipelining
            from hp_trainer.pipeline import get_schedule_class

            connected_platform()
        rank, size = dist.get_rank(), dist.get_world_size()
        per_rank = stages_per_rank(options.schedule)
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


def measure(names: list[str], options: argparse.Namespace) -> tuple[dict[str, float], float]:
    """Return the median seconds of each contender, and the largest resident MiB of a rank."""
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
    return {name: statistics.median(each) for name, each in times.items()}, peak.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedule", default="1F1B", help="a name that torch's get_schedule_class knows")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    stages = options.ranks * stages_per_rank(options.schedule)
    if options.layers % stages:
        parser.error(f"--layers must be a multiple of the {stages} stages, got {options.layers}")
    times, _ = run_torch_ranks(measure, options.ranks, ["ours", "torch"], options)
    peaks = {name: run_torch_ranks(measure, options.ranks, [name], options)[1] for name in ("ours", "torch")}
    print(f"{options.schedule} on {options.ranks} ranks, {options.microbatches} micro-batches, width {options.dim}")
    for what, found, unit in (("step", {n: 1e3 * t for n, t in times.items()}, "ms"), ("resident", peaks, "MiB")):
        share = found["ours"] / found["torch"]
        print(f"  {what}: ours {found['ours']:.1f} {unit}, torch {found['torch']:.1f} {unit} ({share:.2f})")


if __name__ == "__main__":
    main()
