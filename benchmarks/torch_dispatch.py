"""Host time of operations on DTensors: ours, torch's own DTensor, and plain tensors. One process, one CPU thread.

    python benchmarks/torch_dispatch.py [--seconds 0.3]

The tensors are tiny, so that what is measured is the way to the kernel and back. Each number is the best of
several rounds, in microseconds; "over plain" is what distribution adds.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs

import hp_dtensor.api as ours
from hp_dtensor.mesh import init_device_mesh
from hp_dtensor.placements import Replicate, Shard

ROUNDS = 7


def operations():
    """name -> function(x, y, w): x, y sharded by rows and w replicated, all 8 x 8, w requiring a gradient."""

    def in_place(x, y, w):
        return x.add_(y)

    def forward_backward(x, y, w):
        loss = torch.nn.functional.silu(x @ w).sum()
        loss.backward()
        w.grad = None

    return {
        "add": lambda x, y, w: x + y,
        "add a number": lambda x, y, w: x + 1.5,
        "in-place add": in_place,
        "matmul": lambda x, y, w: x @ w,
        "view": lambda x, y, w: x.view(8, 2, 4),
        "transpose": lambda x, y, w: x.transpose(0, 1),
        "softmax": lambda x, y, w: torch.softmax(x, 1),
        "sum over rows": lambda x, y, w: x.sum(1),
        "cat": lambda x, y, w: torch.cat([x, y], 1),
        "detach": lambda x, y, w: x.detach(),
        "shape": lambda x, y, w: x.shape,
        "matmul silu sum + backward": forward_backward,
    }


def plain_tensors():
    return [torch.randn(8, 8) for _ in range(3)]


def their_tensors():
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    placements = [theirs.Shard(0), theirs.Shard(0), theirs.Replicate()]
    return [theirs.distribute_tensor(torch.randn(8, 8), mesh, [placement]) for placement in placements]


def our_tensors():
    mesh = init_device_mesh("cpu", (1,), platform="torch")
    return [
        ours.distribute_tensor(torch.randn(8, 8), mesh, [placement]) for placement in (Shard(0), Shard(0), Replicate())
    ]


def optimizer_step(make, **kwargs):
    """An AdamW step over 60 parameters."""
    parameters = [torch.nn.Parameter(x) for _ in range(20) for x in make()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter.detach())
    return torch.optim.AdamW(parameters, foreach=True).step


def microseconds(function, seconds):
    """Best mean time of a call over rounds that together take about `seconds`."""
    function()
    start = time.process_time()
    function()
    once = max(time.process_time() - start, 1e-7)
    calls = max(1, int(seconds / ROUNDS / once))
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(calls):
            function()
        best = min(best, (time.process_time() - start) / calls)
    return best * 1e6


def measure(seconds):
    """(name, (plain, ours, theirs)); the contestants take turns, so that a busy machine is fair."""
    makers = (plain_tensors, our_tensors, their_tensors)
    for name, operation in operations().items():
        contestants = []
        for make in makers:
            x, y, w = make()
            contestants.append(functools.partial(operation, x, y, torch.nn.Parameter(w)))
        yield name, [microseconds(run, seconds) for run in contestants]
    yield "AdamW, 60 parameters", [microseconds(optimizer_step(make), seconds) for make in makers]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="per operation and contestant")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.disable()
    print(f"torch {torch.__version__}, microseconds of processor time per call")
    print(f"{'':28}{'plain':>9}{'ours':>9}{'torch':>9}{'ours over plain':>18}{'torch over plain':>18}")
    for name, (plain, our, their) in measure(seconds):
        print(f"{name:28}{plain:9.2f}{our:9.2f}{their:9.2f}{our - plain:18.2f}{their - plain:18.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
