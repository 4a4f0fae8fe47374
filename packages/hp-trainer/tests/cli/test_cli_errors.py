"""Errors of `hp-train`: one line with what to do, where the error is not our own."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.launch import rank_process
from hp_trainer import cli
from hp_trainer.cli import train
from hp_trainer.cli.commands import COMMANDS
from hp_trainer.exceptions import ParallelDimsError, Problem, describe_machine_error


def test_a_word_that_is_no_command_is_told_the_nearest(work: Path, error) -> None:
    assert error("resme", "out") == (
        "hp-train: there is no command or file 'resme'; did you mean `hp-train resume`?\n"
        "Usage: hp-train {CONFIG | COMMAND} ...\n"
        "Try 'hp-train --help'.\n"
    )
    assert "did you mean `hp-train layouts`?" in error("layout")
    assert "'trian'; did you mean `hp-train train`?" in error("trian", "run.yaml")
    assert "'frobnicate'; commands are: check, checkpoints, compare," in error("frobnicate", "run.yaml")
    assert "cannot be read" in error("resume.yaml"), "a file that is not there"


def test_all_problems_of_usage_are_told_at_once(work: Path, error) -> None:
    assert error("export", "--dtype=float", "--file-bytes=0") == (
        "hp-train: Missing argument 'RUN'.\n"
        "Missing option '--to'.\n"
        "Invalid value for '--dtype': 'float' is not one of 'float32', 'bfloat16', 'float16'.\n"
        "Invalid value for '--file-bytes': 0 is not in the range x>=1.\n"
        "Usage: hp-train export [OPTIONS] RUN [--section.setting=value]...\n"
        "Try 'hp-train export --help'.\n"
    )


def test_a_command_without_settings_refuses_them(work: Path, error) -> None:
    assert error("report", "out", "--optimizer.lr=1").startswith(
        "hp-train: report accepts no settings, got --optimizer.lr\n"
    )
    # A setting has a dot, or is far from the options of the command.
    assert "No such option '--world-sise'. Did you mean '--world-size'?" in error("plan", "run.yaml", "--world-sise=3")
    assert "--platfrm: platfrm: unknown key" in error("check", "run.yaml", "--platfrm=torch")


def test_torchrun_is_told_the_error_that_it_prints_last(work: Path, error, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(work / "error.json"))
    expected_message = error("run.yaml", "--training.stpes=3")
    written = json.loads((work / "error.json").read_text())["message"]
    assert written["message"] == written["extraInfo"]["py_callstack"] == expected_message.removesuffix("\n")
    assert int(written["extraInfo"]["timestamp"]) > 0


def test_a_full_disk_is_told_with_what_to_do(work: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(config, path, prepare, node) -> Path:
        raise OSError(28, "No space left on device", "out/run.json")

    monkeypatch.setattr(train, "launch_training", full)
    assert cli.main(["run.yaml"]) == 1
    expected_message = capsys.readouterr().err
    assert expected_message == "hp-train: out/run.json: the disk is full (No space left on device); free some space\n"


@pytest.mark.parametrize(
    ("error", "expected_message"),
    [
        (PermissionError(13, "Permission denied", "out"), "out: permission denied (Permission denied); "),
        (OSError(30, "Read-only file system", "out"), "out: the file system is read-only (Read-only file system); "),
        (OSError(122, "Disk quota exceeded", "out"), "out: your disk quota is used up (Disk quota exceeded); "),
        (OSError(5, "Input/output error"), "the disk or the network file system failed (Input/output error); "),
        (MemoryError(), "the memory is used up: an allocation failed; use more memory or ranks, "),
        (MemoryError("Unable to allocate 1 TiB"), "the memory is used up: Unable to allocate 1 TiB; "),
        (ImportError("x.so: cannot allocate memory"), "the memory is used up: x.so: cannot allocate memory; "),
        (OSError("something else"), "something else\n"),
    ],
)
def test_errors_of_the_machine_are_one_line(
    work: Path, capsys, monkeypatch: pytest.MonkeyPatch, error: Exception, expected_message: str
) -> None:
    def fail(config, path, prepare, node) -> Path:
        raise error

    monkeypatch.setattr(train, "launch_training", fail)
    assert cli.main(["run.yaml"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"hp-train: {expected_message}")
    assert shown.count("\n") == 1


def test_other_errors_keep_their_traceback(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config, path, prepare, node) -> Path:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(train, "launch_training", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        cli.main(["run.yaml"])
    assert describe_machine_error(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert describe_machine_error(RuntimeError("a mistake of ours")) is None
    assert describe_machine_error(LaunchError("rank 0 was killed; the machine may have run out of memory")) is None


def test_variables_of_a_launcher_that_make_no_sense_are_told(
    work: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert cli.main(["run.yaml"]) == 1
    assert "MASTER_ADDR is not set" in capsys.readouterr().err


def test_each_rank_of_a_launcher_tells_what_only_it_may_have_found(
    work: Path, prepared: list, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run.yaml", "--parallel.tp=3"]) == 2
    assert capsys.readouterr().err == "", "rank 0 finds the same"
    assert cli.main(["resume", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("hp-train: rank 1: nothing has no run")
    # The folder and the data are looked at by the rank that prepares the run, when the others can hear of it.
    monkeypatch.setenv("RANK", "0")
    (work / "corpus.txt").unlink()
    monkeypatch.setattr(train, "launch_training", lambda config, path, prepare, node: prepare())
    assert cli.main(["run.yaml"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_file_that_calls_sys_exit_has_failed(work: Path, capsys) -> None:
    (work / "own.py").write_text("import sys\nsys.exit(0)\n")
    assert cli.main(["run.yaml", "--data.name=own.py:Text"]) == 1
    expected_message = (
        f"something left with SystemExit(0) before its work was done, called at {work}/own.py:2; raise an error"
    )
    assert expected_message in capsys.readouterr().err


def test_the_process_that_msrun_starts_beside_the_ranks_may_leave(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8118", "MS_NODE_ID": "0"}
    for name, value in {**hosts, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train, "launch_training", lambda *arguments, node: sys.exit(0))
    with pytest.raises(SystemExit, match="0"):
        cli.main(["run.yaml"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a CONFIG or a command"),
        (["layouts"], "layouts needs a CONFIG, or a --world-size without settings"),
        (
            ["layouts", "--world-size=0"],
            "Invalid value for '--world-size': 0 is not in the range 1<=x<=10000000.",
        ),
        (["layouts", "--world-size=x"], "Invalid value for '--world-size': 'x' is not a valid integer range."),
        (["resume"], "Missing argument 'RUN'."),
        (["a.yaml", "b.yaml"], "Got unexpected extra argument 'b.yaml'."),
        (["a.yaml", "--training.steps"], "--training.steps needs a value: --training.steps=..."),
        (["--training.steps=1"], "Missing argument 'CONFIG'."),
        (["a.yaml", "--", "--training.steps=1"], "Got unexpected extra argument '--training.steps=1'."),
        (["compare", "a"], "compare needs at least two runs"),
        (["import", "a"], "import needs either --run=RUN or --to=DIR"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_told(error, installed, arguments: list[str], message: str) -> None:
    expected_message, usage, advice = error(*arguments).splitlines()
    assert expected_message == f"hp-train: {message}"
    name = arguments[0] if arguments and arguments[0] in COMMANDS else "train" if arguments else ""
    assert usage.startswith(f"Usage: hp-train {name}")
    assert advice == f"Try 'hp-train {name} --help'.".replace("  ", " ")


def test_a_traceback_is_shown_on_request(work: Path, error) -> None:
    assert "Traceback" not in error("resume", "out")
    shown = error("resume", "out", "--traceback")
    assert shown.startswith("Traceback (most recent call last):\n")
    assert shown.splitlines()[-1] == error("resume", "out").removesuffix("\n")


def test_problems_that_a_rank_finds_are_reported_apart_from_its_traceback():
    sent = []
    problem = Problem(path="parallel.dp_replicate", what="leaves weights out")
    rank_process._report(SimpleNamespace(send=sent.append), "run", ParallelDimsError([problem], "parallel"))
    assert sent[0].kind == "ParallelDimsError"
    assert "parallel.dp_replicate: leaves weights out" in sent[0].what
    assert not sent[0].needs_traceback  # only `--traceback` shows it


def test_a_file_that_cannot_be_imported_is_imported_once(work: Path, error) -> None:
    (work / "own.py").write_text("with open('imports', 'a') as file: file.write('x')\nraise OSError('no device')\n")
    text = (work / "run.yaml").read_text()
    (work / "run.yaml").write_text(text.replace("name: tiny", "name: own.py:build"))
    message = "own.py cannot be imported: line 2: OSError('no device')"
    assert message in error("run.yaml", "--training.steps=3")
    assert (work / "imports").read_text() == "x"
    # Changed, it is imported again: a notebook stays open. Another spelling is the same file.
    (work / "own.py").write_text("open('imports', 'a').write('y')\ndef build(): ...\ndef data(): ...\n")
    os.utime(work / "own.py", (1, 1))
    (work / "inner").mkdir()
    assert cli.main(["check", "run.yaml", "--data.name=inner/../own.py:data", "--data.path=null"]) == 2
    assert (work / "imports").read_text() == "xy"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "class Thing: ...\n@dataclass\nclass Options:\n    width: int = 1\n    thing: Thing | None = None\n"
            "def build(options: Options): ...",
            r"model.name: hp_user_own_\w+.Options: expected fields that a setting can have \(bool, int, float, str, "
            r"Literal, tuple, dict, None, or another section\), got thing: hp_user_own_\w+.Thing | None\n",
        ),
        (
            "class Thing: ...\n@section\nclass Options:\n    thing: Thing\ndef build(options: Options): ...",
            r"own.py cannot be imported: line 4: TypeError\(.*Options: expected .*, got thing: <class '.*Thing'>",
        ),
        (
            "@dataclass\nclass Options:\n    thing: 'Missing'\ndef build(options: Options): ...",
            r"model.name: hp_user_own_\w+.Options: expected fields that a setting can have .*, got thing: Missing",
        ),
        ("def build(options: 'Missing'): ...", r"own.py:build: its annotations cannot be evaluated: NameError\("),
    ],
    ids=["dataclass", "section", "missing", "builder"],
)
def test_types_that_no_setting_can_have_are_named(work: Path, error, text: str, message: str) -> None:
    head = "from dataclasses import dataclass\nfrom hp_trainer.config import section\n"
    (work / "own.py").write_text(head + text)
    settings = (work / "run.yaml").read_text()
    (work / "run.yaml").write_text(settings.replace("name: tiny", "name: own.py:build"))
    found = error("run.yaml")
    assert re.search(message, found), found
    assert found.startswith("hp-train: run.yaml: 1 problem\n")
