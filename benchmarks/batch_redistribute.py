"""Redistribution of many small shards to replicas: together, one by one, and by torch's DTensor, on two gloo ranks.

    python benchmarks/batch_redistribute.py [--tensors 60] [--rows 64] [--rounds 15]

Medians of rounds in which the contenders take turns, on rank 0, one thread each. `all-gather` is the time of one
collective of all bytes: what no contender can be quicker than.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from _torch_ranks import connected_platform, run_torch_ranks

COLUMNS = 64


def contenders(num_tensors, rows):
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor import distribute_tensor as torch_distribute

    from hp_dtensor import (
        Replicate,
        Shard,
        batch_redistribute,
        current_world,
        distribute_tensor,
        init_device_mesh,
    )

    platform = connected_platform()
    full_tensors = [torch.randn(rows, COLUMNS) for _ in range(num_tensors)]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), platform=platform)
    ours = [distribute_tensor(x, mesh, (Shard(0),)) for x in full_tensors]
    theirs = [torch_distribute(x, torch_mesh("cpu", (2,)), (TorchShard(0),)) for x in full_tensors]
    sent = torch.cat([x.to_local().flatten() for x in ours])
    everybody = current_world(platform).all
    landed = torch.empty(2 * sent.numel())
    return {
        "together": lambda: batch_redistribute(ours),
        "one by one": lambda: [x.redistribute(placements=(Replicate(),)) for x in ours],
        "torch": lambda: [x.redistribute(placements=(TorchReplicate(),)) for x in theirs],
        "all-gather": lambda: everybody.all_gather_into(landed, sent),
    }


def measure(options):
    """Median microseconds of each contender, on this rank."""
    calls = contenders(options.tensors, options.rows)
    times = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=60)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    medians = run_torch_ranks(measure, 2, options)
    print(f"{options.tensors} tensors [{options.rows}, {COLUMNS}], float32, from shards to replicas")
    for name, microseconds in medians.items():
        print(f"{name:12}{microseconds:10.0f} us{microseconds / medians['torch']:8.2f} of torch")


if __name__ == "__main__":
    main()
