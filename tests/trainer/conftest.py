from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from running_commands import Command
from training_runs import CONFIG, Lab

from hp_trainer.plugins import plugin_manager

LEAVE_SECONDS = 20


@pytest.fixture
def lab(tmp_path: Path, hp_platform) -> Lab:
    """Runs in a temporary folder, on the platform under test."""
    return Lab(tmp_path, hp_platform)


@pytest.fixture
def plugged() -> Iterator[Callable[[object], None]]:
    """Registers a plugin with hp_trainer for the length of a test."""
    manager, added = plugin_manager(), []

    def plug(plugin: object) -> None:
        added.append(manager.register(plugin))

    yield plug
    for name in added:
        manager.unregister(name=name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a text and a configuration of four steps on two ranks."""
    letters = np.random.default_rng(3).choice(list("abcdefgh \n"), 4000)
    (tmp_path / "corpus.txt").write_text("".join(letters))
    (tmp_path / "run.yaml").write_text(CONFIG.format(text="corpus.txt"))
    return tmp_path


@pytest.fixture
def hp_train(folder: Path, hp_platform, fork_server, tmp_path_factory) -> Iterator[Callable[..., Command]]:
    """Starts `hp-train` in the folder; whatever it leaves running fails the test, and is killed.

    Its processes are forked from one that has imported the framework, unless they are `new`.
    """
    started: list[Command] = []
    records = tmp_path_factory.mktemp("forked")

    def start(
        *arguments: str, launcher: tuple[str, ...] = (), new: bool = False, variables: dict[str, str] | None = None
    ) -> Command:
        options = {"launcher": launcher, "popen": subprocess.Popen if new else fork_server.popen}
        started.append(Command(folder, hp_platform.name, *arguments, records=records, variables=variables, **options))
        return started[-1]

    yield start
    # Those that are killed with their rank may need a moment to end.
    deadline = time.monotonic() + LEAVE_SECONDS
    while any(command.processes() for command in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = {pid: command.line_of(pid) for command in started for pid in command.processes()}
    for command in started:
        command.kill_everything()
    assert left == {}, "processes were left running"
