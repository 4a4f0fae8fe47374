from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Ranks of the pool import the functions that tests give them by module name; the oracle of a layer is shared.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "moe")]


@pytest.fixture(scope="session")
def platform(hp_platform):
    """The platform under test."""
    return hp_platform
