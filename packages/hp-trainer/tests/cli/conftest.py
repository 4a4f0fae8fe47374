"""Fixtures of the tests of `hp-train`: a folder with a configuration, and stand-ins for the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import GOOD

from hp_trainer import cli
from hp_trainer.cli import commands, train
from hp_trainer.registries import Registries


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: Registries) -> Path:
    """A working directory with a configuration and a corpus; training itself is not reached."""
    monkeypatch.chdir(tmp_path)
    # The line `reading run.yaml` before every message; tests of real runs read it.
    monkeypatch.setattr(commands, "_report_reading", lambda words: None)
    for name in ("RANK", "WORLD_SIZE", "MS_ROLE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.yaml").write_text(GOOD)
    (tmp_path / "corpus.txt").write_text("some text " * 100)
    return tmp_path


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that is refused, and return its message."""

    def error(*arguments: str) -> str:
        assert cli.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    return error


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Stands in for the ranks: notes the configuration and what `prepare` gives."""
    found: list[tuple] = []

    def train_run(config, path, prepare, choice="newest that fits", node=None) -> Path:
        checkpoint = prepare()
        (path / "samples.txt").write_text("after 7 steps: def main\n")
        found.append((config, path, checkpoint))
        return path

    monkeypatch.setattr(train, "launch_training", train_run)
    return found
