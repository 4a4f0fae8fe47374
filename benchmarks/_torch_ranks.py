"""Ranks of torch.distributed for benchmarks that compare with torch, and a transformer block to train."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


def run_torch_ranks(program: Callable[..., Any], num_ranks: int, *arguments: Any, backend: str = "gloo") -> Any:
    """Call `program(*arguments)` on ranks in new processes, with one thread each.

    Returns:
        The result of rank 0.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed. The others are terminated.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_rank, (program, num_ranks, arguments, backend, port, results), nprocs=num_ranks)
    return results.get()


def _rank(
    rank: int,
    program: Callable[..., Any],
    num_ranks: int,
    arguments: tuple[Any, ...],
    backend: str,
    port: int,
    results: Any,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), HP_PLATFORM="torch")
    dist.init_process_group(backend, rank=rank, world_size=num_ranks)
    result = program(*arguments)
    if rank == 0:
        results.put(result)
    dist.barrier()
    dist.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Skips Python's shutdown, during which threads of gloo sometimes abort a rank ("terminate called without an
    # active exception") after its work is done.
    os._exit(0)


def connected_platform() -> Any:
    """Return our platform for torch, with the ranks of `run_torch_ranks` as its world."""
    from hp_dtensor import get_platform

    platform = get_platform("torch")
    if platform.world is None:
        platform.connect(dist.get_rank(), dist.get_world_size(), "127.0.0.1:0")
    return platform


class Block(nn.Module):
    """A transformer block: attention and an MLP of four times the width, each after a norm."""

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
