"""Recomputation and offload against torch's own: peak bytes of activations on the device, and time, in one run.

Host copies are not counted, even if the device is the host; tensors copied back are.

    python benchmarks/recompute.py [--layers=3 --length=128]

All variants alternate step by step in one process; in brackets our share of torch's figure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hp_dtensor import get_platform
from hp_dtensor.parallel.offload import ActivationOffload
from hp_dtensor.parallel.recompute import checkpoint
from hp_platform_torch.trainer.counted_step import counted_bytes

SAVED = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def contexts():
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def on_cpu(block, x):
    hooks = torch.autograd.graph.save_on_cpu()

    def pack(tensor):
        with _disable_current_modes():
            return hooks.pack_hook(tensor.clone())

    # On the CPU torch copies neither way, as it would from and to a device.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: hooks.unpack_hook(packed).clone()):
        return block(x)


def plainly(block, x):
    return block(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 3), ("length", 128), ("width", 128), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    platform = get_platform("torch")
    blocks = [Block(options.width) for _ in range(options.layers)]
    # Each makes what calls the blocks of one forward.
    ways = {
        "none": lambda: plainly,
        "ours, full": lambda: partial(checkpoint, platform=platform),
        "torch, full": lambda: partial(torch_checkpoint, use_reentrant=False),
        "ours, products saved": lambda: partial(checkpoint, platform=platform, save=("products",)),
        "torch, products saved": lambda: partial(torch_checkpoint, use_reentrant=False, context_fn=contexts),
        "ours, offloaded": lambda: ActivationOffload(platform),
        "torch, offloaded": lambda: on_cpu,
    }
    x = torch.randn(4, options.length, options.width, requires_grad=True)

    def step(way):
        y, call = x, way()
        for block in blocks:
            y = call(block, y)
        y.sum().backward()

    seconds = {name: [] for name in ways}
    for _ in range(options.repeats):  # in turn, so that all see the same machine
        for name, way in ways.items():
            begin = time.perf_counter()
            step(way)
            seconds[name].append(time.perf_counter() - begin)
    found = {}
    for name, way in ways.items():
        with counted_bytes() as live:
            step(way)
        found[name] = statistics.median(seconds[name]) * 1e3, live.peak / 2**20
    for name, figures in found.items():
        theirs = found[name.replace("ours", "torch")]
        shares = [f" ({x / y:.2f})" if name.startswith("ours") else "" for x, y in zip(figures, theirs, strict=True)]
        print(f"{name:22} {figures[0]:8.1f} ms{shares[0]:7} {figures[1]:8.1f} MiB at most{shares[1]}")


if __name__ == "__main__":
    main()
