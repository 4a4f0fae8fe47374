"""Shell completion of `hp-train`, by the protocol in which a shell asks for it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import make_run

from hp_trainer import cli

Complete = Callable[..., list[str]]


@pytest.fixture
def complete(work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Complete:
    """Return the candidates for the last word of a command line, in a shell."""

    def complete(line: str, shell: str = "fish") -> list[str]:
        words = line.split(" ")
        monkeypatch.setenv("_HP_TRAIN_COMPLETE", f"{shell}_complete")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", words[-1] if shell == "fish" else str(len(words) - 1))
        assert cli.main([]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        if shell == "zsh":  # type, value and help on lines of their own
            return captured.out.splitlines()[1::3]
        return [each.partition(",")[2].partition("\t")[0] for each in captured.out.splitlines() if each]

    return complete


def test_commands_and_files_are_completed(work: Path, complete: Complete) -> None:
    assert complete("hp-train re") == ["resume", "report"]
    assert complete("hp-train ru") == ["run", "run.yaml"]
    assert "check" in complete("hp-train ")
    (work / "configs").mkdir()
    (work / "configs" / "a.yml").write_text("")
    assert complete("hp-train check ") == ["configs/a.yml", "run.yaml"]
    assert complete("hp-train check conf") == complete("hp-train conf") == ["configs/a.yml"]
    make_run(work)
    assert complete("hp-train resume ") == ["out"]
    assert complete("hp-train compare out o") == ["out"]


def test_options_are_completed(complete: Complete) -> None:
    assert complete("hp-train plan run.yaml --device") == ["--device", "--device-memory"]
    assert complete("hp-train plan run.yaml --w") == ["--world-size"]
    assert complete("hp-train schedule zero_bubble_") == ["zero_bubble_h1", "zero_bubble_v"]
    assert complete("hp-train schedule gpipe --show a") == ["actions"]
    assert complete("hp-train export out --lora=a") == ["--lora=adapter"]


def test_settings_are_completed_by_section(complete: Complete) -> None:
    assert complete("hp-train run.yaml --training.st") == ["--training.steps"]
    assert complete("hp-train resume out --training.seed 3 --training.st") == ["--training.steps"]
    assert complete("hp-train run.yaml --mod")[:2] == ["--model.name", "--model.from"]
    sections = complete("hp-train run.yaml --")
    assert {"--model.", "--training.", "--traceback"} <= set(sections)
    assert not any(name.startswith("--model.h") for name in sections)
    assert complete("hp-train settings tra")[0] == "training.steps"
    assert complete("hp-train report out --training.st") == [], "a command without settings"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_values_are_completed(complete: Complete, shell: str) -> None:
    # bash passes an equals sign as a word of its own, and replaces only the word after it.
    equals, before = (" = ", "") if shell == "bash" else ("=", "--training.compile=")
    assert complete(f"hp-train run.yaml --training.compile{equals}t", shell) == [f"{before}true"]
    assert complete("hp-train run.yaml --training.compile t", shell) == ["true"]
    assert complete(f"hp-train check --training.compile{equals}f", shell) == [f"{before}false"], "before the file"
    assert complete(f"hp-train check --training.seed{equals}3 ru", shell) == ["run.yaml"]
    before = "" if shell == "bash" else "--weights="
    assert complete(f"hp-train evaluate out --weights{equals}e", shell) == [f"{before}ema"]
    assert complete("hp-train run.yaml --data.name t", shell) == ["text"]


def test_a_shell_completes_other_values_itself(complete: Complete) -> None:
    assert complete("hp-train run.yaml --data.path co") == ["co"]
    assert complete("hp-train check nowhere/x") == ["nowhere/x"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_files_after_an_equals_sign_are_completed(work: Path, complete: Complete, shell: str) -> None:
    """As full words: these shells complete only words that are paths."""
    (work / "corpora").mkdir()
    assert complete("hp-train run.yaml --data.path=co", shell) == ["--data.path=corpora/", "--data.path=corpus.txt"]
    assert complete("hp-train run.yaml --data.path=nowhere", shell) == []


def test_fish_shows_help_with_commas(work: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("_HP_TRAIN_COMPLETE", "fish_source")
    assert cli.main([]) == 0
    assert 'string split --max 1 "," $completion' in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script(work: Path, monkeypatch: pytest.MonkeyPatch, capsys, shell: str) -> None:
    monkeypatch.setenv("_HP_TRAIN_COMPLETE", f"{shell}_source")
    assert cli.main([]) == 0
    script = capsys.readouterr().out
    assert f"_HP_TRAIN_COMPLETE={shell}_complete" in script
    if shutil.which(shell):
        check = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, check=False)
        assert (check.returncode, check.stderr) == (0, "")
