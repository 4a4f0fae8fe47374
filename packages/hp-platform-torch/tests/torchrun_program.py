"""A program for torchrun: joins the job, reduces over a sub-group and writes what it got into a folder.

torchrun_program.py (own | device | ours) FOLDER

own: it makes torch's process group itself, and joins twice; device: likewise, one that carries no host tensors. Both
join once more and leave that to the end of the process, where they write whether this has been left.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hp_dtensor.platform.selection import get_platform


def main() -> None:
    own = sys.argv[1] != "ours"
    if own:
        dist.init_process_group("cuda:gloo" if sys.argv[1] == "device" else "gloo")
    platform = get_platform("torch")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    results = []
    for _ in range(2 if own else 1):
        world = platform.connect(rank, size, address, timeout_seconds=250)
        x = torch.full((2,), float(rank + 1))
        world.group((0, 1) if rank < 2 else (2,)).all_reduce(x)
        results.append(f"{rank} of {size}: {x.tolist()}")
        world.all.barrier()
        platform.disconnect()
    Path(sys.argv[2], f"rank{rank}").write_text("\n".join(results))
    assert dist.is_initialized() == own
    if own:
        # Registered before ours, hence called after it.
        atexit.register(lambda: Path(sys.argv[2], f"left{rank}").write_text(str(platform._world is None)))
        platform.connect(rank, size, address).all.barrier()
        dist.destroy_process_group()  # gloo's threads may abort a process that ends without


if __name__ == "__main__":
    main()
