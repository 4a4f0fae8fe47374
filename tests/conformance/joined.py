"""A program started by a launcher: joins its job and sums over the ranks."""

from __future__ import annotations

import sys

from rank_programs import total

from hp_dtensor.launch import from_environment
from hp_dtensor.platform.selection import get_platform

if __name__ == "__main__":
    platform = get_platform(sys.argv[1])
    world = from_environment(platform)
    print(f"rank {world.rank} of {world.size}: {total(platform.name)}", flush=True)
    platform.disconnect()
