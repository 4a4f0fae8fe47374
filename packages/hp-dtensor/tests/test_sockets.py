"""Groups over sockets: what they do after a failure, and how their ranks meet."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from array_platform import ArrayPlatform

from hp_dtensor.comm.sockets import SocketWorld
from hp_dtensor.exceptions import CollectiveError


@pytest.fixture
def on_ranks(free_port):
    """`on_ranks(program, size, timeout_seconds)`: the results of `program(world)` on ranks in threads."""

    def run(program, size, timeout_seconds):
        address = f"127.0.0.1:{free_port()}"

        def one(rank):
            world = SocketWorld(rank, size, ArrayPlatform(), address, timeout_seconds)
            return program(world), world

        with ThreadPoolExecutor(size) as threads:
            # Closed together at the end: a rank that has left must not be taken for one that is late.
            found = [each.result() for each in [threads.submit(one, rank) for rank in range(size)]]
        for _, world in found:
            world.close()
        return [result for result, _ in found]

    return run


def test_a_group_is_refused_after_a_collective_that_timed_out(on_ranks):
    """The messages of the failed call must not serve the next one."""
    others_failed = threading.Barrier(3)

    def program(world):
        def reduced(value):
            x = np.full(2, value)
            try:
                world.all.all_reduce(x)
            except CollectiveError as error:
                return str(error)
            return x.tolist()

        found = [reduced(1.0)]
        if world.rank == 1:
            others_failed.wait()
        found.append(reduced(10.0))
        if world.rank != 1:
            others_failed.wait()
        found.append(reduced(100.0))
        world.release(world.all)
        return [*found, reduced(1000.0)]

    first, late, last = on_ranks(program, 3, 0.5)
    assert first[0] == late[0] == last[0] == [3.0, 3.0]
    assert late[1] == [30.0, 30.0]  # the others had sent theirs
    assert "has sent nothing" in late[2]
    for found in (first, last):
        assert "waits for a message of rank 1, which has sent nothing for 0.5 s" in found[1]
        assert all("all_reduce on rank" in each and "[0, 1, 2] has failed before" in each for each in found[2:])
    assert "has failed before" in late[3]


def test_a_wait_that_has_timed_out_does_not_succeed_later(on_ranks):
    def program(world):
        if world.rank == 0:
            return None
        work = world.all.start_exchange([None, None], [np.zeros(2), None])
        for _ in range(2):
            with pytest.raises(CollectiveError, match="has sent nothing"):
                work.wait()
        return True

    assert on_ranks(program, 2, 0.2) == [None, True]
