"""`hp-train sweep`, `check` and `profile`: every combination once, all checked first, nothing started by a check."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import click
import pytest

from hp_trainer import cli
from hp_trainer._coordination import Interrupted
from hp_trainer.cli import train
from hp_trainer.cli.train import plan_sweep, profile_settings, split_values

GOOD = """\
model: {name: tiny}
data: {path: corpus.txt}
training: {steps: 4, sequence_length: 8}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MS_ROLE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.yaml").write_text(GOOD)
    (tmp_path / "corpus.txt").write_text("some text " * 100)
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1", ["1"]),
        ("1,2,3", ["1", "2", "3"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{name: a, b: 1},c", ["{name: a, b: 1}", "c"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("", [""]),
    ],
)
def test_values_are_split_outside_brackets_and_quotes(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_every_combination_is_one_run() -> None:
    overrides = [("optimizer.lr", "1,2"), ("training.seed", "0"), ("model.hidden_size", "8,16")]
    runs = plan_sweep(overrides, Path("base"))
    assert [path.name for path in runs] == [
        "000-lr=1-hidden_size=8",
        "001-lr=1-hidden_size=16",
        "002-lr=2-hidden_size=8",
        "003-lr=2-hidden_size=16",
    ]
    assert all(("training.seed", "0") in chosen for chosen in runs.values())


def test_sweep_without_several_values_is_refused() -> None:
    with pytest.raises(click.UsageError, match="several values"):
        plan_sweep([("optimizer.lr", "1")], Path("base"))


def test_nothing_trains_if_one_combination_could_not(config, monkeypatch, capsys) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a run was started"))
    assert cli.main(["sweep", str(config), "--training.global_batch_size=8,0"]) == 2
    assert "training.global_batch_size" in capsys.readouterr().err


def test_each_run_gets_its_settings_and_folder(config, monkeypatch, capsys) -> None:
    started: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], **options: object) -> None:
            started.append(command[5:])

        def wait(self) -> int:
            return int(len(started) == 2)  # the second one fails

    monkeypatch.setattr(subprocess, "Popen", Process)
    compared: list[list[Path]] = []
    monkeypatch.setattr(train, "compare_runs", lambda runs, to: compared.append(runs) or "table")
    command = ["sweep", str(config), "--optimizer.lr=0.1,0.2,0.3", "--run.folder=grid"]
    assert cli.main(command) == 1
    assert [each[1:] for each in started] == [
        [f"--optimizer.lr=0.{n + 1}", f"--run.folder=grid/00{n}-lr=0.{n + 1}"] for n in range(3)
    ]
    assert compared == [[Path("grid/000-lr=0.1"), Path("grid/002-lr=0.3")]]
    assert "grid/001-lr=0.2 failed" in capsys.readouterr().err


def test_signal_reaches_the_run_and_is_waited_for(config, monkeypatch) -> None:
    events: list[object] = []

    class Process:
        def __init__(self, command: list[str], **options: object) -> None:
            assert options["start_new_session"]

        def wait(self) -> int:
            events.append("wait")
            if len(events) in (1, 3):
                raise Interrupted(signal.SIGTERM)
            return 143

        def send_signal(self, number: int) -> None:
            events.append(signal.Signals(number).name)

    monkeypatch.setattr(subprocess, "Popen", Process)
    assert cli.main(["sweep", str(config), "--training.seed=1,2"]) == 143
    assert events == ["wait", "SIGTERM", "wait", "SIGTERM", "wait"]


def test_check_tells_what_would_be_trained(config, capsys, tmp_path) -> None:
    before = sorted(tmp_path.iterdir())
    assert cli.main(["check", str(config), "--world-size=4"]) == 0
    out = capsys.readouterr().out
    assert "model: tiny" in out
    assert "dp_shard=4" in out
    assert "8 samples of 8 tokens = 64 tokens" in out
    assert sorted(tmp_path.iterdir()) == before


def test_check_tells_every_problem(config, capsys) -> None:
    assert cli.main(["check", str(config), "--world-size=3", "--data.path=nowhere"]) == 2
    error = capsys.readouterr().err
    assert "2 problems" in error
    assert "training.global_batch_size" in error
    assert "data.path" in error
    assert cli.main(["check", str(config), "--world-size=0"]) == 2


def test_profile_is_a_run_up_to_the_last_profiled_step() -> None:
    settings = [("profile.first", "4"), ("profile.last", "5"), ("training.steps", "5"), ("generate.prompts", "[]")]
    assert profile_settings("4-5") == settings
    assert profile_settings("2")[:3] == [("profile.first", "2"), ("profile.last", "2"), ("training.steps", "2")]
    for bad in ("0", "5-", "a", "3-2-1"):
        with pytest.raises(click.UsageError, match="--steps: expected"):
            profile_settings(bad)


def test_settings_of_the_command_line_override_those_of_a_profile(config, monkeypatch) -> None:
    trained = []
    monkeypatch.setattr(train, "launch_training", lambda config, path, prepare, node: trained.append(config) or path)
    assert cli.main(["profile", str(config), "--steps=2", "--training.steps=9"]) == 0
    ((profile, steps),) = [(each.profile, each.training.steps) for each in trained]
    assert (profile.first, profile.last, steps) == (2, 2, 9)
