"""Helper modules, fixtures and skipped folders of the tests that need a framework or several packages."""

from __future__ import annotations

import importlib.util
import os
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
    """`torch_or(chosen)`: skip a case on other platforms than torch unless it is chosen; `nox -s proof` skips none.

    For cases of code that calls a platform in the same way in all of them: they take long on MindSpore.
    """

    def skip_unless_chosen(chosen):
        if hp_platform.name != "torch" and not chosen and "HP_ALL_CASES" not in os.environ:
            pytest.skip("all cases on torch, a few elsewhere, the others in the session `proof`")

    return skip_unless_chosen


@pytest.fixture
def torch_suffices(torch_or):
    """Skip a test of component code on other platforms than torch, where other tests run the same code."""
    torch_or(False)
