"""Helper modules, fixtures and skipped folders of the tests that need a framework or several packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# A platform's parts for other components are tested where its framework is installed.
collect_ignore = [f"platform_{name}" for name in ("torch", "mindspore") if importlib.util.find_spec(name) is None]


def _helper_folders() -> list[str]:
    """Return the folders with modules that tests import."""
    folders = (path for path in TESTS.iterdir() if path.name not in ("numpy_platform", "torch_scripts"))
    modules = (path for folder in folders for path in folder.rglob("*.py"))
    return sorted({str(path.parent) for path in modules if not path.name.startswith(("test_", "proof_", "conftest"))})


# Ranks that tests start get this path too, and import the functions that they run by the name of their module.
sys.path[:0] = _helper_folders()


@pytest.fixture(scope="session")
def platform(hp_platform):
    """The platform under test."""
    return hp_platform
