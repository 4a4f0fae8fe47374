"""The options of the pytest plugin that act on the process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CORES = """
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("number", range(6))
def test_cores(number, worker_id):
    asked = "import os; print(*os.sched_getaffinity(0))"
    started = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert {int(core) for core in started.split()} == os.sched_getaffinity(0)
    print("CORES", worker_id, *os.sched_getaffinity(0))
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_one_core_for_each_worker_and_what_it_starts(tmp_path, workers):
    pytest.importorskip("xdist")
    (tmp_path / "test_cores.py").write_text(CORES)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rP", "--hp-one-core", f"-n{workers}"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    found = {tuple(line.split()[1:]) for line in shown.splitlines() if line.startswith("CORES")}
    assert len(found) == max(workers, 1)
    cores = {core for _, core in found}
    assert len(cores) == min(len(found), len(os.sched_getaffinity(0)))


ORDER = """
import pytest

@pytest.fixture
def rank_pool():
    return None

def test_fast():
    pass

def test_pool(rank_pool):
    pass

@pytest.mark.real_ranks
def test_own():
    pass
"""


def test_workers_begin_with_tests_that_start_ranks(tmp_path):
    pytest.importorskip("xdist")
    (tmp_path / "test_order.py").write_text(ORDER)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v"]
    for option, expected in (("-n1", "own pool fast"), ("-n0", "fast pool own")):
        shown = subprocess.run([*command, option], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        ran = [re.search(r"::test_(\w+)", line)[1] for line in shown.splitlines() if "PASSED" in line]
        assert ran == expected.split(), shown


def test_a_free_port_is_none_that_the_system_gives(free_port):
    range_ = Path("/proc/sys/net/ipv4/ip_local_port_range")
    # Linux is assumed where the range cannot be read; a range of nearly all ports leaves none to choose from.
    given = range(*map(int, range_.read_text().split())) if range_.exists() else range(32768, 61000)
    found = [free_port() for _ in range(20)]
    assert len(set(found)) > 10
    assert all(10_000 <= port < max(given.start, 11_000) for port in found)
    assert given.start < 11_000 or all(port not in given for port in found)
    with socket.create_server(("127.0.0.1", found[0])) as server:
        assert server.getsockname()[1] == found[0]
