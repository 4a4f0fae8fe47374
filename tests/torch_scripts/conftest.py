"""Real gloo ranks, started once per session and number."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session")
def torch_ranks():
    from hp_dtensor.launch import RankPool

    pools = {}

    def ranks(size):
        if size not in pools:
            pools[size] = RankPool("torch", size)
            pools[size].__enter__()
        return pools[size]

    yield ranks
    for pool in pools.values():
        pool.__exit__(None, None, None)
