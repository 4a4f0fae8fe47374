"""Real ranks of the platform under test: started, failing inside collectives, never left behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import rank_programs

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.launch import RankPool, launch
from hp_dtensor.platform.selection import get_platform

pytestmark = pytest.mark.real_ranks
SECONDS = 200  # the ranks' start takes most of it, on a busy machine


@pytest.mark.usefixtures("forked_ranks")
def test_one_rank_is_a_job_too(hp_platform):
    assert launch(rank_programs.total, (hp_platform.name,), 1, hp_platform) == [[1.0] * 3]


def test_launched_ranks_are_connected_and_tensors_passed_to_them_and_back(hp_platform):
    x = hp_platform.from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3))
    for found in launch(rank_programs.summed, (hp_platform.name, x), 2, hp_platform):
        assert hp_platform.to_numpy(found).tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


def test_ranks_know_their_world_without_naming_a_platform(hp_platform, rank_pool):
    assert rank_pool(2).run(rank_programs.where_am_i, hp_platform.name) == [(0, 2, (0,)), (1, 2, (1,))]


def test_the_pool_of_the_session_is_shared(hp_platform, rank_pool):
    assert rank_pool(4).run(rank_programs.total, hp_platform.name) == [[10.0] * 3] * 4
    assert rank_pool(4) is rank_pool(4)


def test_groups_that_overlap_and_lack_rank_0(hp_platform, rank_pool):
    found = rank_pool(4).run(rank_programs.total_of_pairs, hp_platform.name)
    assert found == [[11.0], [11.0, 110.0, 1010.0], [110.0, 1100.0], [1100.0, 1010.0]]


LEAVING = {"kill": "was killed by SIGKILL", "raise": "failed: ValueError: the loss is no number"}


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_leaves_while_others_wait_for_it_is_reported_at_once(hp_platform):
    with RankPool(hp_platform, 2) as pool:
        for how, message in LEAVING.items():
            pids = pool.run("os:getpid")
            start = time.monotonic()
            with pytest.raises(LaunchError, match=f"^rank 1 of 2 {message}"):
                pool.run(rank_programs.fail_while_others_wait, hp_platform.name, 1, how)
            assert time.monotonic() - start < SECONDS
            assert not [pid for pid in pids if _exists(pid)]
            assert pool.run(rank_programs.total, hp_platform.name) == [[3.0] * 3] * 2


def _exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


LISTENING = "0A"
LOOPBACK = ("0100007F", "00000000000000000000000001000000")


def addresses_of_this_process() -> list[str]:
    """Addresses on which this process listens, in the hexadecimal of /proc/net/tcp."""
    sockets = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor))
        except OSError:
            continue
    lines = [line.split() for family in ("tcp", "tcp6") for line in open_lines(Path("/proc/net") / family)]
    listening = [fields for fields in lines if fields[3] == LISTENING and f"socket:[{fields[9]}]" in sockets]
    return [fields[1].partition(":")[0] for fields in listening]


def open_lines(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:] if path.exists() else []


def sum_and_addresses(platform: str) -> tuple[list[float], list[str]]:
    chosen = get_platform(platform)
    ones = chosen.from_numpy(np.ones(4, np.float32))
    chosen.world.all.all_reduce(ones)
    return chosen.to_numpy(ones).tolist(), addresses_of_this_process()


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_local_ranks_listen_on_loopback_alone(hp_platform):
    found = launch(sum_and_addresses, (hp_platform.name,), 2, hp_platform)
    assert [total for total, _ in found] == [[2.0] * 4] * 2
    addresses = [address for _, listening in found for address in listening]
    assert addresses
    assert set(addresses) <= set(LOOPBACK)
