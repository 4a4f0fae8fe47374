import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Tests use the functions of tools, and of each other.
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "house")]


@pytest.fixture
def root() -> Path:
    """The repository's root."""
    return ROOT
