"""Real gloo ranks, started once per test session and size, and simulated ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hp_dtensor.platform.selection import get_platform

# Tests and ranks import helper modules by their names.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def platform():
    return get_platform("torch")


@pytest.fixture(scope="session")
def two_ranks(rank_pool):
    return rank_pool(2)


@pytest.fixture(scope="session")
def three_ranks(rank_pool):
    return rank_pool(3)
