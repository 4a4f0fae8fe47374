"""Pipeline steps of hp_trainer and of torch.distributed.pipelining, on gloo ranks with one thread each.

    python benchmarks/pipeline_step.py [--ranks 2 | --ranks 4] [--schedule 1F1B ...] [--dim 64 256 --length 32 128]

The model is a stack of transformer blocks, with the same stages and weights for both packages. Every schedule runs at
a narrow size, where overhead dominates, and at a wide one, where computation does. Times are milliseconds, measured in
turns in the same processes:

    step   median time of a step on the slowest rank, of hp_trainer and of torch, and the median of their ratios
    limit  lower bound of a step: the schedule of hp_trainer with the processor time of each computation, measured in
           the same turns; see `_pipeline_limit.py`. It is at least the total work divided by the number of cores.
    sent   as limit, with the messages of the schedule sent by gloo
    share  the bound divided by step, of hp_trainer and of torch; a step cannot be faster than 1.00, so the ratio of
           the steps cannot be below torch's share
    cpu    processor time of a step, summed over ranks, of hp_trainer and of torch, and their ratio;
           work: that of the computation alone

Other programs on the same cores lengthen steps and reduce shares, but do not affect processor times.

With --memory also the largest resident memory of a rank at the last size, with each package in its own processes.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from _pipeline_limit import Computation
from _torch_ranks import Block, connected_platform, run_torch_ranks
from torch import nn
from torch.nn.functional import mse_loss

WARM_UP = 3
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def stages_per_rank(schedule: str) -> int:
    return 2 if schedule in V_SHAPED or schedule.startswith("Interleaved") else 1


class Contender:
    """A pipeline of one of the two packages, with its own stages."""

    def __init__(self, package: str, name: str, dim: int, length: int, options: argparse.Namespace) -> None:
        if package == "torch":
            from torch.distributed import pipelining
            from torch.distributed.pipelining.schedules import get_schedule_class
        else:
            from hp_trainer import pipeline as pipelining
            from hp_trainer.pipeline import get_schedule_class

            connected_platform()
        rank, size = dist.get_rank(), dist.get_world_size()
        per_rank = stages_per_rank(name)
        self.num_stages = size * per_rank
        last = self.num_stages - 1
        self.mine = [rank, last - rank] if name in V_SHAPED else list(range(rank, last + 1, size))
        torch.manual_seed(rank)
        self.modules = [
            nn.Sequential(*[Block(dim) for _ in range(options.layers // self.num_stages)]) for _ in self.mine
        ]
        stages = [
            pipelining.PipelineStage(module, index, self.num_stages, torch.device("cpu"))
            for module, index in zip(self.modules, self.mine, strict=True)
        ]
        self.schedule: Any = get_schedule_class(name)(
            stages if per_rank > 1 else stages[0], n_microbatches=options.microbatches, loss_fn=mse_loss
        )
        shape = (options.microbatches, length, dim)
        self.x, self.target = torch.randn(shape), torch.randn(shape)

    def step(self) -> tuple[float, float]:
        """Run a step; return the seconds of the slowest rank and the processor seconds of all ranks."""
        for module in self.modules:
            module.zero_grad()
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        args = (self.x,) if 0 in self.mine else ()
        is_last = self.num_stages - 1 in self.mine
        self.schedule.step(*args, target=self.target if is_last else None, losses=[] if is_last else None)
        wall, cpu = torch.tensor(time.perf_counter() - start), torch.tensor(time.process_time() - cpu)
        dist.all_reduce(wall, dist.ReduceOp.MAX)
        dist.all_reduce(cpu)
        return wall.item(), cpu.item()


HEAD = (
    f"{'schedule':22} {'size':>8} | {'step':>7} {'torch':>7} ratio | {'limit':>7} share torch | "
    f"{'sent':>7} share torch | {'cpu':>7} {'torch':>7} ratio {'work':>7}"
)


def measure(name: str, dim: int, length: int, options: argparse.Namespace) -> str:
    """Measure both packages and the limit in turns; return a row of the table."""
    contenders = {package: Contender(package, name, dim, length, options) for package in ("ours", "torch")}
    ours = contenders["ours"]
    schedule = ours.schedule.pipeline.schedule
    computation = Computation(schedule, dict(zip(ours.mine, ours.modules, strict=True)), (1, length, dim), mse_loss)
    turns = []
    for _ in range(WARM_UP + options.rounds):
        turns.append([1e3 * seconds for contender in contenders.values() for seconds in contender.step()])
        computation.measure()
    turns = turns[WARM_UP:]
    wall, cpu, their_wall, their_cpu = (statistics.median(each) for each in zip(*turns, strict=True))
    faster, cheaper = (statistics.median(turn[i] / turn[i + 2] for turn in turns) for i in (0, 1))
    limit, sent, work = (1e3 * seconds for seconds in computation.least_seconds())
    return (
        f"{name:22} {f'{dim}x{length}':>8} | {wall:7.1f} {their_wall:7.1f} {faster:5.2f} | "
        f"{limit:7.1f} {limit / wall:5.2f} {limit / their_wall:5.2f} | "
        f"{sent:7.1f} {sent / wall:5.2f} {sent / their_wall:5.2f} | "
        f"{cpu:7.1f} {their_cpu:7.1f} {cheaper:5.2f} {work:7.1f}"
    )


def measure_all(options: argparse.Namespace) -> None:
    """Measure all sizes and schedules, and print each row at once."""
    for dim, length in sizes(options):
        for name in options.schedule:
            found = measure(name, dim, length, options)
            if dist.get_rank() == 0:
                print(found, flush=True)


def resident(package: str, name: str, options: argparse.Namespace) -> float:
    """Return the largest resident MiB of a rank after a few steps of one package."""
    *_, (dim, length) = sizes(options)
    contender = Contender(package, name, dim, length, options)
    for _ in range(2 * WARM_UP):
        contender.step()
    peak = torch.tensor(float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1024)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return peak.item()


def sizes(options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    return zip(options.dim, options.length, strict=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedule", nargs="+", default=["all"], choices=["all", *SCHEDULES], help="default: all")
    parser.add_argument("--dim", type=int, nargs="+", default=[64, 256], help="widths; default: 64 256")
    parser.add_argument(
        "--length", type=int, nargs="+", default=[32, 128], help="sequence length for each width; default: 32 128"
    )
    parser.add_argument("--layers", type=int, default=8, help="blocks of the model; default: 8")
    parser.add_argument(
        "--microbatches", type=int, default=8, help="number of micro-batches, of one sequence each; default: 8"
    )
    parser.add_argument("--rounds", type=int, default=9, help="number of measured turns; default: 9")
    parser.add_argument("--memory", action="store_true", help="measure resident memory too")
    options = parser.parse_args()
    if "all" in options.schedule:
        options.schedule = list(SCHEDULES)
    if len(options.dim) != len(options.length):
        parser.error(f"--length: expected one for each of {len(options.dim)} widths, got {len(options.length)}")
    stages = options.ranks * max(map(stages_per_rank, options.schedule))
    if options.layers % stages:
        parser.error(f"--layers must be a multiple of the {stages} stages, got {options.layers}")
    if any(dim % 8 for dim in options.dim):
        parser.error(f"--dim must be a multiple of 8 heads, got {options.dim}")
    return options


def main() -> None:
    options = parsed()
    print(f"{options.ranks} ranks, {options.layers} blocks, {options.microbatches} micro-batches")
    print(HEAD, flush=True)
    run_torch_ranks(measure_all, options.ranks, options)
    for name in options.schedule if options.memory else ():
        ours, theirs = (run_torch_ranks(resident, options.ranks, each, name, options) for each in ("ours", "torch"))
        print(f"{name:22} resident: ours {ours:.1f} MiB, torch {theirs:.1f} MiB ({ours / theirs:.2f})")


if __name__ == "__main__":
    main()
