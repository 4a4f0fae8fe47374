"""A run folder belongs to one run."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from hp_trainer.config import TrainerConfig, parse_config
from hp_trainer.exceptions import RunFolderError
from hp_trainer.registries import Registries
from hp_trainer.run import RunFolder, default_run_folder


@pytest.fixture
def config(registered: Registries) -> TrainerConfig:
    text = "model: {name: tiny}\ntraining: {steps: 3}\n"
    return parse_config(text, [("generate.prompts", "['x: y']")], registered=registered).config


def test_a_new_run_has_its_configuration_and_an_identity(
    tmp_path: Path, config: TrainerConfig, registered: Registries
) -> None:
    folder = RunFolder.create(tmp_path / "runs" / "a", config)
    again = RunFolder.open(folder.path)
    assert again.run_id == folder.run_id
    assert again.load_config(registered=registered).config == config
    assert again.load_config([("training.steps", "9")], registered=registered).config.training.steps == 9
    assert RunFolder.create(tmp_path / "runs" / "b", config).run_id != folder.run_id


def test_the_folder_of_another_run_is_refused_with_the_ways_out(tmp_path: Path, config: TrainerConfig) -> None:
    run_id = RunFolder.create(tmp_path / "a", config).run_id
    with pytest.raises(RunFolderError) as caught:
        RunFolder.create(tmp_path / "a", config)
    assert str(caught.value) == (
        f"run folder {tmp_path / 'a'} has the run {run_id}; choose another with --run.folder=..., delete it, "
        f"or continue with `hp-train resume {tmp_path / 'a'}`"
    )


def test_files_that_are_no_run_are_not_touched(tmp_path: Path, config: TrainerConfig) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(RunFolderError, match="has files that do not belong to a run"):
        RunFolder.create(tmp_path / "mine", config)
    with pytest.raises(RunFolderError, match=r"is a file; choose another with --run.folder=\.\.\.$"):
        RunFolder.create(tmp_path / "mine" / "thesis.txt", config)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"


def test_an_empty_folder_will_do_and_so_does_one_that_is_only_locked(tmp_path: Path, config: TrainerConfig) -> None:
    (tmp_path / "lock.json").write_text("")
    # Of a job that was killed while it looked whether it may write here.
    (tmp_path / ".hp-train-x").write_text("")
    assert RunFolder.check_new(tmp_path) is None
    RunFolder.create(tmp_path, config).sweep()
    assert not (tmp_path / ".hp-train-x").exists()


def test_a_folder_without_a_run_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"has no run \(no run.json\)"):
        RunFolder.open(tmp_path)
    for damage in ("{", "[" * 100_000, "[]", "{}", '{"id": 3}', '{"id": ""}'):
        (tmp_path / "run.json").write_text(damage)
        with pytest.raises(RunFolderError, match=r"run.json is damaged"):
            RunFolder.open(tmp_path)
    (tmp_path / "run.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RunFolderError, match=r"run.json is damaged"):
        RunFolder.open(tmp_path)


def test_the_default_folder_is_named_after_the_configuration_and_the_time() -> None:
    when = datetime(2026, 3, 4, 5, 6, 7)
    assert default_run_folder(Path("examples/moe.yaml"), when) == Path("runs/moe-20260304-050607")


def test_of_two_runs_that_begin_at_once_one_gets_the_folder(
    tmp_path: Path, config: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunFolder.create(tmp_path / "a", config)
    monkeypatch.setattr(RunFolder, "check_new", lambda path: None)  # as both saw it
    with pytest.raises(RunFolderError, match="has just been taken by another run"):
        RunFolder.create(tmp_path / "a", config)
    assert RunFolder.open(tmp_path / "a").run_id == first.run_id


def test_nothing_is_left_of_a_run_folder_that_could_not_be_written(
    tmp_path: Path, config: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("hp_trainer.run.folder.write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        RunFolder.create(tmp_path / "a", config)
    assert list(tmp_path.iterdir()) == []
