"""One training step under hp_fsdp, torch's `fully_shard` and DDP, on two gloo ranks of one thread each.

    python benchmarks/fsdp_step.py [--size 25 | --size 100] [--rounds 7]
    python benchmarks/fsdp_step.py --device cuda          # one rank: what sharding costs over the plain module

A transformer of about 25 or 100 million parameters. Prints the median step time of each contender, measured
alternately in the same processes; the part of it beyond the forward and backward of the plain module; and the peak
resident memory of each, measured in separate processes (on CUDA: allocated memory). The ratios of ours to each are in
brackets.

With two ranks it also prints the limit of each: the plain forward and backward with both ranks computing, its
optimizer's share of the elements, and the processor time of the bytes that a rank sends and receives, as messages of a
block's size between idle ranks: over gloo, or for ours as our groups send them. Ranks have a core each, so a transfer
that is hidden behind products takes its processor time from them, and the three add up. `of limit` is the step time
over it. A last row has the time in which ours waits in collectives, for the other rank too, and the time from the start
of its last reduce-scatter to the end of the backward: all that an optimizer's step beside that reduction could hide.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from _torch_ranks import Block, connected_platform, run_torch_ranks
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY = 8192
WARM_UP = 2
# Millions of parameters: layers, width.
SIZES = {25: (8, 416), 100: (12, 768)}


class Transformer(nn.Module):
    """A transformer: embedding, blocks, norm, head."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
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
    from hp_dtensor import init_device_mesh
    from hp_fsdp import Communication, fully_shard

    class Timed(Communication):
        """Records when the last reduce-scatter has started."""

        def reduce_scatter(self, output, gradients, group):
            model.last_reduction = time.perf_counter()
            return super().reduce_scatter(output, gradients, group)

    platform = connected_platform()
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",), platform=platform)
    for module in (*model.blocks, model):
        fully_shard(module, mesh, communication=Timed(platform))
    model.group = platform.world.all
    return model


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
    """Results on rank 0 by contender: seconds of steps, of their forwards and backwards, losses, and peak bytes.

    `sent` are the bytes that a rank sends in a step, `link` the processor seconds of a byte sent and one received over
    gloo, and `our_link` in an exchange of our groups. `waits` are those of ours in each step: in collectives, and from
    the start of the last reduce-scatter to the end of the backward.
    """

    steps: dict[str, list[float]]
    passes: dict[str, list[float]]
    losses: dict[str, list[float]]
    sent: dict[str, float]
    peak: int
    link: float = 0.0
    our_link: float = 0.0
    waits: list[tuple[float, float]] = field(default_factory=list)


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


def sent_bytes(model: Transformer) -> dict[str, float]:
    """Return the bytes that a rank sends in a step: parameters gathered in forward, again in backward but for the
    root's own, and gradients reduced; in DDP an all-reduce of all gradients."""
    ranks, all_bytes = dist.get_world_size(), sum(x.nbytes for x in model.parameters())
    blocks = sum(x.nbytes for x in model.blocks.parameters())
    share = (ranks - 1) / ranks
    sharded = share * (all_bytes + blocks + all_bytes)
    return {"ours": sharded, "fsdp2": sharded, "ddp": share * 2 * all_bytes, "plain": 0.0}


def over_gloo(leaving: torch.Tensor, arriving: torch.Tensor, other: int) -> None:
    works = [dist.irecv(arriving, other), dist.isend(leaving, other)]
    for work in works:
        work.wait()


def by_our_group(leaving: torch.Tensor, arriving: torch.Tensor, other: int) -> None:
    sends, receives = [None, None], [None, None]
    sends[other], receives[other] = leaving, arriving
    connected_platform().world.all.exchange(sends, receives)


def link_seconds(exchange: Callable[[torch.Tensor, torch.Tensor, int], None], num_bytes: int) -> float:
    """Return the processor seconds of a byte sent and one received, as messages of `num_bytes` in both directions."""
    leaving, arriving = torch.ones(num_bytes // 4), torch.ones(num_bytes // 4)
    best = math.inf
    for _ in range(20):
        dist.barrier()
        start = time.process_time()
        exchange(leaving, arriving, 1 - dist.get_rank())
        best = min(best, time.process_time() - start)
    return best / num_bytes


def measure(names: Sequence[str], options: argparse.Namespace) -> Measured:
    """Run one rank, on which the contenders alternate step by step."""
    device = options.device
    sent = sent_bytes(Transformer(options.layers, options.dim))
    measured = Measured(
        {name: [] for name in names}, {name: [] for name in names}, {name: [] for name in names}, sent, 0
    )
    trained = {}
    for name in names:
        torch.manual_seed(0)
        model = CONTENDERS[name](Transformer(options.layers, options.dim).to(device), device)
        trained[name] = model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    for step in range(options.rounds + WARM_UP):
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        ids = torch.randint(0, VOCABULARY, (options.batch, options.length + 1), generator=generator).to(device)
        for name, (model, optimizer) in trained.items():
            waited = model.group.seconds_waited if name == "ours" else 0.0
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
                if name == "ours" and options.ranks > 1:
                    waits = model.group.seconds_waited - waited, middle - model.last_reduction
                    measured.waits.append(waits)
            measured.losses[name].append(loss.item())
    measured.peak = peak_bytes(device)
    if dist.get_world_size() == 2:
        num_bytes = int(sent["ours"] / 3 / options.layers)
        measured.link, measured.our_link = link_seconds(over_gloo, num_bytes), link_seconds(by_our_group, num_bytes)
    return measured


def run(names: Sequence[str], options: argparse.Namespace) -> Measured:
    """Run all ranks with these contenders; return the results of rank 0."""
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
    return run_torch_ranks(measure, options.ranks, names, options, backend=backend)


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
        share = 1 / options.ranks if name in ("ours", "fsdp2") else 1.0
        link = measured.our_link if name == "ours" else measured.link
        limit = passes["plain"] + share * (step["plain"] - passes["plain"]) + measured.sent[name] * link
        over = step[name] / limit
        print(
            f"{name:6s} {step[name] * 1e3:8.1f} ms ({step['ours'] / step[name]:4.2f}), not compute {added:5.1%},"
            f" {peak[name] / 2**20:8.0f} MiB ({peak['ours'] / peak[name]:4.2f}),"
            f" sends {measured.sent[name] / 1e6:5.1f} MB, limit {limit * 1e3:6.1f} ms, of limit {over:4.2f}"
        )
    if measured.waits:
        waited, at_end = (statistics.median(values) * 1e3 for values in zip(*measured.waits, strict=True))
        print(f"ours waits {waited:.1f} ms in collectives; {at_end:.1f} ms from its last reduce-scatter to the end")
    worst = max(abs(a - b) for a, b in zip(measured.losses["ours"], measured.losses["fsdp2"], strict=True))
    print(f"largest difference of a loss between ours and fsdp2: {worst:.1e}")
    print(json.dumps({"seconds": step, "forward_backward_seconds": passes, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
