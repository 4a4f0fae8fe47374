"""Real gloo ranks, started once per test session and size, and simulated ones."""

from __future__ import annotations

import pytest

from hp_dtensor.launch import RankPool
from hp_dtensor.platform.selection import get_platform


@pytest.fixture(scope="session")
def platform():
    return get_platform("torch")


@pytest.fixture(scope="session")
def two_ranks():
    with RankPool("torch", 2) as pool:
        yield pool


@pytest.fixture(scope="session")
def three_ranks():
    with RankPool("torch", 3) as pool:
        yield pool
