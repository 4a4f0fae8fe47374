"""A program started by a launcher: joins its job by asking for its world, and sums over the ranks."""

from __future__ import annotations

import os
import sys

from rank_programs import total

from hp_dtensor.comm.world import current_world
from hp_dtensor.launch import from_environment
from hp_dtensor.platform.selection import get_platform

if __name__ == "__main__":
    platform = get_platform(sys.argv[1])
    os.environ["HP_PLATFORM"] = platform.name
    world = current_world()  # joins, so that no rank takes itself for the only one
    assert from_environment(platform) is world
    print(f"rank {world.rank} of {world.size}: {total(platform.name)}", flush=True)
    platform.disconnect()
