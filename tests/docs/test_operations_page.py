"""The pages of operations say what the sharding rules say."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from hp_dtensor.platform.interface import Platform

ROOT = Path(__file__).resolve().parents[2]


def _check(*arguments: str, tool: str = "operations_page.py") -> None:
    command = [sys.executable, str(ROOT / "tools" / tool), *arguments, "--check"]
    check = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (check.returncode, check.stdout) == (0, ""), check.stderr


@pytest.mark.usefixtures("torch_suffices")
def test_the_page_of_operations_is_current() -> None:
    _check()


@pytest.mark.usefixtures("torch_suffices")
def test_the_page_of_the_interface_is_current() -> None:
    _check(tool="interface_page.py")


@pytest.mark.usefixtures("torch_suffices")
def test_the_list_of_tables_is_current() -> None:
    _check("rules")


def test_the_page_of_the_platforms_names_is_current(hp_platform: Platform) -> None:
    page = (ROOT / "docs" / f"operations_{hp_platform.name}.md").read_text()
    described = re.search(r"Names in \w+ ([\d.]+) of", page).group(1)
    if metadata.version(hp_platform.name).split("+")[0] != described:
        pytest.skip(f"the page is of version {described}")
    _check(hp_platform.name)
