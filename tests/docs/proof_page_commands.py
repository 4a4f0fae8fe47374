"""The commands of the tour run in order, as printed, on the torch of this environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT
from test_page_commands import commands


def hp_train(*words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "hp_trainer", *words], check=True, capture_output=True, text=True, timeout=1800
    ).stdout


def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    hp_train("examples/moe_small.yaml", "--run.folder=runs/first")  # as `run.py train` does
    tour = [words for page, words in commands() if page.name == "tour.md"]
    assert len(tour) > 8
    for words in tour:
        # Names of runs are dates on the page.
        runs = sorted(Path("runs").iterdir(), key=lambda path: path.stat().st_mtime)
        words = [str(runs[-1]) if word.startswith("runs/moe_small-") else word for word in words]
        words = [str(runs[-1]) if word == "runs/second" else word for word in words]
        if words[0] == "resume":
            words = [
                *words,
                "--training.steps=245",
            ]  # the run before was not stopped by Ctrl-C: it goes on from its end
        hp_train(*words)
    assert (runs[-1] / "report.html").is_file()
