"""Recomputation against torch's own: peak bytes of activations and time of a forward and backward, in one run.

python benchmarks/recompute.py [--layers=3 --length=128]
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hp_dtensor import get_platform
from hp_dtensor.parallel.recompute import checkpoint

KEPT = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def contexts():
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def on_cpu(block, x):
    with torch.autograd.graph.save_on_cpu():
        return block(x)


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 3), ("length", 128), ("width", 128), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    platform = get_platform("torch")
    blocks = [Block(options.width) for _ in range(options.layers)]
    ways = {
        "none": lambda block, x: block(x),
        "ours, full": partial(checkpoint, platform=platform),
        "torch, full": partial(torch_checkpoint, use_reentrant=False),
        "ours, products kept": partial(checkpoint, platform=platform, keep=("products",)),
        "torch, products kept": partial(torch_checkpoint, use_reentrant=False, context_fn=contexts),
        "torch, save_on_cpu": on_cpu,
    }
    x = torch.randn(4, options.length, options.width, requires_grad=True)

    def step(way):
        y = x
        for block in blocks:
            y = way(block, y)
        y.sum().backward()

    seconds = {name: [] for name in ways}
    for _ in range(options.repeats):  # in turn, so that all see the same machine
        for name, way in ways.items():
            begin = time.perf_counter()
            step(way)
            seconds[name].append(time.perf_counter() - begin)
    for name, way in ways.items():
        with platform.live_bytes() as live:
            step(way)
        print(f"{name:22} {statistics.median(seconds[name]) * 1e3:8.1f} ms {live.peak / 2**20:8.1f} MiB at most")


if __name__ == "__main__":
    main()
