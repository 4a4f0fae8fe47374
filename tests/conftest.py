"""Helper modules, fixtures and skipped folders of the tests that need a framework or several packages."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="session")
def numpy_platform_path(tmp_path_factory):
    """Entries of `sys.path` with which Python finds the NumPy platform, as if it were installed."""
    folder = TESTS / "numpy_platform"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    site = tmp_path_factory.mktemp("site")
    metadata = site / "hp_platform_numpy-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {module}" for name, module in points.items())])
        for group, points in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups) + "\n")
    return [str(folder / "src"), str(site)]


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


CASES = "hp_cases"
"""The property of a report that holds [label, cases right, cases refused as declared]."""


@pytest.fixture
def count_cases(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """`count_cases(label, right, refused)`: cases that this test tried; the sums by label are shown at the end."""

    def count(label: str, right: int, refused: int = 0) -> None:
        record_property(CASES, [label, right, refused])

    return count


def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    """With -v, report the number of cases that a proof counted."""
    if not isinstance(report, pytest.TestReport):  # the report of a skipped module
        return None
    counts: list[Any] = [value for name, value in report.user_properties if name == CASES]
    if report.when != "call" or not report.passed or not counts:
        return None
    _, right, refused = counts[0]
    return "passed", ".", _counted(right, refused)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the cases of all proofs by their label."""
    everything = itertools.chain.from_iterable(terminalreporter.stats.values())
    reports = (report for report in everything if getattr(report, "when", None) == "call")
    properties = itertools.chain.from_iterable(report.user_properties for report in reports)
    totals: dict[str, tuple[int, int]] = {}
    for label, right, refused in (value for name, value in properties if name == CASES):
        before = totals.get(label, (0, 0))
        totals[label] = before[0] + right, before[1] + refused
    if totals:
        terminalreporter.section(f"cases of the proofs, share {config.getoption('--hp-share')}")
    for label, (right, refused) in totals.items():
        terminalreporter.write_line(f"{label}: {_counted(right, refused)}")


def _counted(right: int, refused: int) -> str:
    return f"{right:,} right" + (f", {refused:,} refused as declared" if refused else "")
