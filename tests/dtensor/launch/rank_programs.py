"""Programs that the ranks of these tests run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.launch import current_generation, lasting_memory, next_generation
from hp_dtensor.launch.local_ranks import SILENT_STATES
from hp_dtensor.platform.selection import get_platform
from hp_trainer.parallel import ParallelDims


def total(name):
    """The sum over all ranks of rank + 1."""
    platform = get_platform(name)
    world = current_world(platform)
    x = platform.from_numpy(np.full(3, world.rank + 1.0, np.float32))
    world.all.all_reduce(x)
    return platform.to_numpy(x).tolist()


def where_am_i(name):
    """This rank and the number of ranks, as asked for without a platform, and of a mesh built of them."""
    world = current_world()
    assert world is current_world(get_platform(name))
    mesh = ParallelDims(dp_shard=world.size, world_size=world.size).build_mesh("cpu")
    assert mesh == DeviceMesh("cpu", (world.size,), mesh_dim_names=("dp_shard",))
    return world.rank, world.size, mesh.get_coordinate()


def summed(name, x):
    """The tensor, summed over all ranks; this process's memory ends with it."""
    current_world(get_platform(name)).all.all_reduce(x)
    return x


def fail_while_others_wait(name, victim, how):
    """One rank leaves the job while the others are inside a collective."""
    platform = get_platform(name)
    world = current_world(platform)
    world.all.barrier()
    if world.rank == victim:
        time.sleep(0.5)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the loss is no number")
    total(name)


def total_of_pairs(name):
    """Collectives of groups that only some ranks belong to, the last ones not holding rank 0."""
    platform = get_platform(name)
    world = current_world(platform)
    sums = []
    for ranks in ((0, 1), (1, 2), (2, 3), (1, 3)):
        if world.rank in ranks:
            x = platform.from_numpy(np.full(2, 10.0**world.rank, np.float32))
            world.group(ranks).all_reduce(x)
            sums.append(float(platform.to_numpy(x)[0]))
    return sums


def wait_until_stopped(pid):
    """Wait until a process is stopped, or has ended."""
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state in SILENT_STATES:
            return
        time.sleep(0.01)


def total_through_deaths(name, signals):
    """The sum over all ranks, and the generations in which it was tried; ranks send themselves signals.

    Args:
        signals: by "generation:rank", the signal. Another rank of the generation dies when those are stopped that
            SIGSTOP is for: a survivor that sees its death first would leave, and not stop.
    """
    platform, generations = get_platform(name), []
    while True:
        generation = current_generation().number
        generations.append(generation)
        world = pair = None
        try:
            world = current_world(platform)
            pair = world.group([world.rank // 2 * 2, world.rank // 2 * 2 + 1])
            pair.all_reduce(platform.from_numpy(np.ones(3, np.float32)))
            pids = [int(pid) for pid in world.all.all_gather_bytes(str(os.getpid()).encode())]
            if (number := signals.get(f"{generation}:{world.rank}")) is not None:
                for rank, pid in enumerate(pids):
                    if rank != world.rank and signals.get(f"{generation}:{rank}") == signal.SIGSTOP:
                        wait_until_stopped(pid)
                os.kill(os.getpid(), number)
                time.sleep(60)
            return total(name), generations
        except RuntimeError:
            pass
        # Without the error, whose frames refer to the groups of this generation.
        del world, pair
        if next_generation() is None:
            raise RuntimeError("another error")


def written_through_deaths(name, signals):
    """The sum over all ranks, and what the processes of this rank have written to their memory.

    Args:
        signals: by "generation:rank", the signal that a rank sends itself.
    """
    world, generation = current_world(get_platform(name)), current_generation().number
    file, other = lasting_memory()
    with Path(file).open("a") as out:
        out.write(f"rank {world.rank} in generation {generation}\n")
    assert not Path(other).read_text()
    try:
        world.all.all_gather_bytes(b"")
        if (number := signals.get(f"{generation}:{world.rank}")) is not None:
            os.kill(os.getpid(), number)
        found = total(name)
    except RuntimeError:
        next_generation()
        raise
    return [found, *Path(file).read_text().splitlines()]


def fail_alone(name):
    """Rank 1 asks for the next generation, though no rank has died."""
    if current_world(get_platform(name)).rank == 1 and next_generation() is None:
        raise RuntimeError("the loss is no number")
    return total(name)
