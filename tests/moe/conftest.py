from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hp_dtensor.selection import get_platform

# Ranks of the pool import the functions that tests give them by module name.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def platform():
    """The platform under test: `HP_PLATFORM`, or the only one installed."""
    return get_platform()
