"""Real MCCL ranks, started once per test session and size."""

from __future__ import annotations

import pytest

from hp_dtensor.launch import RankPool
from hp_dtensor.selection import get_platform


@pytest.fixture(scope="session")
def platform():
    return get_platform("mindspore")


@pytest.fixture(scope="session")
def two_ranks():
    with RankPool("mindspore", 2) as pool:
        yield pool


@pytest.fixture(scope="session")
def three_ranks():
    with RankPool("mindspore", 3) as pool:
        yield pool
