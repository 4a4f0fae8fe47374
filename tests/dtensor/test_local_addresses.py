"""Local ranks meet on this machine's loopback: nobody outside reaches them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from hp_dtensor.launch import launch
from hp_dtensor.platform.selection import get_platform

pytestmark = pytest.mark.real_ranks

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


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_local_ranks_listen_on_loopback_alone(hp_platform):
    found = launch(sum_and_addresses, (hp_platform.name,), 2, hp_platform)
    assert [total for total, _ in found] == [[2.0] * 4] * 2
    addresses = [address for _, listening in found for address in listening]
    assert addresses
    assert set(addresses) <= set(LOOPBACK)
