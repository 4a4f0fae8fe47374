"""A program for torchrun: joins the job and reduces over a sub-group; `own` if it makes torch's group itself."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from hp_dtensor.selection import get_platform


def main() -> None:
    if sys.argv[1] == "own":
        dist.init_process_group("gloo")
    platform = get_platform("torch")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    for _ in range(2 if sys.argv[1] == "own" else 1):
        world = platform.connect(rank, size, address, timeout_seconds=60)
        x = torch.full((2,), float(rank + 1))
        world.group((0, 1) if rank < 2 else (2,)).all_reduce(x)
        print(f"rank {rank} of {size}: {x.tolist()}")
        world.all.barrier()
        platform.disconnect()
    assert dist.is_initialized() == (sys.argv[1] == "own")


if __name__ == "__main__":
    main()
