"""Attention of packed rows that ranks share: a sharding by documents against head and tail of the row.

    python benchmarks/packed_rows.py [--ranks 2 | --ranks 4] [--length 8192] [--documents 8] [--rows 1] [--packings 4]

Documents have random lengths. Both shardings take each step in turn in the same gloo processes, one thread each, over
the same packings. For each method the table has the bytes that a rank sends (the mean), the median step time, and the
processor time of the busiest rank; then the ratios of both times to those of head and tail, the median of steps that
followed each other, and the limit of that ratio: the quotient of the busiest ranks' work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _torch_ranks import connected_platform, run_torch_ranks

METHODS = ("ring", "all_gather")
SHARDINGS = ("head and tail of the row", "of the documents")
WARM_UP = 1
Documents = tuple[tuple[int, ...], ...]


def packing(random: np.random.Generator, length: int, documents: int) -> tuple[int, ...]:
    ends = np.sort(random.choice(np.arange(1, length), documents - 1, replace=False))
    return tuple(np.diff([0, *ends, length]).tolist())


def shardings_of(documents: Documents, ranks: int, method: str) -> dict[str, Any]:
    """Return both shardings by name."""
    from hp_dtensor import SequenceSharding

    length = sum(documents[0])
    of_row = SequenceSharding(length=length, ranks=ranks)
    of_documents = SequenceSharding(length=length, ranks=ranks, documents=documents, even_hops=method == "ring")
    return dict(zip(SHARDINGS, (of_row, of_documents), strict=True))


def imbalance(documents: Documents, sharding: Any) -> float:
    """Return the busiest rank's work over the mean."""
    from hp_dtensor.parallel.attention.sharding import work_of_indices

    work = work_of_indices(documents, [sharding.indices(rank) for rank in range(sharding.ranks)])
    return max(work) * len(work) / sum(work)


def measure(packings: list[Documents], method: str, rounds: int, heads: int, dim: int) -> list[Any]:
    return [measure_packing(each, method, rounds, heads, dim) for each in packings]


def measure_packing(documents: Documents, method: str, rounds: int, heads: int, dim: int) -> dict[str, Any]:
    """Return by sharding the seconds of each step, the busiest rank's processor seconds, and the bytes sent."""
    from hp_dtensor import init_device_mesh, record_collectives

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), platform=connected_platform())
    shardings = shardings_of(documents, mesh.size(), method)
    steps = {name: step_of(documents, sharding, mesh, method, heads, dim) for name, sharding in shardings.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    sent = {}
    for name, step in steps.items():
        with record_collectives() as log:
            step()
        sent[name] = mean_over_ranks(log.wire_bytes())
    for index in range(rounds + WARM_UP):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            step()
            spent = time.process_time() - start[1]
            dist.barrier()
            if index >= WARM_UP:
                seconds[name].append((time.perf_counter() - start[0], most_of_ranks(spent)))
    return {"seconds": seconds, "sent": sent}


def step_of(documents: Any, sharding: Any, mesh: Any, method: str, heads: int, dim: int) -> Any:
    from hp_dtensor import AttentionMask, context_parallel_attention

    rank, rows = dist.get_rank(), len(documents)
    full = np.array([np.concatenate([np.arange(size) for size in row]) for row in documents])
    positions = torch.from_numpy(sharding.shard(full, rank))
    shape = rows, heads, positions.shape[1], dim
    tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape)

    def step() -> None:
        for x in tensors:
            x.grad = None
        mask = AttentionMask(positions=positions)
        out = context_parallel_attention(*tensors, mesh, mask=mask, sharding=sharding, method=method)
        out.backward(grad)

    return step


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def most_of_ranks(value: float) -> float:
    most = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def print_method(results: list[dict[str, Any]], limit: float) -> None:
    for name in SHARDINGS:
        every = [pair for result in results for pair in result["seconds"][name]]
        wall, busiest = (statistics.median(each) * 1e3 for each in zip(*every, strict=True))
        sent = statistics.mean(result["sent"][name] for result in results) / 2**20
        print(f"  {name:26s} {wall:9.1f} ms a step, {busiest:9.1f} ms of the busiest rank, {sent:7.2f} MiB sent")
    pairs = [
        (new[0] / old[0], new[1] / old[1])
        for result in results
        for old, new in zip(*(result["seconds"][name] for name in SHARDINGS), strict=True)
    ]
    wall, busiest = (statistics.median(each) for each in zip(*pairs, strict=True))
    print(f"  ratio: step {wall:.2f}, busiest rank {busiest:.2f}; by work alone {limit:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--packings", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    packings = [
        tuple(packing(random, options.length, options.documents) for _ in range(options.rows))
        for _ in range(options.packings)
    ]
    print(f"{options.rows} rows of {options.length} tokens, {options.documents} documents in each")
    for method in METHODS:
        by_packing = [shardings_of(each, options.ranks, method).values() for each in packings]
        found = [[imbalance(each, x) for x in both] for each, both in zip(packings, by_packing, strict=True)]
        print(f"\n{method}, {options.ranks} ranks; the busiest rank's work over the mean, by packing:")
        for name, values in zip(SHARDINGS, zip(*found, strict=True), strict=True):
            print(f"  {name:26s} {', '.join(f'{value:.3f}' for value in values)}")
        limit = statistics.median(new / old for old, new in found)
        given = packings, method, options.rounds, options.heads, options.head_dim
        print_method(run_torch_ranks(measure, options.ranks, *given), limit)


if __name__ == "__main__":
    main()
