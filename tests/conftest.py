"""Helper modules, fixtures and skipped folders of the tests that need a framework or several packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# A platform's parts for other components are tested where its framework is installed.
collect_ignore = [f"platform_{name}" for name in ("torch", "mindspore") if importlib.util.find_spec(name) is None]


# Helper modules, and functions that ranks run, are imported by the names of their modules. Ranks get this path too.
_PACKAGES = ("dtensor", "fsdp", "moe", "trainer", "platform_torch", "platform_mindspore")
sys.path[:0] = sorted({str(path.parent) for package in _PACKAGES for path in (TESTS / package).rglob("*.py")})


@pytest.fixture(scope="session")
def platform(hp_platform):
    """The platform under test."""
    return hp_platform


@pytest.fixture
def torch_or(hp_platform):
    """`torch_or(chosen)`: skip a case on other platforms than torch unless it is chosen.

    For cases of code that calls a platform in the same way in all of them: they take ten times as long on MindSpore.
    """

    def skip_unless_chosen(chosen):
        if hp_platform.name != "torch" and not chosen:
            pytest.skip("all cases on torch, a few elsewhere, the others in the session `proof`")

    return skip_unless_chosen
