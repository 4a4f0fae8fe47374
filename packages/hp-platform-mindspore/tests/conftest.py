"""Real MCCL ranks, started once per test session and size; what MindSpore changes for the process is put back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hp_dtensor.platform.selection import get_platform

# Tests and ranks import helper modules by their names.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def platform():
    return get_platform("mindspore")


@pytest.fixture(autouse=True)
def _process_as_before(platform, monkeypatch):
    """`value_and_grad` leaves recording off, and rewriting cells leaves folders of MindSpore on the path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = platform.rank_state()
    yield
    platform.set_rank_state(before)


@pytest.fixture(scope="session")
def two_ranks(rank_pool):
    return rank_pool(2)


@pytest.fixture(scope="session")
def three_ranks(rank_pool):
    return rank_pool(3)
