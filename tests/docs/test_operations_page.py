"""The pages of operations say what the sharding rules say."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from hp_dtensor.launch.fork_server import ForkServer
from hp_dtensor.platform.interface import Platform

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def check_page(fork_server: ForkServer) -> Callable[..., None]:
    """Checks a page with its tool, in a process that is forked, as each new one would import the framework."""

    def check(*arguments: str, tool: str = "operations_page.py") -> None:
        command = [sys.executable, str(ROOT / "tools" / tool), *arguments, "--check"]
        done = fork_server.run(command, 300)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr

    return check


@pytest.mark.usefixtures("torch_suffices")
def test_the_page_of_operations_is_current(check_page: Callable[..., None]) -> None:
    check_page()


@pytest.mark.usefixtures("torch_suffices")
def test_the_page_of_the_interface_is_current(check_page: Callable[..., None]) -> None:
    check_page(tool="interface_page.py")


@pytest.mark.usefixtures("torch_suffices")
def test_the_list_of_tables_is_current(check_page: Callable[..., None]) -> None:
    check_page("rules")


def test_the_page_of_the_platforms_names_is_current(hp_platform: Platform, check_page: Callable[..., None]) -> None:
    page = (ROOT / "docs" / f"operations_{hp_platform.name}.md").read_text()
    described = re.search(r"Names in \w+ ([\d.]+) of", page).group(1)
    if metadata.version(hp_platform.name).split("+")[0] != described:
        pytest.skip(f"the page is of version {described}")
    check_page(hp_platform.name)
