"""Ctrl-C while `hp-train` still imports its modules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SLOW_MODULE = """\
import pathlib, time
pathlib.Path("importing").touch()
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Ctrl-C is not ignored, as it is under nohup, which the commands would inherit."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which the import of NumPy takes a minute, and prints that it has started."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "numpy.py").write_text(SLOW_MODULE)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "slow"), os.environ.get("PYTHONPATH", "")])}


def interrupted(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not (folder / "importing").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def test_the_command_ends_by_the_signal_without_a_traceback(tmp_path: Path, environment: dict[str, str]) -> None:
    # A shell reports it as 130.
    command = [sys.executable, "-m", "hp_trainer", "--version"]
    assert interrupted(command, tmp_path, environment) == (-signal.SIGINT, "")


def test_a_program_that_imports_the_package_keeps_its_own_way(tmp_path: Path, environment: dict[str, str]) -> None:
    code, errors = interrupted([sys.executable, "-c", "import hp_trainer.parallel"], tmp_path, environment)
    assert "KeyboardInterrupt" in errors
    assert code == -signal.SIGINT
