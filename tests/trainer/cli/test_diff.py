"""`hp-train diff`: its sides, what it trains, and its answer."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from injected_faults import RECORDED
from training_runs import CONFIG, Lab, train_rank

from hp_dtensor.debug import Digest, Event, Recording
from hp_dtensor.debug.digest import LENGTH
from hp_dtensor.testing import run_ranks
from hp_trainer.cli import diff, main
from hp_trainer.config import load_config
from hp_trainer.plugins import registries
from hp_trainer.run import create_run


@pytest.fixture
def trained(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Sides train on simulated ranks of this process; the settings of each run."""
    runs: list[tuple[str, ...]] = []

    def record(side: diff.Side, folder: Path, steps: int, more: Any = ()) -> Recording:
        settings = [*side.overrides, ("training.record_steps", str(steps)), ("training.record_only", "true"), *more]
        runs.append(tuple(f"{name}={value}" for name, value in settings))
        config = load_config(side.config, settings, registered=registries()).config
        run = create_run(folder, config)
        run_ranks(train_rank, config.launch.local_ranks or 1, lab.platform, run, lab.platform)
        return Recording.load(run.digests_file)

    monkeypatch.setattr(diff.Side, "record", record)
    return runs


@pytest.fixture
def config(lab: Lab) -> str:
    path = lab.folder / "run.yaml"
    path.write_text(CONFIG.format(text=lab.text))
    return str(path)


@pytest.mark.usefixtures("torch_suffices")
def test_settings_are_for_both_sides_or_for_one(config: str, trained: Any, capsys: Any, tmp_path: Path) -> None:
    arguments = [
        "--steps=2",
        "--training.seed=3",
        "--b.launch.local_ranks=2",
        "--b.parallel.tp=2",
        "--b.parallel.etp=1",
    ]
    assert main(["diff", config, *arguments, f"--record={tmp_path / 'a.gz'}"]) == 0
    out = capsys.readouterr().out
    assert "B: torch, decoder, tp=2, 2 ranks, float32" in out
    assert "within rounding: " in out
    first, second, third = trained
    assert first[0] == second[0] == third[0] == "training.seed=3"
    assert "parallel.tp=2" in second
    assert "parallel.tp=2" not in first
    assert third[-1] == f"training.perturb_weights={2.0**-24!r}"
    # The file knows how rounding grows, so that only one run is needed now.
    assert main(["diff", str(tmp_path / "a.gz"), config, "--training.seed=3", "--steps=2"]) == 0
    assert len(trained) == 4


@pytest.mark.usefixtures("torch_suffices")
def test_a_difference_has_exit_code_1_and_a_picture(config: str, trained: Any, capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "difference.svg"
    assert main(["diff", config, "--steps=1", "--b.optimizer.lr=1e-3", f"--to={picture}"]) == 1
    out = capsys.readouterr().out
    assert "different from step 1, update of embed.weight on" in out
    assert "B is 0.2 times A" in out
    assert len(trained) == 3
    assert "<svg" in picture.read_text()


@pytest.mark.usefixtures("torch_suffices")
def test_a_recorded_run_is_not_trained_again(lab: Lab, config: str, trained: Any) -> None:
    run = lab.run("recorded", None, 1, **RECORDED)
    assert main(["diff", str(run.path), config, "--steps=2"]) == 0
    # B, and the growth of rounding, from B too.
    assert len(trained) == 2


def test_missing_sources_and_failing_runs_are_told(config: str, capsys: Any, tmp_path: Path) -> None:
    assert main(["diff", "missing.yaml"]) == 2
    assert "missing.yaml does not exist" in capsys.readouterr().err
    # Not the code of a difference.
    assert main(["diff", config, "--steps=1", "--b.python=/no/python", "--a.python=/no/python"]) == 2
    assert "/no/python is no interpreter" in capsys.readouterr().err


def test_two_files_without_growth_are_refused(capsys: Any, tmp_path: Path) -> None:
    event = Event("forward", "head", "float32", Digest((1,), np.ones(LENGTH)))
    Recording({"dtypes": ["float32"]}, {1: [event]}).save(tmp_path / "a.gz")
    assert main(["diff", str(tmp_path / "a.gz"), str(tmp_path / "a.gz")]) == 2
    assert "neither recording knows how rounding grows" in capsys.readouterr().err


@pytest.mark.real_ranks
def test_sides_are_trained_by_processes_of_their_own(
    config: str, hp_platform: Any, capsys: Any, fork_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--steps=1", f"--platform={hp_platform.name}", "--launch.local_ranks=1", "--b.training.micro_batch_size=4"]
    if hp_platform.name != "torch":
        pytest.skip("one platform is enough: the platform's part is that of every run")
    started: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return fork_server.run(command, 300)

    monkeypatch.setattr(diff.subprocess, "run", run)
    assert main(["diff", config, *words]) == 0
    assert "within rounding" in capsys.readouterr().out
    assert len(started) == 3, "each side, and one of them with perturbed weights"
